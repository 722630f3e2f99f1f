"""Compares runs: results with their change against the first, then the settings that differ."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.experiments.spread import QUALITY, best_round, mean_and_deviation, spread
from fedssl.protocol.states import Outcome, Verdict
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.dashboard.layout import formats
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.run import settings_words
from fedssl_coordinator.dashboard.run import view as run_view
from fedssl_coordinator.dashboard.run.charts import numbers
from fedssl_coordinator.dashboard.run.traffic import traffic
from fedssl_coordinator.dashboard.runs import overview
from fedssl_coordinator.dashboard.runs import queries as overview_queries


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """A value and its change against the baseline; `is_best` among the runs, `differs` from the baseline."""

    text: str
    change: str = ""
    is_best: bool = False
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison with one column per run, the means of those that differ only in their seed, and what is drawn."""

    rows: list[overview.Row]
    results: list[tuple[str, list[ComparedValue]]]
    settings: list[tuple[str, list[ComparedValue]]]
    num_equal: int
    means: list["SeedMeans"]
    curves: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SeedMeans:
    """The newest results of one setting, and its best accuracies: means over its seeds, as of `fedssl compare`.

    The cells are in the order of `MEANS`.
    """

    name: str
    seeds: list[int]
    cells: list[str]


@dataclass(frozen=True, slots=True)
class _Measure:
    """A result, with functions that format it and its change. `more_is_better` is None if neither direction is."""

    name: str
    write: Callable[[float | None], str]
    change: Callable[[float, float], str]
    more_is_better: bool | None


def _minus(write: Callable[[float | None], str]) -> Callable[[float, float], str]:
    def change(value: float, base: float) -> str:
        shown = write(abs(value - base))
        return "±0" if shown == write(0.0) else f"{'+' if value > base else '−'}{shown}"

    return change


def _times(value: float, base: float) -> str:
    return f"×{formats.short(value / base)}" if base else ""


def _points(value: float, base: float) -> str:
    return formats.points(value - base)


_MOST_ROWS = 100
_JUDGED = ("probe", "knn", "effective_rank", "alignment", "uniformity")
_ACCURACIES = ("probe", "knn")
_EVALUATED = {
    "probe": _Measure("Linear probe", formats.percent, _points, True),
    "knn": _Measure("kNN", formats.percent, _points, True),
    "effective_rank": _Measure("Effective rank", formats.short, _minus(formats.short), True),
    "alignment": _Measure("Alignment", formats.short, _minus(formats.short), False),
    "uniformity": _Measure("Uniformity", formats.short, _minus(formats.short), True),
    "probe before": _Measure("Linear probe before training", formats.percent, _points, None),
    "knn before": _Measure("kNN before training", formats.percent, _points, None),
    "chance": _Measure("Chance", formats.percent, _points, None),
}
"""The measures that come from evaluations, and are only comparable on the same data set."""

_MEASURES = _EVALUATED | {
    "rounds": _Measure("Rounds closed", formats.number, _minus(formats.number), None),
    "full": _Measure("Rounds aggregated in full", formats.percent, _points, True),
    "up": _Measure("Uploaded", formats.in_bytes, _times, False),
    "down": _Measure("Downloaded", formats.in_bytes, _times, False),
    "wall": _Measure("Wall time", formats.seconds, _minus(formats.seconds), False),
}


MEANS = {
    "Linear probe, last": ("probe", False),
    "Linear probe, best": ("probe", True),
    "kNN, last": ("knn", False),
    "kNN, best": ("knn", True),
    "Uniformity": ("uniformity", False),
    "Effective rank": ("effective_rank", False),
}
"""The columns of the means over seeds: each one's measure, and whether it is that of the best round."""


