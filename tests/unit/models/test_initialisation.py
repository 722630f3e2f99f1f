"""Networks that are built without weights have the names, shapes and dtypes of those with weights."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from fedssl.methods import METHODS
from fedssl.models import build_encoder
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.model import EncoderConfig
from support.methods import method_spec


class _Calls(TorchDispatchMode):
    """Records the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "config",
    [EncoderConfig(name="convnet"), EncoderConfig(name="resnet18"), EncoderConfig(name="vit-tiny", patch_size=8)],
    ids=lambda config: config.name,
)
def test_a_network_on_the_meta_device_has_the_tensors_of_one_with_weights(config: EncoderConfig) -> None:
    expected = build_encoder(config, 3, 32).state_dict()

    with _Calls() as calls, on_meta_device():
        found = build_encoder(config, 3, 32).state_dict()

    assert calls.names
    # Drawing random numbers for nothing took most of the time.
    assert not calls.names & {"aten.normal_.default", "aten.uniform_.default"}
    assert {tensor.device.type for tensor in found.values()} == {"meta"}
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }


@pytest.mark.parametrize("name", ["fedmoco", "fedprotocl", "fedprox", "scaffold"])
def test_building_a_method_without_weights_does_not_import_sympy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import takes seconds, in each process that only needs the shapes of the tensors."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)  # importing it fails
    spec = method_spec(name)

    plan = METHODS[spec.method.name].bind(spec).plan

    assert plan.broadcast
