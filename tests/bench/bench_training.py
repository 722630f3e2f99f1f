"""How much of a CPU local training uses, next to a bare loop. For a GPU see `bench_training_gpu.py`.

    python tests/bench/bench_training.py                these, and clients that share modules
    python tests/bench/bench_training.py encoders       each family of encoders, on a CPU, in short rounds
    python tests/bench/bench_training.py long all       the same in rounds of 40 steps, one thread (or names of them)
    make bench ARGS="-k training -s"                    the same, asserted

On a CPU a whole round of the engine (indexing, augmentation, objective, optimiser, progress, its start and its end)
takes turns with the shortest loop that trains the same model by the same loss on tensors made beforehand. Then, on a
CPU or on a GPU, clients that share modules take turns with clients that build their own.
"""

import dataclasses
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedssl.engine import LocalProgress, release_trainer, run_local_round, start_run
from fedssl.losses import alignment, nt_xent, uniformity
from fedssl.methods import METHODS, BoundMethod, Method
from fedssl.methods.api import ClientData, Context
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.server import ServerAlgorithm
from fedssl.methods.merges.overwrite import OVERWRITE
from fedssl.methods.objectives.simclr import SimCLR
from fedssl.methods.reducers.means import mean
from fedssl.models import import_torchvision
from fedssl.models.encoders import Encoder
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig
from fedssl.protocol.methods.reducers import MeanConfig
from fedssl.protocol.runs import RunSpec

LEAST_OF_BARE_LOOP = 0.9
TURNS, THREADS = 7, 2
LONG_SIZES = {"resnet18": 16, "vit-tiny": 16}
"""Pixels of the encoders that would take minutes per long round of larger images on one thread."""


class NarrowResNet(Encoder):
    """ResNet-18 with the stem for small images and an eighth of the channels, which a CPU can train."""

    def __init__(self, channels: int, widths: tuple[int, ...] = (8, 16, 32, 64)) -> None:
        super().__init__()
        block, layers, before = import_torchvision().models.resnet.BasicBlock, [], widths[0]
        for width in widths:
            stride = 1 if width == widths[0] else 2
            change = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            layers += [block(before, width, stride, change if stride > 1 else None), block(width, width)]
            before = width
        stem = [nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
        self.layers = nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.feature_dim = widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


@dataclass(frozen=True)
class NarrowClient(ClientAlgorithm):
    """FedSimCLR's client with NarrowResNet, which no spec can name. The spec's encoder must be as wide."""

    def modules(self, ctx: Context) -> nn.ModuleDict:
        modules = ClientAlgorithm.modules(self, ctx)
        modules["encoder"] = NarrowResNet(ctx.spec.data.channels)
        return modules


def narrow_method() -> Method:
    """Return FedSimCLR with the narrow ResNet."""

    def bind(spec: RunSpec) -> BoundMethod:
        assert isinstance(spec.method, FedSimCLRConfig)
        client = NarrowClient(SimCLR(spec.method), OVERWRITE)
        return BoundMethod(spec, client, ServerAlgorithm(client, mean(MeanConfig()), spec))

    return dataclasses.replace(METHODS["fedsimclr"], bind=bind)


def contrast(z1_BD: Tensor, z2_BD: Tensor) -> Tensor:
    """Return FedSimCLR's loss."""
    return nt_xent(z1_BD, z2_BD, 0.1)


def align_and_spread(z1_BD: Tensor, z2_BD: Tensor) -> Tensor:
    """Return FedAlignUniform's loss."""
    return alignment(z1_BD, z2_BD) + (uniformity(z1_BD) + uniformity(z2_BD)) / 2


@dataclass(frozen=True)
class Case:
    """A round to measure: `num_steps` batches of random images."""

    name: str
    method: Method
    loss: Callable[[Tensor, Tensor], Tensor]
    spec: RunSpec
    num_steps: int

    @property
    def num_images(self) -> int:
        return self.num_steps * self.spec.training.batch_size

    def context(self, device: torch.device, number: int = 1, client: str = "client-0") -> Context:
        return Context(spec=self.spec, round_number=number, client_id=client, device=device)

    def images(self, device: torch.device, num_images: int | None = None) -> ClientData:
        size, generator = self.spec.data.image_size, torch.Generator().manual_seed(0)
        shape = (num_images or self.num_images, self.spec.data.channels, size, size)
        return ClientData(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device))


