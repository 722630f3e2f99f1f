"""Encoders that compute only this process's rows of a batch, in a step on several devices."""

import functools
from typing import cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.data_parallel import SplitBatchNorm2d, split_rows
from fedssl.errors import MethodError
from fedssl.models import Encoder
from fedssl.models.freezing import FixedBatchNorm


class _SplitEncoder(Encoder):
    """The class that is put before an encoder's own."""

    def forward(self, x: Tensor) -> Tensor:
        return split_rows(super().forward, x)


def split_encoders(modules: nn.ModuleDict) -> None:
    """Make all encoders among the modules, and copies of them, split their batches as `split_rows` does.

    Everything else, such as heads, losses and queues, sees the whole batch and stays as it is. Raises MethodError if an
    encoder has a layer whose output depends on other rows in a way that cannot be split.
    """
    for encoder in [module for module in modules.modules() if isinstance(module, Encoder)]:
        for name, module in encoder.named_modules():
            if SplitBatchNorm2d.can_split(module):
                module.__class__ = SplitBatchNorm2d
            elif isinstance(module, _BatchNorm) and not isinstance(module, FixedBatchNorm):
                raise MethodError(
                    f"the encoder's {name} is a {type(module).__name__}, whose statistics cannot be computed over "
                    "several GPUs: start the worker without --gpus, or choose an encoder with another normalisation"
                )
        if not isinstance(encoder, _SplitEncoder):
            encoder.__class__ = _split_class(type(encoder))  # type: ignore[arg-type]


@functools.cache
def _split_class(kind: type[Encoder]) -> type[Encoder]:
    return cast(type[Encoder], type(f"Split{kind.__name__}", (_SplitEncoder, kind), {}))
