"""Accuracies next to their baselines, as a table and as JSON."""

import math
from collections.abc import Mapping
from typing import Any

import typer

from fedssl.cli.accuracies import ACCURACIES
from fedssl.cli.output import show_table
from fedssl.protocol.chance import Chance
from fedssl.protocol.initial import InitialConfig


def show_scores(
    title: str,
    last: Mapping[str, float],
    untrained: Mapping[str, float],
    chance: Chance | None,
    *,
    best: Mapping[str, tuple[int, float] | None] | None = None,
    initial: InitialConfig | None = None,
) -> None:
    """Print the accuracies among the measures of an encoder in percent, and how chance is computed.

    `untrained`: the measures of the encoder before training. `best`: the best round with its accuracy, chosen on the
    test set. `initial`: the weights that the run started from, if these were not random: the points gained are then
    those over them.
    """
    names = [name for name in ACCURACIES if name in last]
    if not names:
        return
    bests = {name: found for name in names if (found := (best or {}).get(name)) is not None}
    before = "untrained" if initial is None else "start"
    columns = [title, "#chance", f"#{before}", "#trained", "#points gained", *(["best round"] if bests else [])]
    rows = []
    for name in names:
        gained = 100 * (last[name] - untrained.get(name, math.nan))
        row = [ACCURACIES[name], _percent(None if chance is None else chance.accuracy), _percent(untrained.get(name))]
        row += [_percent(last[name]), None if math.isnan(gained) else f"{gained:+.1f}"]
        if bests:
            row.append(f"{_percent(bests[name][1])}, round {bests[name][0]}" if name in bests else None)
        rows.append(row)
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
