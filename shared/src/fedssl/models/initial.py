"""Loads weights that exist into a freshly built encoder, name by name, with a table of what became of each tensor."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedssl.artifacts.weight_files import COUNTER
from fedssl.artifacts.weight_names import PREFIX, is_adapter, is_classifier
from fedssl.errors import SpecError
from fedssl.models.encoders import build_encoder
from fedssl.models.lora import merged
from fedssl.protocol.model import EncoderConfig

Fate = Literal["loaded", "adapted", "left out", "missing", "unknown", "misfit"]
"""The fate of a tensor. loaded: taken as it is · adapted: its input channels were summed or repeated · left out: the
classifier's · missing: the network has it and the file does not · unknown: the reverse · misfit: of another shape.
Missing counters of BatchNorm, which nothing is computed from, count as loaded."""

REFUSED: tuple[Fate, ...] = ("missing", "unknown", "misfit")
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor. `given` is its shape in the file, `wanted` in the network; None if it is not there."""

    name: str
    fate: Fate
    given: tuple[int, ...] | None
    wanted: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class LoadingTable:
    """The fates of all tensors of the file and of the network, in name order."""

    rows: tuple[TensorRow, ...]

    def of(self, *fates: Fate) -> list[TensorRow]:
        """Return the rows with one of these fates."""
        return [row for row in self.rows if row.fate in fates]

    @property
    def fits(self) -> bool:
        """True if the encoder starts from the weights, and from nothing else."""
        return not self.of(*REFUSED) and bool(self.of("loaded", "adapted"))

    def __str__(self) -> str:
        """Return the numbers by fate, with the first names of what was not simply loaded."""
        parts = []
        for fate in ("loaded", "adapted", "left out", *REFUSED):
            found = self.of(fate)
            names = [_described(row) for row in found[:_NAMES_SHOWN]]
            more = [f"and {len(found) - _NAMES_SHOWN} more"] if len(found) > _NAMES_SHOWN else []
            if fate == "loaded":
                parts.append(f"{len(found)} tensors loaded")
            elif found:
                parts.append(f"{len(found)} {fate} ({', '.join(names + more)})")
        return "; ".join(parts)


def loading_table(
    given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], kernels: Collection[str]
) -> LoadingTable:
    """Return what becomes of tensors of these shapes in a network of those.

    `kernels`: the convolution weights whose input channels may be adapted. Names have no prefix.
    """
    rows = []
    for name in sorted(given.keys() | wanted.keys()):
        ours, theirs = wanted.get(name), given.get(name)
        fate: Fate
        if ours is None:
            fate = "left out" if is_classifier(name) else "unknown"
        elif theirs is None:
            fate = "loaded" if name.endswith(COUNTER) else "missing"
        elif ours == theirs:
            fate = "loaded"
        else:
            fate = "adapted" if name in kernels and _is_adaptable(theirs, ours) else "misfit"
        rows.append(TensorRow(name, fate, theirs, ours))
    return LoadingTable(tuple(rows))


def table_for(
    config: EncoderConfig, channels: int, given: Mapping[str, tuple[int, ...]], adapt: Sequence[str] = ()
) -> LoadingTable:
    """Return what becomes of tensors `encoder.*` of these shapes in an encoder, which needs no memory for its weights.

    Raises SpecError if `adapt` names anything but a convolution of the encoder.
    """
    with torch.device("meta"):
        encoder = build_encoder(config, channels)
    own = {_own_name(name): shape for name, shape in given.items() if not is_adapter(name)}
    return _table(encoder, own, adapt)


def load_initial(encoder: nn.Module, tensors: Mapping[str, Tensor], adapt: Sequence[str] = ()) -> LoadingTable:
    """Load the tensors `encoder.*` into the encoder. Others, such as the heads of a run of ours, are ignored.

    Names must be equal, and so must shapes, except for the convolutions whose modules `adapt` names (`conv1`). Let the
    file's kernel w have I input channels and the network's C, with equal output channels and size:

        C = 1: the sum over i of w[:, i], added in float64 and rounded once. A grey image gives what it gave to the
            file's network when it was repeated in all I channels.
        I = 1: w / C in each of the C channels. C equal channels give what one of them gave to the file's network.

    Both hold for images that are normalised in the same way in all channels. Nothing else is adapted. Low-rank adapters
    in the file are merged into their layers; those of the encoder stay as they are, so that they start from no change.

    Raises SpecError, with the table, if a tensor is missing, unknown or of another shape, or if `adapt` names anything
    that needs no adapting. Nothing is loaded then.
    """
    given = {_own_name(name): each for name, each in merged(tensors).items() if name.startswith(PREFIX)}
    table = _table(encoder, {name: tuple(each.shape) for name, each in given.items()}, adapt)
    kernels = {_kernel(encoder, module) for module in adapt}
    if not table.fits:
        raise SpecError(f"the weights do not fit model.encoder: {table}. {_remedy(table)}")
    if unused := sorted(kernels - {row.name for row in table.of("adapted")}):
        raise SpecError(f"model.initial.adapt names {unused[0]}, whose shapes are equal: leave it out")
    with torch.no_grad():
        for name, target in encoder.state_dict().items():
            if name in given:
                target.copy_(_adapted(given[name], target.shape[1]) if name in kernels else given[name])
    return table


def _table(encoder: nn.Module, given: Mapping[str, tuple[int, ...]], adapt: Sequence[str]) -> LoadingTable:
    wanted = {name: tuple(each.shape) for name, each in encoder.state_dict().items() if not is_adapter(name)}
    return loading_table(given, wanted, {_kernel(encoder, module) for module in adapt})


def _own_name(name: str) -> str:
    return name.removeprefix(PREFIX)


def _kernel(encoder: nn.Module, module: str) -> str:
    """Return the name of a convolution's weight. Raises SpecError if the encoder has no such convolution."""
    found = dict(encoder.named_modules()).get(module)
    if not isinstance(found, nn.Conv2d) or found.groups != 1:
        names = [name for name, each in encoder.named_modules() if isinstance(each, nn.Conv2d)]
        first = f": its first one is {names[0]}" if names else ""
        raise SpecError(f"model.initial.adapt names {module}, which is not a convolution of the encoder{first}")
    return f"{module}.weight"


def _is_adaptable(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if len(given) != 4 or len(wanted) != 4 or given[:1] + given[2:] != wanted[:1] + wanted[2:]:
        return False
    return wanted[1] == 1 or given[1] == 1


def _adapted(kernel: Tensor, channels: int) -> Tensor:
    """Return a kernel (O, I, k, k) for images of `channels` channels, float32: see `load_initial`."""
    if channels == 1:
        return kernel.double().sum(dim=1, keepdim=True).float()
    return (kernel.double() / channels).float().expand(-1, channels, -1, -1)


def _described(row: TensorRow) -> str:
    if row.given is None or row.wanted is None or row.given == row.wanted:
        return row.name
    return f"{row.name}: {list(row.given)} in the file, {list(row.wanted)} in the network"


def _remedy(table: LoadingTable) -> str:
    misfits = table.of("misfit")
    channels = [row for row in misfits if row.given and row.wanted and _is_adaptable(row.given, row.wanted)]
    if channels and len(misfits) == len(channels) and not table.of("missing", "unknown"):
        names = ", ".join(f'"{row.name.removesuffix(".weight")}"' for row in channels)
        return f"To sum or repeat the input channels, set model.initial.adapt = [{names}]"
    return "Set model.encoder to the network that the weights are of, its stem included"
