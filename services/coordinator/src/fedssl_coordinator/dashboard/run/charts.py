"""The numbers behind a run's charts, cut to what can be drawn: at most twelve lines of a thousand points."""

import base64
import math
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import Round
from fedssl_coordinator.dashboard.layout import svg
from fedssl_coordinator.dashboard.layout.client_labels import SLOTS
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.run import view as run_view
from fedssl_coordinator.dashboard.run.activities import SHOWN_CLIENTS
from fedssl_coordinator.dashboard.runs import queries as overview_queries

MOST_POINTS = 1_000
_TIMELINE_ROUNDS = 4
_MOST_ROWS, _MOST_COLUMNS = 500, 500
_MOST_MAPS = 200
_NO_VALUE = 255


def numbers(num_closed: int, most: int = MOST_POINTS) -> list[int]:
    """Return the rounds to draw: all of them, or evenly spaced ones with the newest among them."""
    step = max(1, -(-num_closed // most))
    return sorted({*range(num_closed, 0, -step)})


def curves(session: Session, run_id: UUID) -> dict[str, Any]:
    """Return the results of evaluations by round, and every round's verdict as one letter."""
    run_view.get(session, run_id)
    scores = overview_queries.drawn(overview_queries.scores(session, [run_id]).get(run_id, []))
    names = sorted({name for score in scores for name in score.results})
    letters = [(number, _letter(verdict)) for number, verdict in run_queries.verdicts(session, run_id)]
    chance = scores[-1].chance if scores else None
    return {
        "chance": None if chance is None else chance.accuracy,
        "rounds": [score.round_number for score in scores],
        "results": {name: [score.results.get(name) for score in scores] for name in names},
        "verdicts": "".join(letter for _, letter in letters),
    }


def _letter(verdict: str | None) -> str:
    return svg.UNCLOSED if verdict is None else svg.letter(Round(verdict=verdict))


def metric(session: Session, run_id: UUID, name: str, pinned: Sequence[str]) -> dict[str, Any]:
    """Return one metric by round: a line per client, or if there are too many a band and the pinned clients' lines."""
    run, ids = run_view.get(session, run_id), run_queries.client_ids(session, run_id)
    xs = numbers(min(run.rounds_closed + 1, run.num_rounds))
    chosen = ids if len(ids) <= SLOTS else [client for client in ids if client in set(pinned)][:SLOTS]
    at = {number: index for index, number in enumerate(xs)}
    lines: dict[str, list[float | None]] = {client: [None] * len(xs) for client in chosen}
    for number, client, value in run_queries.of_clients(session, run_id, name, xs, chosen) if chosen else []:
        lines[client][at[number]] = value
    payload: dict[str, Any] = {"rounds": xs, "lines": lines}
    if len(ids) > SLOTS:
        band: list[list[float | None]] = [[None] * len(xs) for _ in range(3)]
        for number, *values in run_queries.band(session, run_id, name, xs):
            for line, value in zip(band, values, strict=True):
                line[at[number]] = value
        payload["band"] = dict(zip(("median", "low", "high"), band, strict=True))
    return payload


def heat(session: Session, run_id: UUID, name: str) -> dict[str, Any]:
    """Return one metric of every client in every round as bytes: 0..254 from least to greatest, 255 if missing."""
    run, ids = run_view.get(session, run_id), run_queries.client_ids(session, run_id)[:_MOST_ROWS]
    xs = numbers(min(run.rounds_closed + 1, run.num_rounds), _MOST_COLUMNS)
    found = run_queries.of_clients(session, run_id, name, xs, ids) if ids else []
    scale = _Scale([value for *_, value in found])
    column, row = {number: at for at, number in enumerate(xs)}, {client: at for at, client in enumerate(ids)}
    cells, newest = bytearray([_NO_VALUE]) * (len(xs) * len(ids)), dict[str, tuple[int, float]]()
    for number, client, value in found:
        cells[row[client] * len(xs) + column[number]] = scale.byte(value)
        newest[client] = max(newest.get(client, (0, 0.0)), (number, value))
    last = [newest[client][1] if client in newest else None for client in ids]
    return {"rounds": xs, "clients": ids, "low": scale.low, "high": scale.high, "scale": scale.name,
            "cells": base64.b64encode(bytes(cells)).decode(), "last": last}  # fmt: skip


def embeddings(session: Session, run_id: UUID) -> dict[str, Any]:
    """Return the rounds that have a map of embeddings, with the evaluations that keep the maps."""
    run_view.get(session, run_id)
    rows = run_queries.mapped(session, run_id)
    step = max(1, -(-len(rows) // _MOST_MAPS))
    shown = rows[(len(rows) - 1) % step :: step] if rows else []
    return {
        "rounds": [{"round": row.round_number, "id": str(row.id)} for row in shown],
        "dataset": rows[-1].dataset if rows else None,
        "method": rows[-1].config["embedding_map"] if rows else None,
    }


class _Scale:
    """A map of numbers to bytes, on a log scale if they are positive and span more than two orders of magnitude."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = min(values, default=0.0), max(values, default=0.0)
        self.name = "log" if self.low > 0 and self.high / 100 > self.low else "linear"

    def byte(self, value: float) -> int:
        if self.high == self.low:
            return 0
        if self.name == "log":  # not the logarithm of a quotient, which may overflow
            low, high = math.log(self.low), math.log(self.high)
            return round(254 * (math.log(value) - low) / (high - low))
        low, high = self.low / 2, self.high / 2  # a difference may overflow too, and that of the halves cannot
        return round(254 * ((value / 2 - low) / (high - low))) if high > low else 0


def outcomes(session: Session, run_id: UUID) -> dict[str, Any]:
    """Return each client's outcome in every round as one letter, or a blank if it had none."""
    run = run_view.get(session, run_id)
    found = run_queries.outcomes(session, run_id)
    width = max((number for cells in found.values() for number, _ in cells), default=run.rounds_closed)
    rows = {}
    for client in sorted(found):
        letters = [" "] * width
        for number, letter in found[client]:
            letters[number - 1] = letter
        rows[client] = "".join(letters)
    return {"rounds": width, "clients": rows}


def timeline(session: Session, run_id: UUID, last: int | None, clients: Sequence[str]) -> dict[str, Any]:
    """Return when clients waited, trained and failed in the four rounds up to `last`, in seconds since 1970."""
    run = run_view.get(session, run_id)
    end = min(last or run.num_rounds, run.rounds_closed + 1, run.num_rounds)
    start = max(1, end - _TIMELINE_ROUNDS + 1)
    rounds = run_queries.rounds_between(session, run_id, start, end)
    shown = list(clients)[:SHOWN_CLIENTS]
    attempts = run_queries.attempts(session, run_id, start, end, shown)
    jobs = run_queries.distillations_between(session, run_id, start, end)
    return {
        "now": run_queries.now(session).timestamp(),
        "rounds": [
            {"number": row.number, "state": row.verdict or row.state, "reason": row.reason,
             "opened": row.opened_at.timestamp(), "closed": _seconds(row.closed_at)}
            for row in rounds
        ],
        "parts": [
            {"round": one.round_number, "client": one.client_id, "attempt": one.attempt, "state": one.state,
             "reason": one.reason, "offered": one.offered_at.timestamp(), "leased": _seconds(one.leased_at),
             "closed": _seconds(one.closed_at), "bytes": one.num_bytes}
            for one in attempts
        ],
        "jobs": [
            {"round": job.round_number, "state": job.state, "started": _seconds(job.started_at),
             "finished": _seconds(job.finished_at)}
            for job in jobs if job.started_at is not None
        ],
    }  # fmt: skip


def _seconds(at: Any) -> float | None:
    return None if at is None else float(at.timestamp())
