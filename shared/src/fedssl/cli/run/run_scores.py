"""The scores of a deployed run next to their baselines, from the evaluations that the coordinator completed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fedssl.cli.accuracies import ACCURACIES
from fedssl.cli.scores import baselines_as_json, show_scores
from fedssl.evaluation.comparable import grouped, names_of
from fedssl.protocol.chance import Chance
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.initial import InitialConfig
from fedssl.protocol.views import EvaluationView

if TYPE_CHECKING:
    from fedssl.client import Client


@dataclass(frozen=True, slots=True)
class RunScores:
    """The evaluations with the same data set and settings: before training, of the newest round and of the best.

    `name`: the data set's, with the settings if there are several.
    """

    name: str
    config: JudgingConfig
    last_round: int
    last: dict[str, float]
    untrained: dict[str, float]
    best: dict[str, tuple[int, float] | None]
    chance: Chance | None


def find_scores(client: "Client", run_id: UUID) -> list[RunScores]:
    """Return the scores by data set and settings. Round 0 is the untrained encoder, or the weights it starts from."""
    groups = grouped(
        row
        for row in client.evaluations(run_id)
        if row.state == "completed" and row.results and any(name in row.results for name in ACCURACIES)
    )
    names = names_of([rows[0] for rows in groups.values()])
    return [_scores(names[setting], rows) for (setting, _), rows in groups.items()]


def show_run_scores(found: Sequence[RunScores], initial: InitialConfig | None) -> None:
    """Print a table for each data set and settings. `initial`: the weights that the run started from, if any."""
    for each in found:
        title = f"{each.name}, round {each.last_round}"
        show_scores(title, each.last, each.untrained, each.chance, best=each.best, initial=initial)


def scores_as_json(found: Sequence[RunScores]) -> list[dict[str, Any]]:
    """Return the scores for a JSON document."""
    return [
        {
            "dataset": each.config.dataset,
            "config": each.config.model_dump(mode="json", exclude={"embedding_map"}),
            "last": {"round": each.last_round, **each.last},
            "best": {name: {"round": best[0], "value": best[1]} for name, best in each.best.items() if best},
            "best_chosen_on": "test",
            "baselines": baselines_as_json(each.untrained, each.chance),
        }
        for each in found
    ]


def _scores(title: str, rows: Sequence[EvaluationView]) -> RunScores:
    in_order = sorted(rows, key=lambda row: row.round_number)
    by_round = {row.round_number: _accuracies(row) for row in in_order}
    last = max(by_round)
    best: dict[str, tuple[int, float] | None] = {}
    for name in by_round[last]:
        values = [
            (at, found[name]) for at, found in by_round.items() if at > 0 and math.isfinite(found.get(name, math.nan))
        ]
        best[name] = max(values, key=lambda each: each[1], default=None)
    return RunScores(title, rows[0].config, last, by_round[last], by_round.get(0, {}), best, in_order[-1].chance)


def _accuracies(row: EvaluationView) -> dict[str, float]:
    found = {name: value for name, value in (row.results or {}).items() if name in ACCURACIES}
    return {name: math.nan if value is None else value for name, value in found.items()}