def spec_of(name: str, encoder: dict[str, Any], channels: int, size: int, batch_size: int, **training: Any) -> RunSpec:
    """Return a spec of one method, whose projector is as wide as SimCLR's on small images."""
    return RunSpec.model_validate(
        {
            "num_rounds": 200,
            "method": {"name": name},
            "model": {"encoder": encoder, "projector": {"hidden_dims": [256], "out_dim": 128}},
            "data": {"channels": channels, "image_size": size},
            "training": {"batch_size": batch_size, **training},
        }
    )


def cpu_cases() -> list[Case]:
    """Return the cases for a CPU.

    They are a ConvNet 32-64-128-256 of stride 2 on grey images of 28 pixels, and a narrow ResNet-18 on colour of 32.
    """
    simclr, uniform = (spec_of(name, {}, 1, 28, 128) for name in ("fedsimclr", "fedalignuniform"))
    narrow = spec_of("fedsimclr", {"widths": [8, 16, 32, 64]}, 3, 32, 128)
    return [
        Case("ConvNet 28x28x1, FedSimCLR", METHODS["fedsimclr"], contrast, simclr, 20),
        Case("ConvNet 28x28x1, FedAlignUniform", METHODS["fedalignuniform"], align_and_spread, uniform, 20),
        Case("narrow ResNet-18 32x32x3, FedSimCLR", narrow_method(), contrast, narrow, 16),
    ]


def encoder_cases(num_steps: int, sizes: Mapping[str, int]) -> list[Case]:
    """Return one case per family of encoders, with colour images of 32 pixels or those in `sizes`, in small batches."""
    timm = {"name": "timm:resnet10t", "timm_version": importlib.metadata.version("timm"), "timm_width": 512}
    encoders = [{"name": name} for name in ("convnet", "resnet18", "convnext-tiny")]
    cases = []
    for encoder in (*encoders, {"name": "vit-tiny", "patch_size": 4}, timm):
        size = sizes.get(str(encoder["name"]), 32)
        spec = spec_of("fedsimclr", encoder, 3, size, 8)
        name = f"{spec.model.encoder.name} {size}x{size}x3"
        cases.append(Case(name, METHODS["fedsimclr"], contrast, spec, num_steps))
    return cases


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock time of some work, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def bare_loop(case: Case) -> Callable[[], None]:
    """Return a loop that trains the case's model with as little Python as possible, on tensors made beforehand."""
    ctx = case.context(torch.device("cpu"))
    modules = case.method.bind(case.spec).client.build(ctx).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network = nn.Sequential(modules["encoder"], modules["projector"])
    config = case.spec.training.optimizer
    optimizer = torch.optim.SGD(
        network.parameters(), config.learning_rate, config.momentum, weight_decay=config.weight_decay
    )
    shape = (2 * case.spec.training.batch_size, *case.images(ctx.device, 1).images.shape[1:])
    batches = [torch.rand(shape).to(memory_format=torch.channels_last) for _ in range(4)]

    def loop() -> None:
        for step in range(case.num_steps):
            z1, z2 = network(batches[step % len(batches)]).chunk(2)
            optimizer.zero_grad()
            case.loss(z1, z2).backward()
            optimizer.step()

    return loop


