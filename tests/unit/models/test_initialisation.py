"""Networks that are built without weights have the names, shapes and dtypes of those with weights."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from fedssl.models import build_encoder
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.model import EncoderConfig


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


def test_drawing_and_normalising_on_the_meta_device_computes_nothing() -> None:
    """Either would import torch's compiler or sympy, for seconds."""
    with _Calls() as calls, on_meta_device():
        found = normalize(torch.randn(4, 3, generator=torch.Generator()), dim=1)

    assert calls.names == {"aten.empty.memory_format"}
    assert (found.shape, found.dtype, found.device.type) == ((4, 3), torch.float32, "meta")