def compare(session: Session, run_ids: Sequence[UUID], curve: str) -> Comparison:
    """Return the comparison of the runs, with one of `CURVES`. Raises ProblemError if one of them does not exist."""
    runs = [run_view.get(session, run_id) for run_id in run_ids]
    scores = overview_queries.scores(session, run_ids)
    columns = [_results(session, run, scores.get(run.id, [])) for run in runs]
    are_alike = len({its[-1].judge for its in scores.values()}) < 2
    results = [
        (measure.name, _cells(measure, [its[key] for its in columns], are_alike=are_alike or key not in _EVALUATED))
        for key, measure in _MEASURES.items()
        if any(its[key] is not None for its in columns)
    ]
    if scores:
        names = [scores[run.id][-1].dataset if run.id in scores else None for run in runs]
        results.insert(0, ("Evaluated on", [ComparedValue(name or formats.NOTHING) for name in names]))
    settings = _settings(runs)
    differing = [(key, cells) for key, cells in settings if any(cell.differs for cell in cells)]
    return Comparison(
        overview.rows(session, runs), results, settings, len(settings) - len(differing), _means(runs, scores),
        _curves(session, runs, scores, curve),
    )  # fmt: skip


def _means(runs: Sequence[Run], scores: Mapping[UUID, Sequence[overview_queries.Score]]) -> list[SeedMeans]:
    """Return the means over the seeds of each setting that has several, in the order of the runs.

    Only completed runs count that were evaluated after the same round, on the same data set; of runs with equal seeds,
    the first.
    """
    groups: defaultdict[str, dict[tuple[Any, Any], Run]] = defaultdict(dict)
    for run in runs:
        newest = scores[run.id][-1] if run.id in scores else None
        if run.outcome != Outcome.COMPLETED or newest is None or newest.round_number == 0:
            continue
        spec = settings_words.flat(run.spec)
        seeds = spec.pop("seed"), spec.pop("partition.seed", None)
        same = json.dumps([spec | {"name": ""}, newest.judge, newest.round_number], sort_keys=True)
        groups[same].setdefault(seeds, run)
    return [
        SeedMeans(
            next(iter(same.values())).name,
            [seed for seed, _ in same],
            [_mean(name, [scores[run.id] for run in same.values()], is_best=best) for name, best in MEANS.values()],
        )
        for same in groups.values()
        if len(same) > 1
    ]


def _mean(name: str, runs: Sequence[Sequence[overview_queries.Score]], *, is_best: bool) -> str:
    """Return the mean of the last values, or of the best ones if all runs were evaluated after the same rounds."""
    if not all(name in its[-1].results for its in runs):
        return formats.NOTHING
    if is_best and len({tuple(score.round_number for score in its) for its in runs}) > 1:
        return formats.NOTHING
    found = [_best(name, its) if is_best else its[-1].results[name] for its in runs]
    known = [value for value in found if value is not None]
    return mean_and_deviation(spread(known), QUALITY[name]) if len(known) == len(found) else "training diverged"


def _best(name: str, scores: Sequence[overview_queries.Score]) -> float | None:
    found = best_round({score.round_number: score.results for score in scores}, name)
    return None if found is None else found[1]


def _results(session: Session, run: Run, scores: Sequence[overview_queries.Score]) -> dict[str, float | None]:
    """Return the results by the keys of the measures."""
    newest = scores[-1].results if scores else {}
    verdicts = [verdict for _, verdict in run_queries.verdicts(session, run.id) if verdict is not None]
    moved, baselines = traffic(session, run), overview.baselines(run, scores)
    ended, started = run.finished_at, run.started_at
    return {
        **{name: newest.get(name) for name in _JUDGED},
        **{f"{name} before": baselines.results.get(name) if name in newest else None for name in _ACCURACIES},
        "chance": None if baselines.chance is None else baselines.chance.accuracy,
        "rounds": float(run.rounds_closed),
        "full": verdicts.count(Verdict.AGGREGATED) / len(verdicts) if verdicts else None,
        "up": float(moved.up),
        "down": float(moved.down),
        "wall": (ended - started).total_seconds() if ended and started else None,
    }


