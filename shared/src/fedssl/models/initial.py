"""Loads existing weights into a freshly built encoder, name by name, with a table of what happened to each tensor."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedssl.artifacts.weight_files import COUNTER
from fedssl.artifacts.weight_names import PREFIX, is_adapter, is_classifier
from fedssl.errors import SpecError
from fedssl.models.encoders import Encoder, build_encoder
from fedssl.models.initialisation import on_meta_device
from fedssl.models.lora import merged
from fedssl.models.positions import are_grids, resized_positions
from fedssl.protocol.data import DataConfig
from fedssl.protocol.model import EncoderConfig

Fate = Literal["loaded", "adapted", "left out", "missing", "unknown", "misfit"]
"""The fate of a tensor. loaded: taken as it is · adapted: its input channels were summed or repeated, or its positions
interpolated · left out: the classifier's · missing: the network has it and the file does not · unknown: the reverse ·
misfit: of another shape. Missing counters of BatchNorm, from which nothing is computed, count as loaded."""

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
        """True if the encoder starts from these weights only."""
        return not self.of(*REFUSED) and bool(self.of("loaded", "adapted"))

    def __str__(self) -> str:
        """Return the number of tensors by fate, with the first names of those that were not simply loaded."""
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
    given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], adaptable: Collection[str]
) -> LoadingTable:
    """Return what happens to tensors of the given shapes in a network of the wanted shapes.

    `adaptable`: the weights of convolutions and the position embeddings that may be adapted. Names have no prefix.
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
            fate = "adapted" if name in adaptable and _is_adaptable(theirs, ours) else "misfit"
        rows.append(TensorRow(name, fate, theirs, ours))
    return LoadingTable(tuple(rows))


def table_for(
    config: EncoderConfig, data: DataConfig, given: Mapping[str, tuple[int, ...]], adapt: Sequence[str] = ()
) -> LoadingTable:
    """Return what happens to tensors `encoder.*` of these shapes in the encoder of such images, built without memory.

    Raises SpecError if `adapt` names anything but a convolution or the position embeddings of the encoder, or what
    needs no adapting in weights that fit.
    """
    with on_meta_device():
        encoder = build_encoder(config, data.channels, data.image_size)
    own = {_own_name(name): shape for name, shape in given.items() if not is_adapter(name)}
    table = _table(encoder, own, adapt)
    if table.fits:
        _require_adapted(table, encoder, adapt)
    return table


def load_initial(encoder: Encoder, tensors: Mapping[str, Tensor], adapt: Sequence[str] = ()) -> LoadingTable:
    """Load the tensors `encoder.*` into the encoder. Others, such as the heads of a fedssl run, are ignored.

    Names must be equal, and so must shapes, except for what `adapt` names: convolutions by their modules (`conv1`), and
    a ViT's `pos_embed`. Let the file's kernel w have I input channels and the network's C, with equal output channels
    and size:

        C = 1: the sum over i of w[:, i], added in float64 and rounded once. A grey image gives what it gave in the
        file's network when it was repeated in all I channels. I = 1: w / C in each of the C channels. C equal channels
        give what one of them gave in the file's network.

    Both hold for images that are normalised in the same way in all channels. The position embeddings of a square grid
    of patches are interpolated to the network's grid: see `resized_positions`. Nothing else is adapted. Low-rank
    adapters in the file are merged into their layers; those of the encoder stay as they are, so that they start from no
    change.

    Raises SpecError, with the table, if a tensor is missing, unknown or of another shape, or if `adapt` names anything
    that needs no adapting. Nothing is loaded then.
    """
    given = {_own_name(name): each for name, each in merged(tensors).items() if name.startswith(PREFIX)}
    table = _table(encoder, {name: tuple(each.shape) for name, each in given.items()}, adapt)
    named = {_tensor_of(encoder, name) for name in adapt}
    if not table.fits:
        raise SpecError(f"the weights do not fit model.encoder: {table}. {_remedy(table, encoder)}")
    _require_adapted(table, encoder, adapt)
    with torch.no_grad():
        for name, target in encoder.state_dict().items():
            if name in given:
                target.copy_(_adapted(given[name], target.shape) if name in named else given[name])
    return table


def _table(encoder: Encoder, given: Mapping[str, tuple[int, ...]], adapt: Sequence[str]) -> LoadingTable:
    wanted = {name: tuple(each.shape) for name, each in encoder.state_dict().items() if not is_adapter(name)}
    return loading_table(given, wanted, {_tensor_of(encoder, name) for name in adapt})


def _require_adapted(table: LoadingTable, encoder: Encoder, adapt: Sequence[str]) -> None:
    """Raise SpecError if `adapt` names anything that needs no adapting."""
    adapted = {row.name for row in table.of("adapted")}
    if unused := [name for name in adapt if _tensor_of(encoder, name) not in adapted]:
        raise SpecError(f"model.initial.adapt names {unused[0]}, whose shapes are equal: leave it out")


def _own_name(name: str) -> str:
    return name.removeprefix(PREFIX)


def _adaptable(encoder: Encoder) -> dict[str, str]:
    """Return what `adapt` may name, with the names of the tensors: convolutions first, in the network's order."""
    modules = [name for name, each in encoder.named_modules() if isinstance(each, nn.Conv2d) and each.groups == 1]
    positions = [encoder.positions] if encoder.positions else []
    return {module: f"{module}.weight" for module in modules} | {name: name for name in positions}


def _tensor_of(encoder: Encoder, name: str) -> str:
    """Return the tensor that a name in `adapt` stands for. Raises SpecError if nothing of that name can be adapted."""
    possible = _adaptable(encoder)
    if name not in possible:
        first = f": its first one is {next(iter(possible))}" if possible else ""
        positions = f", and its position embeddings are {encoder.positions}" if encoder.positions else ""
        raise SpecError(
            f"model.initial.adapt names {name}, which is not a convolution of the encoder{first}{positions}"
        )
    return possible[name]


def _is_adaptable(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if len(given) == len(wanted) == 3:
        return are_grids(given, wanted)
    if len(given) != 4 or len(wanted) != 4 or given[:1] + given[2:] != wanted[:1] + wanted[2:]:
        return False
    return wanted[1] == 1 or given[1] == 1


def _adapted(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a kernel (O, I, k, k) or position embeddings (1, 1 + N, H) in this shape, float32: see `load_initial`."""
    if tensor.ndim == 3:
        return resized_positions(tensor, *[math.isqrt(shape[1] - 1)] * 2)
    if shape[1] == 1:
        return tensor.double().sum(dim=1, keepdim=True).float()
    return (tensor.double() / shape[1]).float().expand(-1, shape[1], -1, -1)


def _described(row: TensorRow) -> str:
    if row.given is None or row.wanted is None or row.given == row.wanted:
        return row.name
    return f"{row.name}: {list(row.given)} in the file, {list(row.wanted)} in the network"


def _remedy(table: LoadingTable, encoder: Encoder) -> str:
    misfits = {row.name: row for row in table.of("misfit")}
    names = [
        f'"{name}"'
        for name, tensor in _adaptable(encoder).items()
        if (row := misfits.get(tensor)) and row.given and row.wanted and _is_adaptable(row.given, row.wanted)
    ]
    if names and len(misfits) == len(names) and not table.of("missing", "unknown"):
        return (
            f"To sum or repeat the input channels, or to interpolate the positions, set model.initial.adapt = "
            f"[{', '.join(names)}]"
        )
    return "Set model.encoder to the network of the weights, including its stem"
