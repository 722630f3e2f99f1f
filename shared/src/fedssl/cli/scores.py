"""Accuracies next to their baselines, as a table and as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from fedssl.cli.accuracies import ACCURACIES
from fedssl.cli.output import show_table
from fedssl.protocol.chance import Chance
from fedssl.protocol.initial import InitialConfig


@dataclass(frozen=True, slots=True)
class Score:
    """An accuracy, 0..1, and its baselines.

    `untrained`: of the encoder before training. `best`: the best round with its accuracy, chosen on the test set.
    """

    name: str
    chance: float | None
    untrained: float | None
    last: float
    best: tuple[int, float] | None = None


def scores_of(
    last: Mapping[str, float],
    untrained: Mapping[str, float],
    chance: Chance | None,
    best: Mapping[str, tuple[int, float] | None] | None = None,
) -> list[Score]:
    """Return the accuracies among the measures of an encoder, with their baselines."""
    return [
        Score(
            text, None if chance is None else chance.accuracy, untrained.get(name), last[name], (best or {}).get(name)
        )
        for name, text in ACCURACIES.items()
        if name in last
    ]


def show_scores(
    scores: Sequence[Score], title: str, chance: Chance | None, initial: InitialConfig | None = None
) -> None:
    """Print the accuracies in percent, and how the chance comes about. `initial`: the weights that the run started
    from, if these were not random: the gain is the gain over them."""
    if not scores:
        return
    bests = any(score.best for score in scores)
    before = "untrained" if initial is None else "start"
    columns = [title, "#chance", f"#{before}", "#trained", "#points gained", *(["best round"] if bests else [])]
    rows = []
    for score in scores:
        gained = None if score.untrained is None else 100 * (score.last - score.untrained)
        best = (
            [] if not bests else [None if score.best is None else f"{_percent(score.best[1])}, round {score.best[0]}"]
        )
        gained = None if gained is None or math.isnan(gained) else gained
        row = [score.name, _percent(score.chance), _percent(score.untrained), _percent(score.last)]
        rows.append([*row, None if gained is None else f"{gained:+.1f}", *best])
    show_table(columns, rows)
    how = "" if chance is None else f"; chance: {chance.how}, without an encoder"
    chosen = "; the best round is chosen on the test set" if bests else ""
    origin = "" if initial is None else f", from the {initial.source}"
    typer.echo(f"{before}: the encoder before the first round{origin}{how}{chosen}")


def baselines_as_json(untrained: Mapping[str, float], chance: Chance | None) -> dict[str, Any]:
    """Return the baselines for a JSON document; null for what is not known."""
    found = {name: untrained[name] for name in ACCURACIES if name in untrained}
    return {"untrained": found or None, "chance": None if chance is None else chance.as_json()}


def _percent(share: float | None) -> str | None:
    if share is None:
        return None
    return "diverged" if math.isnan(share) else f"{100 * share:.2f} %"
