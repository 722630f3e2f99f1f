"""SimCLR with lightly or with solo-learn: their transforms and losses in the loop that lightly's documents show.

solo-learn 1.0.2 requires torch 1.9.1 and Lightning 1.4.7, which have no build for this Python. Its transforms and its
loss need neither, so they are loaded from their files, without its package.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import ssl_task
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SOURCES = Path(__file__).parents[4] / "shared/src"
Loss = Callable[[Tensor, Tensor], Tensor]


def lightly() -> tuple[Callable[[Image.Image], list[Tensor]], Loss]:
    from lightly.loss import NTXentLoss
    from lightly.transforms import SimCLRTransform

    transform = SimCLRTransform(
        input_size=32, cj_prob=ssl_task.JITTERED, cj_strength=1.0, cj_bright=ssl_task.JITTER,
        cj_contrast=ssl_task.JITTER, cj_sat=ssl_task.JITTER, cj_hue=ssl_task.HUE, min_scale=ssl_task.MIN_SCALE,
        random_gray_scale=ssl_task.GREYSCALE, gaussian_blur=0.0,
        normalize={"mean": list(ssl_task.MEAN), "std": list(ssl_task.STD)},
    )  # fmt: skip
    return transform, NTXentLoss(temperature=ssl_task.TEMPERATURE)


def solo() -> tuple[Callable[[Image.Image], list[Tensor]], Loss]:
    data, losses = _solo_file("utils/pretrain_dataloader.py"), _solo_file("losses/simclr.py")
    transform = data.CifarTransform(
        ssl_task.JITTER, ssl_task.JITTER, ssl_task.JITTER, ssl_task.HUE, color_jitter_prob=ssl_task.JITTERED,
        gray_scale_prob=ssl_task.GREYSCALE, gaussian_prob=0.0, min_scale=ssl_task.MIN_SCALE,
    )  # fmt: skip
    loss = losses.simclr_loss_func
    return data.NCropAugmentation(transform, 2), lambda z1, z2: loss(z1, z2, temperature=ssl_task.TEMPERATURE)


def _solo_file(path: str) -> ModuleType:
    root = importlib.util.find_spec("solo")  # this does not run the package
    assert root is not None
    assert root.submodule_search_locations is not None
    return _run_file(Path(root.submodule_search_locations[0]) / path)


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Images(Dataset):
    def __init__(self, folder: Path, transform: Callable[[Image.Image], list[Tensor]]) -> None:
        self.images, self.transform = ssl_task.images(folder).transpose(0, 2, 3, 1), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.transform(Image.fromarray(self.images[index]))


def main() -> None:
    folder, library = ssl_task.from_command_line()
    _run_file(SOURCES / "fedssl/models/torchvision_guard.py").import_torchvision()  # torchvision with a CPU's torch
    transform, loss = {"lightly": lightly, "solo": solo}[library]()
    network = ssl_task.Network(folder)
    optimizer = torch.optim.SGD(
        network.parameters(), ssl_task.LEARNING_RATE, ssl_task.MOMENTUM, weight_decay=ssl_task.WEIGHT_DECAY
    )
    loader = DataLoader(Images(folder, transform), ssl_task.BATCH, shuffle=True, drop_last=True)

    def epochs() -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    batches = epochs()
    prepared = next(batches)

    def take_step(views: list[Tensor]) -> None:
        optimizer.zero_grad()
        loss(network(views[0]), network(views[1])).backward()
        optimizer.step()

    def train(number: int) -> None:
        for views in itertools.islice(batches, number):
            take_step(views)

    ssl_task.serve(
        step=lambda number: [take_step(prepared) for _ in range(number)],
        augment=lambda number: [None for _ in itertools.islice(batches, number)],
        train=train,
        weights=network.state_dict,
    )


if __name__ == "__main__":
    main()
