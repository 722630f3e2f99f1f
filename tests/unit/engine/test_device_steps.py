"""The steps of a GPU on torch's meta device, which has shapes but no numbers: code that waits for a number fails.

The meta device also refuses tensors of two devices in one operation, and shows what is copied to it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fedssl.data.augment as augment
from fedssl.data import normalize, random_view, to_float
from fedssl.engine.optimization import optimizer_for, take_step, total_loss
from fedssl.engine.steps import eager_step
from fedssl.methods.api import ClientData, Context, Distillation
from fedssl.methods.composition.sampler import Sampler
from fedssl.methods.objectives.dictionary_contrast import BaseTraining
from fedssl.methods.objectives.protocl import Clusterings, Prototypes
from fedssl.methods.reducers.similarity import Ensemble
from fedssl.methods.reducers.similarity_distillation import SimilarityDistillation
from fedssl.protocol.data import AugmentationConfig, DataConfig
from fedssl.protocol.methods.distillation import DistillationConfig
from support.combinations import ALL_COMBINATIONS, combined_spec
from support.methods import context, method_spec, methods_of_this_run
from support.rounds import start, training

META = torch.device("meta")


class _Generator(torch._C.Generator):
    """The CPU's generator, which claims to be on the meta device, because that device does not have a generator."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls)
        made.claimed = torch.device(device)
        return made

    claimed: torch.device

    @property
    def device(self) -> torch.device:
        return self.claimed


class _Copies(TorchDispatchMode):
    """Shapes of what was copied from the host to the device, from tensors and from Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []
        self._numbers = _Numbers(self.seen)

    def __enter__(self) -> "_Copies":
        self._numbers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device == META:
            self.seen += [tuple(x.shape) for x in args if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        return result


class _Numbers(TorchFunctionMode):
    def __init__(self, seen: list[tuple[int, ...]]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) and result.device == META:
            self._seen += [tuple(result.shape)] if not isinstance(args[0], torch.Tensor) or len(args) > 1 else []
        return result


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let generators exist on the meta device once `torch.Generator` is replaced; autocast there is the CPU's."""
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device, **kwargs: autocast("cpu", **kwargs))
    augment._constant.cache_clear()
    yield monkeypatch
    augment._constant.cache_clear()


def _moved(data: ClientData | None) -> ClientData | None:
    if data is None:
        return None
    others = (None if each is None else each.to(META) for each in (data.labels, data.held_out))
    return ClientData(data.images.to(META), *others)


def _move(modules: torch.nn.ModuleDict) -> None:
    """Move modules to the meta device, including attributes that are neither parameters nor buffers."""
    modules.to(META)
    for module in modules.modules():
        if isinstance(module, Sampler):
            module.generator = torch.Generator("meta")
        if isinstance(module, Clusterings):
            module.current = [Prototypes(*(tensor.to(META) for tensor in each)) for each in module.current]


@pytest.mark.parametrize("name", methods_of_this_run(ALL_COMBINATIONS))
def test_an_epoch_does_not_wait_for_the_device_and_copies_only_its_order(
    name: str, on_meta: pytest.MonkeyPatch
) -> None:
    optimizer = {"name": "sgd"}  # Adam's step counter is on the CPU unless its kernels are a GPU's
    spec = combined_spec(name, training={"batch_size": 32, "optimizer": optimizer})
    client = training(spec, number=2)
    client.algorithm.begin_epoch(client.modules, client.data, 0, client.ctx)
    on_meta.setattr(torch, "Generator", _Generator)
    _move(client.modules)
    ctx = dataclasses.replace(client.ctx, device=META, public=_moved(client.ctx.public))
    data = _moved(client.data)
    assert data is not None
    step = eager_step(
        client.algorithm, client.modules, optimizer_for(client.modules, spec.training.optimizer, 0.1), ctx
    )
    with _Copies() as copies:
        terms = [step(batch) for batch in client.algorithm.batches(data, 0, ctx)]
    assert len(terms) == len(data) // 32
    assert all(values.device == META and values.dtype == torch.float32 for _, values in terms)
    streams = {stream for part in client.algorithm.parts for stream in part.streams} - {"rotated"}
    assert copies.seen == [(len(data),)] * (1 + len(streams))


def _similarity_distillation() -> tuple[Distillation, Context]:
    flesd = context(method_spec("flesd"), 1)
    assert isinstance(flesd.spec.method.reducer, DistillationConfig)  # type: ignore[attr-defined]
    representations = torch.randn(128, 8, generator=torch.Generator().manual_seed(0)).to(META)
    student = SimilarityDistillation(
        flesd.spec.method.reducer,  # type: ignore[attr-defined]
        Ensemble([representations, representations], "representations-f32", 128),
        start(flesd.spec).broadcast,
    )
    return student, flesd


def _base_training() -> tuple[Distillation, Context]:
    fedca = context(method_spec("fedca"), 0)
    network = training(fedca.spec).modules
    online = torch.nn.ModuleDict({part: network[part] for part in ("encoder", "projector")})
    return BaseTraining(online, 1, 0.1, fedca.spec.training.optimizer), fedca


@pytest.mark.parametrize("make", [_similarity_distillation, _base_training], ids=["flesd", "fedca"])
def test_an_epoch_on_public_images_does_not_wait_for_the_device(
    make: Callable[[], tuple[Distillation, Context]], on_meta: pytest.MonkeyPatch
) -> None:
    task, ctx = make()
    modules = task.build(ctx)
    on_meta.setattr(torch, "Generator", _Generator)
    modules.to(META)
    ctx = dataclasses.replace(ctx, device=META, public=_moved(ctx.public))
    assert ctx.public is not None
    optimizer = optimizer_for(modules, task.optimizer.model_copy(update={"name": "sgd"}), 0.1)
    with _Copies() as copies:
        for losses in task.steps(modules, 0, ctx):
            take_step(optimizer, total_loss(losses))
    assert copies.seen == [(len(ctx.public),)]


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.usefixtures("on_meta")
def test_views_copy_their_constants_to_the_device_only_once(size: int) -> None:
    everything = AugmentationConfig(blur=0.5, solarize=0.2, rotation_degrees=15)
    config = DataConfig(augmentation=everything, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), image_size=size)
    images = torch.zeros(4, 3, size, size, dtype=torch.uint8, device=META)
    generator = _Generator("meta")
    with _Copies() as copies:
        for _ in range(2):
            views = normalize(random_view(to_float(images), everything, generator), config)  # type: ignore[arg-type]
    assert views.shape == images.shape
    assert sorted(copies.seen) == [(3,), (3,), (3,), (27,)]
