"""Freezes an encoder except for the parameters that patterns name."""

import difflib
import fnmatch
from collections.abc import Sequence

from torch import nn

from fedssl.errors import SpecError

_NAMES_SHOWN = 3


class FixedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that always normalises by its stored statistics, and never changes them.

    It stays in evaluation mode, whatever mode the network that contains it is set to.
    """

    def train(self, mode: bool = True) -> "FixedBatchNorm2d":  # noqa: FBT001, FBT002  # torch's signature
        return super().train(mode=False)


def freeze(encoder: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the encoder except for the parameters whose names match one of the patterns.

    `*` in a pattern stands for any characters. A frozen parameter requires no gradient. A BatchNorm without a trained
    parameter becomes a `FixedBatchNorm2d`, with the same tensors under the same names.

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
    for parent in list(encoder.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d) and _is_frozen(child):
                setattr(parent, name, _fixed(child))


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


def _fixed(norm: nn.BatchNorm2d) -> FixedBatchNorm2d:
    """Return a fixed BatchNorm that has this one's tensors."""
    fixed = FixedBatchNorm2d(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    fixed.weight, fixed.bias = norm.weight, norm.bias
    for name, buffer in norm.named_buffers(recurse=False):
        setattr(fixed, name, buffer)
    return fixed.eval()


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
