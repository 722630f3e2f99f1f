"""The tables and figures of the five papers: every published number, and the run that reproduces it.

`tables/published.json` holds the numbers with their sources. A figure is a table too: its numbers are those that the
paper writes in its text or in a table, and null if the paper only draws them. `tables/PAPER.yaml` holds the settings as
layers, each of which overrides the ones before. Nothing else in the project repeats them.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import Field

from fedssl.data.presets import AUGMENTATIONS, NORMALIZATIONS
from fedssl.errors import SpecError
from fedssl.experiments.overlays import Values, changed, overlay
from fedssl.protocol.base import ClientId, StrictModel
from fedssl.protocol.runs import RunSpec

_CELLS_OF_METHODS = {
    "fedalignuniform": "ssd-1:FedAlignUniform@cifar10-k10",
    "fedbyol": "fedrlc-1:FedBYOL@cifar10-class",
    "fedca": "fedu-1:FedCA R50@cifar10-class",
    "feddecorr": "ssd-1:FedDecorr@cifar10-k10",
    "fedema": "fedrlc-1:FedEMA@cifar10-class",
    "fedmoco": "fedx-1:FedMoCo@cifar10",
    "fedprotocl": "fedx-1:FedProtoCL@cifar10",
    "fedrlc": "fedrlc-1:FedRLC@cifar10-class",
    "fedsimclr": "fedx-1:FedSimCLR@cifar10",
    "fedsimsiam": "fedu-1:FedSimSiam R50@cifar10-class",
    "fedu": "fedu-1:FedU R50@cifar10-class",
    "fedu2": "ssd-1:FedU2@cifar10-k10",
    "fedx": "fedx-1:FedSimCLR+FedX@cifar10",
    "flesd": "flesd-1:FLESD@cifar10-a1",
    "ldawa": "ssd-1:L-DAWA@cifar10-k10",
    "single": "fedu-1:Single R50@cifar10-class",
    "ssd": "ssd-1:SSD@cifar10-k10",
    "supervised": "fedu-1:FedAvg supervised R50@cifar10-class",
}
"""For each method of the tables a cell of the first table that shows it, on CIFAR-10."""

Kind = Literal[
    "probe",
    "best_probe",
    "worst_probe",
    "uniformity",
    "alignment",
    "effective_rank",
    "fine_tune",
    "transfer",
    "classifier",
    "inter_class_angle",
    "local_global_angle",
    "representation_norm",
    "embedding_norm",
    "embedding_uniformity",
    "client_metric",
    "server_metric",
]


class Measure(StrictModel):
    """How one column of a table is measured on a finished run."""

    kind: Kind = Field(
        description="`probe`: accuracy after the last round; `best_probe`: after the best evaluated round; "
        "`worst_probe`: of the worst client; `uniformity`, `alignment`, `effective_rank`: of the test set's "
        "representations; `fine_tune`: of encoder and classifier, tuned on a share of the labels; `transfer`: the "
        "same, tuned as in FedU's transfer to another data set; `classifier`: of a supervised run's own classifier, or "
        "the mean of its clients' if they send nothing; `inter_class_angle`: the mean angle in degrees between two "
        "classes' mean embeddings (FedX Eq. 16); `local_global_angle`: between a test image's embeddings by a client's "
        "and by the global model (FedX Eq. 14); `representation_norm`, `embedding_norm`: the mean length of a test "
        "image's h and z; `embedding_uniformity`: of the test set's embeddings z, or of h if the model has no "
        "projector; `client_metric`: a metric of the last round's training, the clients' mean weighted by their "
        "images; `server_metric`: one of the coordinator in the last round."
    )
    settings: str | None = Field(default=None, description="The name of the fine-tuning's settings.")
    share: float | None = Field(default=None, gt=0, le=1, description="Share of the training images with labels.")
    label: int | None = Field(
        default=None, ge=0, exclude_if=lambda it: it is None, description="Only the test images with this label."
    )
    metric: str | None = Field(
        default=None, exclude_if=lambda it: it is None, description="The metric's name, as in `history.json`."
    )
    use: Literal["last", "best"] = Field(default="last", description="Epoch of the fine-tuning; best on the test set.")
    published_as: str | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The name of the published number for a second reading of it; otherwise the measure's own name.",
    )


class Layer(StrictModel):
    """Settings for the cells whose table, row and column each match one of the patterns."""

    tables: tuple[str, ...] = ("*",)
    rows: tuple[str, ...] = ("*",)
    columns: tuple[str, ...] = ("*",)
    spec: Values = {}
    dataset: str | None = Field(default=None, description="The data set for training and, by default, for evaluation.")
    augmentation: str | None = Field(default=None, description="The name of a preset.")
    normalization: str | None = Field(default=None, description="The name of a preset.")
    measures: dict[str, Measure] = {}
    public_client: ClientId | None = Field(default=None, description="The client whose images are public (FLESD).")
    notes: tuple[str, ...] = ()

    def matches(self, table: str, row: str, column: str) -> bool:
        """Return whether the layer applies to a cell."""
        asked = ((self.tables, table), (self.rows, row), (self.columns, column))
        return all(any(fnmatchcase(name, pattern) for pattern in patterns) for patterns, name in asked)


class Paper(StrictModel):
    """One paper's settings. `notes` are the differences to the paper's code that apply to every cell."""

    paper: str
    notes: tuple[str, ...] = ()
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class TableCell:
    """One run of a table: its place, its spec, the published numbers and how each is measured.

    Accuracies are in percent. A number is None if the paper only draws it. It is there twice, under two names, if two
    measures are readings of it.
    """

    table: str
    row: str
    column: str
    spec: RunSpec
    published: Mapping[str, float | None]
    measures: Mapping[str, Measure]
    public_client: str | None
    notes: tuple[str, ...]

    @property
    def keeps_clients(self) -> bool:
        """True if a measure needs the models that the clients of the last round trained."""
        kinds = {measure.kind for measure in self.measures.values()}
        return "local_global_angle" in kinds or ("classifier" in kinds and self.spec.method.sends_nothing)

    @property
    def name(self) -> str:
        """The cell's name, TABLE:ROW@COLUMN."""
        return f"{self.table}:{self.row}@{self.column}"


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Return the tables by name: `source`, `title` and `rows`, each with the numbers by column and measure."""
    tables: dict[str, dict[str, Any]] = json.loads(_read("published.json"))
    return tables


@functools.cache
def settings(paper: str) -> Paper:
    """Return one paper's settings."""
    return Paper.model_validate(yaml.safe_load(_read(f"{paper}.yaml")))


