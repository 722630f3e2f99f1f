"""Freezes an encoder except for the parameters that patterns name."""

import difflib
import fnmatch
import functools
from collections.abc import Sequence
from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.errors import SpecError

_NAMES_SHOWN = 3


class FixedBatchNorm(_BatchNorm):
    """The class that is put before a BatchNorm's own. It normalises by the stored statistics, and never changes them.

    It stays in evaluation mode, whatever mode the network that contains it is set to.
    """

    def train(self, mode: bool = True) -> "FixedBatchNorm":  # noqa: FBT001, FBT002  # torch's signature
        return super().train(mode=False)


def freeze(encoder: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the encoder except for the parameters whose names match one of the patterns.

    `*` in a pattern stands for any characters. A frozen parameter requires no gradient. A BatchNorm without a trained
    parameter becomes a `FixedBatchNorm`, and still does everything else that its class does, such as timm's activation.

    Raises SpecError, with the nearest names, if a pattern matches no parameter.

    Example:
        >>> encoder = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3))
        >>> freeze(encoder, ["2.*"])
        >>> sorted(frozen_tensors(encoder))[:3], encoder[1].training
        (['0.bias', '0.weight', '1.bias'], False)
    """
    names = [name for name, _ in encoder.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SpecError(_matches_nothing(pattern, names))
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    for module in encoder.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, FixedBatchNorm) and _is_frozen(module):
            module.__class__ = _fixed_class(type(module))  # type: ignore[arg-type]
            module.eval()


def frozen_tensors(encoder: nn.Module) -> frozenset[str]:
    """Return the names of the parameters without a gradient, and of the buffers whose module trains no parameter."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in encoder.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if not tensor.requires_grad and (isinstance(tensor, nn.Parameter) or _is_frozen(module))
    )


def _is_frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters(recurse=False))


@functools.cache
def _fixed_class(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    return cast(type[_BatchNorm], type(f"Fixed{kind.__name__}", (FixedBatchNorm, kind), {}))


def _matches_nothing(pattern: str, names: Sequence[str]) -> str:
    modules = dict.fromkeys(name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1))
    candidates = [*(f"{module}.*" for module in modules), *names]
    near = difflib.get_close_matches(pattern.removeprefix("encoder."), candidates, _NAMES_SHOWN)
    what = "near ones are" if near else "patterns of this encoder are, for example,"
    shown = near or list(dict.fromkeys(f"{name.split('.')[0]}.*" if "." in name else name for name in names))
    return (
        f"model.trainable names {pattern}, which matches no parameter of the encoder: {what} "
        f"{', '.join(shown[:_NAMES_SHOWN])}"
    )