def _cells(measure: _Measure, values: Sequence[float | None], *, are_alike: bool) -> list[ComparedValue]:
    """Return the cells, with changes and a best one only if `are_alike`: results on two data sets are incomparable."""
    known = [value for value in values if value is not None]
    best = (
        None
        if measure.more_is_better is None or not are_alike or len(set(known)) < 2
        else (max if measure.more_is_better else min)(known)
    )
    base = values[0]
    return [
        ComparedValue(
            measure.write(value),
            "" if index == 0 or not are_alike or value is None or base is None else measure.change(value, base),
            is_best=value is not None and value == best,
        )
        for index, value in enumerate(values)
    ]


def _settings(runs: Sequence[Run]) -> list[tuple[str, list[ComparedValue]]]:
    specs = [settings_words.flat(run.spec) for run in runs]
    keys = sorted({key for spec in specs for key in spec if key != "name"})
    return [(key, _row([spec.get(key) for spec in specs])) for key in keys]


def _row(values: Sequence[Any]) -> list[ComparedValue]:
    return [ComparedValue(settings_words.shown(value), differs=value != values[0]) for value in values]


CURVES = {
    "probe": "Linear probe",
    "knn": "kNN",
    "effective_rank": "Effective rank",
    "loss": "Local loss",
}
"""The measures that the chart can draw. The loss is the mean of the clients; the others come from evaluations."""


def _curves(
    session: Session, runs: Sequence[Run], scores: Mapping[UUID, list[overview_queries.Score]], measure: str
) -> list[dict[str, Any]]:
    """Return each run's values of a measure, and for each the bytes sent and the seconds passed until then."""
    found = []
    for run in runs:
        sent, closed = run_queries.bytes_by_round(session, run.id), run_queries.closing_times(session, run.id)
        total, until = 0, {0: 0}
        for number in sorted(sent):
            total += sent[number]
            until[number] = total
        its, start = overview_queries.drawn(scores.get(run.id, [])), run.started_at
        if measure == "loss":
            values = dict(run_queries.of_rounds(session, run.id, measure, numbers(run.rounds_closed)))
        else:
            values = {score.round_number: score.results.get(measure) for score in its}
        found.append(
            {
                "id": str(run.id),
                "name": run.name,
                "rounds": list(values),
                "bytes": [until.get(number) for number in values],
                "seconds": [
                    0.0 if not n else (closed[n] - start).total_seconds() if start and n in closed else None
                    for n in values
                ],
                "values": list(values.values()),
                "path": [
                    [score.results.get("alignment"), score.results.get("uniformity"), score.round_number]
                    for score in its
                ],
            }
        )
    return found


def numbers_of(found: Sequence[Mapping[str, Any]], measure: str) -> list[tuple[int, list[str]]]:
    """Return the values of a comparison's curves as rows: a round, and each run's value and when it was reached."""
    write = _EVALUATED[measure].write if measure in _EVALUATED else formats.short
    columns = [
        {
            number: f"{write(value)} ({formats.in_bytes(sent)}, {formats.seconds(passed)})"
            for number, sent, passed, value in zip(
                run["rounds"], run["bytes"], run["seconds"], run["values"], strict=True
            )
            if value is not None
        }
        for run in found
    ]
    return _rows(columns)


def path_of(found: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[str]]]:
    """Return the alignment and uniformity of each run by round, as rows."""
    columns = [
        {
            number: f"{formats.short(alignment)}, {formats.short(uniformity)}"
            for alignment, uniformity, number in run["path"]
            if alignment is not None and uniformity is not None
        }
        for run in found
    ]
    return _rows(columns)


def _rows(columns: Sequence[Mapping[int, str]]) -> list[tuple[int, list[str]]]:
    rounds = sorted({number for column in columns for number in column})
    shown = overview_queries.thinned(rounds, _MOST_ROWS) if rounds else []
    return [(number, [column.get(number, formats.NOTHING) for column in columns]) for number in shown]
