"""The validator of event logs accepts the log of a valid run, and refuses every log that no run can produce."""

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from fedssl.protocol.views import EventView
from support.traces import ImpossibleTrace, follow

Change = Callable[[list[EventView]], list[EventView]]


def _event(
    kind: str, message: str = "", number: int | None = None, client: str | None = None, **data: Any
) -> EventView:
    values = {"round_number": number, "client_id": client, "message": message, "data": data}
    return EventView(id=1, at=datetime.now(UTC), kind=kind, run_id=None, **values)


def _work(number: int, client: str) -> list[EventView]:
    kinds = ("assignment.leased", "assignment.submitted", "assignment.accepted")
    return [_event(kind, client, number, client, assignment=f"{client}{number}") for kind in kinds]


def _round(number: int) -> list[EventView]:
    return [
        _event("round.opened", number=number, cohort=["a", "b"]),
        *_work(number, "a"),
        *_work(number, "b"),
        _event("round.aggregating", "aggregating 2 of 2 updates", number),
        _event(
            "round.closed",
            "aggregated: 2 of 2 updates",
            number,
            verdict="aggregated",
            clients={"a": "accepted", "b": "accepted"},
        ),
    ]


def _life() -> list[EventView]:
    return [
        _event("run.created", "name: fedsimclr, 2 rounds"),
        _event("run.started"),
        _event("run.prepared"),
        *_round(1),
        *_round(2),
        _event("run.finished", outcome="completed"),
        _event("assignment.refused"),
    ]


def _numbered(events: list[EventView]) -> list[EventView]:
    ids = itertools.count(1)
    return [event.model_copy(update={"id": next(ids)}) for event in events]


def _without(kind: str, nth: int = 0) -> Change:
    def change(events: list[EventView]) -> list[EventView]:
        at = [index for index, event in enumerate(events) if event.kind == kind][nth]
        return events[:at] + events[at + 1 :]

    return change


def _twice(kind: str, nth: int = 0) -> Change:
    def change(events: list[EventView]) -> list[EventView]:
        at = [index for index, event in enumerate(events) if event.kind == kind][nth]
        return [*events[: at + 1], *events[at:]]

    return change


def _with(before: str, nth: int, *added: EventView) -> Change:
    def change(events: list[EventView]) -> list[EventView]:
        at = [index for index, event in enumerate(events) if event.kind == before][nth]
        return [*events[:at], *added, *events[at:]]

    return change


def test_a_complete_run_is_a_valid_path() -> None:
    trace = follow(_numbered(_life()))
    assert (trace.state, trace.outcome) == ("finished", "completed")
    assert {number: traced.verdict for number, traced in trace.rounds.items()} == {1: "aggregated", 2: "aggregated"}
    assert trace.rounds[2].assignments == {"a2": "accepted", "b2": "accepted"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_without("run.created"), "was not created"),
        (_without("run.started"), "the run is created"),
        (_without("run.prepared"), "not prepared"),
        (_without("assignment.leased"), "assignments: it is offered"),
        (_without("assignment.accepted", 1), "work is live"),
        (_without("round.aggregating"), "nothing was aggregated"),
        (_without("round.closed"), "another round is in progress"),
        (_without("round.closed", 1), "round 2 is not closed"),
        (_twice("run.started"), "runs: it is running"),
        (_twice("assignment.accepted"), "assignments: it is accepted"),
        (_twice("round.closed"), "rounds: it is closed"),
        (_twice("run.finished"), "had ended as completed"),
        (_with("assignment.refused", 0, _work(2, "a")[0]), "had ended as completed"),
        (_with("assignment.accepted", 1, _event("assignment.leased", "", 1, "a", assignment="other")), "is accepted"),
        (_with("assignment.submitted", 0, _event("assignment.leased", "", 1, "a", assignment="other")), "is leased"),
        (_with("assignment.leased", 0, _event("assignment.leased", "", 1, "c", assignment="c1")), "not of the cohort"),
        (_with("assignment.submitted", 0, _event("assignment.expired", "", 1, "b", assignment="a1")), "another client"),
        (_with("round.closed", 0, _event("assignment.leased", "", 1, "a", assignment="x")), "is accepted"),
        (_with("round.closed", 0, _event("run.finished", outcome="stopped")), "is not closed"),
        (_with("round.opened", 1, _event("run.finished", outcome="completed")), "1 of 2 rounds"),
        (_with("round.opened", 1, _event("run.paused")), "the run is paused"),
        (_with("round.closed", 0, _event("distillation.queued", number=1, job="j")), "does not distil"),
        (lambda events: [*events[:5], *reversed(events[5:])], "assignments|rounds|finished"),
    ],
)
def test_impossible_logs_are_refused(change: Change, why: str) -> None:
    with pytest.raises(ImpossibleTrace, match=why):
        follow(_numbered(change(_life())))


def test_events_out_of_order_are_refused() -> None:
    with pytest.raises(ImpossibleTrace, match="not in their order"):
        follow(_numbered(_life())[::-1])


def test_wrong_update_counts_in_a_verdict_are_refused() -> None:
    events = _life()
    wrong = [
        event.model_copy(update={"message": "partial: 1 of 2 updates"}) if event.kind == "round.closed" else event
        for event in events
    ]
    with pytest.raises(ImpossibleTrace, match=r"it should be \(2, 2\)"):
        follow(_numbered(wrong))


def test_resuming_a_stopped_run_is_refused() -> None:
    stopped = [*_life()[:3], _event("run.finished", outcome="stopped"), _event("run.resumed")]
    with pytest.raises(ImpossibleTrace, match="had ended as stopped"):
        follow(_numbered(stopped))