def tables() -> list[str]:
    """Return the names of the tables and figures, `fedx-1` to `flesd-1`; a figure's is `fedx-fig5`."""
    return list(published())


@functools.cache
def cell(table: str, row: str, column: str) -> TableCell:
    """Return one cell. The arguments must be the names in the published numbers."""
    numbers = published()[table]["rows"][row][column]
    paper = settings(table.partition("-")[0])
    layers = [layer for layer in paper.layers if layer.matches(table, row, column)]
    values = overlay({}, *map(_values, layers))
    measures: dict[str, Measure] = {}
    notes: list[str] = list(paper.notes)
    public_client = None
    for layer in layers:
        measures |= layer.measures
        notes += [" ".join(note.split()) for note in layer.notes]
        public_client = layer.public_client or public_client
    if public_client is not None:
        values["public_data"]["dataset"] = values["partition"]["dataset"]
    values["name"] = f"{table.partition('-')[0]} {re.sub(r'[^A-Za-z0-9._+-]+', '-', row)}"
    names = {name: measure.published_as or name for name, measure in measures.items()}
    shown = sorted(
        (name for name in names if names[name] in numbers), key=lambda name: list(numbers).index(names[name])
    )
    return TableCell(
        table=table,
        row=row,
        column=column,
        spec=RunSpec.model_validate(values),
        published={name: numbers[names[name]] for name in shown},
        measures={name: measures[name] for name in shown},
        public_client=public_client,
        notes=tuple(dict.fromkeys(notes)),
    )


def select(text: str) -> list[TableCell]:
    """Return the cells that TABLE[:ROW][@COLUMN] selects; without a row or a column, all of them are selected.

    Case, blanks and a leading `Fed` do not matter. If nothing matches, raises SpecError with the known names.
    """
    head, _, column = text.partition("@")
    table, _, row = head.partition(":")
    name = _match(table, tables(), "table")
    rows = published()[name]["rows"]
    chosen = list(rows) if not row else [_match(row, list(rows), f"row in {name}")]
    columns = list(dict.fromkeys(each for one in chosen for each in rows[one]))
    wanted = columns if not column else [_match(column, columns, f"column in these rows of {name}")]
    return [cell(name, one, each) for one in chosen for each in rows[one] if each in wanted]


def method_cell(method: str) -> TableCell | None:
    """Return the cell whose settings are a paper's own for this method, or None if no table has the method.

    A table may write the preset as its parts: FedX's has `fedsimclr` with the add-on `fedx`. The spec has the requested
    name.
    """
    if method not in _CELLS_OF_METHODS:
        return None
    found = select(_CELLS_OF_METHODS[method])[0]
    return replace(found, spec=changed(found.spec, {"method": {"name": method}}))


def _match(text: str, known: list[str], what: str) -> str:
    if text in known:
        return text
    found = [name for name in known if _plain(name) == _plain(text)]
    if len(found) == 1:
        return found[0]
    close = get_close_matches(_plain(text), [_plain(name) for name in known], n=1)
    meant = next((name for name in known if close and _plain(name) == close[0]), None)
    raise SpecError(f"there is no {what} called {text!r}; " + (f"did you mean {meant}?" if meant else ", ".join(known)))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9+.%-]", "", text.lower()).removeprefix("fed") or text


def _values(layer: Layer) -> Values:
    """Return a layer's part of the spec, with presets replaced by their values."""
    values = layer.spec
    if layer.dataset is not None:
        named = {"partition": {"dataset": layer.dataset}, "evaluation": {"dataset": layer.dataset}}
        values = overlay(named, values)
    if layer.augmentation is not None:
        values = overlay(values, {"data": {"augmentation": AUGMENTATIONS[layer.augmentation].model_dump(mode="json")}})
    if layer.normalization is not None:
        mean, std = NORMALIZATIONS[layer.normalization]
        values = overlay(values, {"data": {"mean": list(mean), "std": list(std)}})
    return values


def _read(name: str) -> str:
    return (files("fedssl.experiments") / "tables" / name).read_text(encoding="utf-8")