def engine_round(case: Case, device: torch.device, progress: list[LocalProgress]) -> Callable[[], None]:
    """Return a function that trains a round as clients do."""
    broadcast = start_run(case.method, case.context(device, 0, "")).received
    data = case.images(device)

    def work() -> None:
        run_local_round(case.method, broadcast, None, data, case.context(device), progress.append)

    return work


@dataclass(frozen=True)
class CPULine:
    """A case's rates in images per second, and the median of the turns' ratios."""

    name: str
    engine: float
    bare: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.name:<38}{self.engine:>10,.0f}{self.bare:>12,.0f}{self.ratio:>10.3f}"


def measure_cpu(case: Case, num_turns: int = TURNS) -> CPULine:
    """Measure the engine and the bare loop in turns."""
    device, progress = torch.device("cpu"), list[LocalProgress]()
    engine, bare = engine_round(case, device, progress), bare_loop(case)
    for warm_up in (engine, bare):
        warm_up()
    turns = [(seconds(engine, device), seconds(bare, device)) for _ in range(num_turns)]
    assert progress[-1].step == case.num_steps
    fastest = [case.num_images / min(turn) for turn in zip(*turns, strict=True)]
    return CPULine(case.name, *fastest, statistics.median(b / a for a, b in turns))


def cpu_table(lines: Iterable[CPULine]) -> str:
    """Return the table as text."""
    head = f"{'images/s, best of all turns':<38}{'engine':>10}{'bare loop':>12}{'median':>10}"
    return "\n".join([head, *map(str, lines), f"{torch.get_num_threads()} threads"])


def measure_clients(device: torch.device, num_clients: int = 8) -> tuple[float, float]:
    """Return the images per second of small clients one after the other, sharing modules and building their own."""
    spec = spec_of("fedbyol", {} if device.type == "cpu" else {"name": "resnet18"}, 3, 32, 64)
    case = Case("FedBYOL", METHODS["fedbyol"], contrast, spec, 8)
    broadcast = start_run(case.method, case.context(device, 0, "")).received
    data = case.images(device)

    def clients(*, shared: bool) -> None:
        for number in range(num_clients):
            if not shared:
                release_trainer()
            run_local_round(case.method, broadcast, None, data, case.context(device, 1, f"client-{number}"))

    clients(shared=True)
    turns = [[seconds(lambda s=s: clients(shared=s), device) for s in (True, False)] for _ in range(3)]  # type: ignore[misc]
    shared, own = (num_clients * case.num_images / min(turn) for turn in zip(*turns, strict=True))
    return shared, own


@pytest.fixture
def threads() -> Iterable[None]:
    """Run the test with THREADS threads instead of the one that other tests use."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", cpu_cases(), ids=lambda case: case.name)
def test_a_round_keeps_up_with_the_bare_loop(case: Case) -> None:
    line = measure_cpu(case)
    print("\n" + cpu_table([line]))  # noqa: T201
    assert line.ratio >= LEAST_OF_BARE_LOOP


@pytest.mark.timeout(900)
def test_clients_that_share_their_modules_are_not_slower() -> None:
    shared, own = measure_clients(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"\nclients one after the other: {shared:,.0f} images/s, building anew {own:,.0f}")  # noqa: T201
    assert shared > 0.95 * own


if __name__ == "__main__":
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"device: {chosen}")  # noqa: T201
    if chosen.type == "cpu":
        torch.set_num_threads(THREADS)
        if "long" in sys.argv:
            torch.set_num_threads(1)
            found = [case for case in encoder_cases(40, LONG_SIZES) if set(sys.argv) & {"all", case.name.split()[0]}]
            print(cpu_table(measure_cpu(case, 3) for case in found), flush=True)  # noqa: T201
            sys.exit()
        cases = encoder_cases(3, {}) if "encoders" in sys.argv else cpu_cases()
        print(cpu_table(map(measure_cpu, cases)), flush=True)  # noqa: T201
    print("clients one after the other: {:,.0f} images/s, building anew {:,.0f}".format(*measure_clients(chosen)))  # noqa: T201
