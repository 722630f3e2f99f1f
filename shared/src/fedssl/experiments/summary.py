"""The numbers of a comparison: means over seeds and their costs, also as JSON and CSV."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedssl.experiments.comparison import ComparisonEntry, Failure, Outcome
from fedssl.experiments.runs import FinishedRun
from fedssl.experiments.spread import Spread, spread
from fedssl.experiments.variants import has_traffic

ACCURACIES = ("probe", "knn")
CHANCE = "chance"
GEOMETRY = ("uniformity", "effective_rank")
TRAFFIC = ("megabytes_up", "megabytes_down")

COLUMNS = (
    *(f"{name}_{which}" for name in ACCURACIES for which in ("last", "best", "untrained")),
    CHANCE,
    *GEOMETRY,
    *TRAFFIC,
    "num_images",
    "seconds",
)
"""The columns. Accuracies are shares of the test set; `untrained` ones are those before the first round."""


@dataclass(frozen=True, slots=True)
class Line:
    """The results of one variant.

    Attributes:
        values: for every column that was measured, one value per finished seed.
        failures: the reasons by seed.
    """

    variant: str
    seeds: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]
    failures: Mapping[int, str]

    def spread(self, column: str) -> Spread | None:
        """Return the mean and deviation of a column; None if it was not measured."""
        return spread(self.values.get(column, ()))


def summarise(entries: Sequence[ComparisonEntry], outcomes: Mapping[tuple[str, int], Outcome]) -> list[Line]:
    """Return one line per variant, in the order in which they were given."""
    lines = []
    for variant in dict.fromkeys(entry.variant for entry in entries):
        finished: list[tuple[int, FinishedRun]] = []
        failures: dict[int, str] = {}
        for (name, seed), outcome in sorted(outcomes.items()):
            if name != variant:
                continue
            if isinstance(outcome, Failure):
                failures[seed] = outcome.reason
            else:
                finished.append((seed, outcome))
        rows = [figures(outcome) for _, outcome in finished]
        unsent = () if has_traffic(variant) else TRAFFIC
        measured = [name for name in COLUMNS if rows and all(name in row for row in rows) and name not in unsent]
        values = {column: tuple(row[column] for row in rows) for column in measured}
        lines.append(Line(variant, tuple(seed for seed, _ in finished), values, failures))
    return lines


def figures(run: FinishedRun) -> dict[str, float]:
    """Return the columns of one run."""
    found: dict[str, float] = {}
    for name in ACCURACIES:
        if name in run.last and max(run.evaluations) > 0:
            best = run.best(name)
            found |= {f"{name}_last": run.last[name], f"{name}_best": math.nan if best is None else best[1]}
    found |= {f"{name}_untrained": run.untrained[name] for name in ACCURACIES if name in run.untrained}
    if run.chance is not None:
        found[CHANCE] = run.chance.accuracy
    found |= {name: run.last[name] for name in GEOMETRY if name in run.last}
    found |= {"megabytes_up": run.bytes_up / 1e6, "megabytes_down": run.bytes_down / 1e6}
    found |= {"num_images": float(run.num_images), "seconds": run.seconds}
    return found


def to_document(
    lines: Sequence[Line], entries: Sequence[ComparisonEntry], apart: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return everything as one JSON document."""
    folders = {(entry.variant, entry.seed): str(entry.folder) for entry in entries}
    return {
        "best_chosen_on": "test",
        "variants": [
            {
                "name": line.variant,
                "mean": _of(line, lambda found: found.mean),
                "deviation": _of(line, lambda found: found.deviation),
                "runs": [
                    {
                        "seed": seed,
                        "folder": folders[line.variant, seed],
                        **{column: values[at] for column, values in line.values.items()},
                    }
                    for at, seed in enumerate(line.seeds)
                ],
                "failures": [{"seed": seed, "reason": reason} for seed, reason in line.failures.items()],
                "settings_apart": dict(apart.get(line.variant, {})),
            }
            for line in lines
        ],
    }


def to_csv(lines: Sequence[Line]) -> str:
    """Return CSV with one row per run: variant, seed, the columns, and the reason if the run failed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "seed", *COLUMNS, "failure"])
    for line in lines:
        for at, seed in enumerate(line.seeds):
            cells = [line.values[column][at] if column in line.values else "" for column in COLUMNS]
            writer.writerow([line.variant, seed, *(_shown(value) for value in cells), ""])
        for seed, reason in line.failures.items():
            writer.writerow([line.variant, seed, *("" for _ in COLUMNS), reason])
    return text.getvalue()


def _of(line: Line, part: Any) -> dict[str, float | None]:
    found = {column: line.spread(column) for column in COLUMNS}
    return {column: part(value) for column, value in found.items() if value is not None}


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return ""
    return f"{value:.0f}" if value.is_integer() else str(value)
