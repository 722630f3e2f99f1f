"""The display of a run in progress, drawn from constructed views."""

import io
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from rich.console import Console

from fedssl.cli.remaining_time import RemainingTime
from fedssl.cli.run.progress import LiveDisplay, PlainDisplay, Snapshot, num_clients, picture
from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState
from fedssl.protocol.views import AssignmentView, DistillationJobView, RoundView, RunView
from fedssl.protocol.work import Progress
from support.federation import tiny_spec
from support.methods import method_spec

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def part(client: str, state: str = "leased", *, step: int | None = None, attempt: int = 1, reason: str | None = None,
         phase: str = "training") -> AssignmentView:  # fmt: skip
    progress = None
    if step is not None:
        progress = Progress.model_validate({"phase": phase, "epoch": 1, "num_epochs": 2, "step": step, "num_steps": 10,
                                            "loss": -1.5, "images_per_second": 500})  # fmt: skip
    return AssignmentView(
        id=uuid4(), client_id=client, attempt=attempt, state=AssignmentState(state), reason=reason, num_examples=None,
        update=None, progress=progress, offered_at=NOW, leased_at=None, closed_at=None, lease_expires_at=None,
    )  # fmt: skip


def run(closed: int, parts: list[AssignmentView] | None = None, *, number: int | None = None, state: str = "running",
        reason: str | None = None, num_rounds: int = 4) -> RunView:  # fmt: skip
    current = None
    if parts is not None:
        current = RoundView(
            number=closed + 1 if number is None else number, attempt=1, state=RoundState.OPEN, verdict=None,
            reason=None, broadcast="0" * 64, opened_at=NOW, deadline=NOW, closed_at=None, assignments=parts,
        )  # fmt: skip
    return RunView(
        id=UUID(int=7), name="de[bold]mo", method="fedalignuniform", state=RunState(state),
        outcome=Outcome.COMPLETED if state == "finished" else None, reason=reason, rounds_closed=closed,
        num_rounds=num_rounds, created_at=NOW, started_at=NOW, finished_at=None, spec=tiny_spec(), initial_model=None,
        model=None, current_round=current, clients=["a", "b"],
    )  # fmt: skip


def shot(view: RunView, losses: dict[int, float] | None = None, left: float | None = None) -> Snapshot:
    known = losses or {}
    return Snapshot(view, known, max(known, default=0), left)


def drawn(snapshot: Snapshot) -> str:
    screen = Console(file=io.StringIO(), width=120, markup=False, highlight=False)
    screen.print(picture(snapshot))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_only_the_newest_attempt_of_each_client_counts() -> None:
    parts = [part("a", "expired", reason="no heartbeat"), part("a", step=5, attempt=2), part("b", "accepted")]

    assert [view.attempt for view in shot(run(0, parts)).assignments] == [2, 1]


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        (None, 0.25),
        ([part("a"), part("b", "offered")], 0.25),
        ([part("a", step=5), part("b", "offered")], 0.25 + 0.25 / 4),
        ([part("a", step=10, phase="uploading"), part("b", "accepted")], 0.5),
        ([part("a", "expired", step=9), part("b", "accepted")], 0.375),
    ],
)
def test_the_share_done_includes_the_round_in_progress(parts: list[AssignmentView] | None, share: float) -> None:
    assert shot(run(1, parts)).share_done == pytest.approx(share)


def test_a_closed_round_is_not_counted_twice() -> None:
    assert shot(run(4, [part("a", "accepted")], number=4, state="finished")).share_done == 1.0


def test_only_training_clients_count_towards_the_speed() -> None:
    parts = [part("a", step=1), part("b", step=2), part("c", "accepted", step=9), part("d", step=0, phase="uploading")]

    assert shot(run(0, parts)).images_per_second == 1000


def test_the_remaining_time_is_estimated_from_observed_progress() -> None:
    clock = RemainingTime(now=0)

    assert clock.seconds_left(0.5, now=100) is None  # half was done before the first observation
    assert clock.seconds_left(0.505, now=110) is None  # too little to estimate
    assert clock.seconds_left(0.6, now=110) == pytest.approx(40)


def test_plain_output_shows_every_round_once() -> None:
    display = PlainDisplay(Console(file=io.StringIO()))

    assert display.lines(shot(run(0, [part("a", step=1), part("b", step=1)]))) == []
    assert display.lines(shot(run(1, [part("a")]), {1: -1.25}, left=65)) == [
        "round 1 of 4: loss -1.2500, 1,000 images/s, 1:05 left"
    ]
    assert display.lines(shot(run(1, [part("a")]), {1: -1.25})) == []
    assert [line[:12] for line in display.lines(shot(run(3), {1: -1.25, 3: -2.0}))] == ["round 2 of 4", "round 3 of 4"]
    assert display.lines(shot(run(4, state="finished"), {1: -1, 3: -2, 4: -3}, left=9))[-1].endswith("images/s")


def test_plain_output_of_a_run_in_progress_starts_with_its_last_round() -> None:
    display = PlainDisplay(Console(file=io.StringIO()))

    assert display.lines(shot(run(3), {1: -1, 2: -2, 3: -3})) == ["round 3 of 4: loss -3.0000"]


def test_plain_output_shows_each_problem_once() -> None:
    display = PlainDisplay(Console(file=io.StringIO()))
    view = run(0, [part("a", "declined", reason="wrong \x1b[31mshape")], reason="waiting for clients: 1 of 2")

    lines = display.lines(shot(view))
    assert lines == ["waiting for clients: 1 of 2", "a declined: wrong ?[31mshape"]
    assert display.lines(shot(view)) == []


def test_the_picture_shows_round_clients_loss_speed_and_time() -> None:
    parts = [part("a", step=5), part("b", "accepted"), part("c", "offered"), part("d", "declined", reason="no space")]

    text = drawn(shot(run(1, parts), {1: -1.25}, left=65))

    for word in ("round 2 of 4", "loss -1.2500", "500 images/s", "1:05 left", "training epoch 1 of 2", "loss -1.500",
                 "accepted", "waiting", "declined: no space", "de[bold]mo"):  # fmt: skip
        assert word in text


def test_the_picture_of_many_clients_keeps_those_with_problems() -> None:
    parts = [part(f"c{number:02}", "accepted") for number in range(30)] + [part("zz", "rejected", reason="NaN")]

    text = drawn(shot(run(0, parts)))

    assert "zz" in text
    assert "and 15 more" in text


def distilling(epoch: int | None, *, number: int = 1, reason: str | None = None, closed: int = 0) -> RunView:
    """Return a run of FLESD whose clients have finished the round. If `epoch` is None, distillation has not started."""
    parts = [part("a", "accepted"), part("b", "accepted")]
    begun = epoch is not None
    job = DistillationJobView(
        id=UUID(int=9), run_id=UUID(int=7), round_number=number, state=JobState("running" if begun else "queued"),
        reason=reason, epoch=epoch or 0, num_epochs=40, loss=0.125 if begun else None, seconds_per_epoch=2.0,
        eta_seconds=65 if begun else None, checkpoint=None, num_tries=1, created_at=NOW, started_at=NOW,
        updated_at=NOW, finished_at=None,
    )  # fmt: skip
    view = run(closed, parts if number else None)
    return view.model_copy(update={"distillation": job, "spec": method_spec("flesd" if number else "fedca")})


def test_the_picture_shows_the_progress_of_a_distillation() -> None:
    text = drawn(shot(distilling(12)))
    for word in ("distilling epoch 12 of 40", "distillation loss 0.1250", "1:05 of distillation left"):
        assert word in text
    assert "training" not in text
    assert "waiting to distil" in drawn(shot(distilling(None)))
    assert "MemoryError: no room" in drawn(shot(distilling(3, reason="MemoryError: no room")))
    assert "distilling epoch 3 of 40" in drawn(shot(distilling(3, number=0)))


def test_the_coordinators_epochs_count_as_half_of_a_round() -> None:
    assert shot(distilling(None)).share_done == pytest.approx(0.5 / 4)
    assert shot(distilling(20)).share_done == pytest.approx(0.75 / 4)
    trains = run(1, [part("a", step=5), part("b", "accepted")]).model_copy(update={"spec": method_spec("flesd")})
    assert shot(trains).share_done == pytest.approx((1 + 0.75 / 2) / 4)


def test_plain_output_shows_a_distillation_and_its_failure_once() -> None:
    display = PlainDisplay(Console(file=io.StringIO()))

    assert display.lines(shot(distilling(None))) == ["round 1: the coordinator trains for 40 epochs"]
    assert display.lines(shot(distilling(7))) == []
    assert display.lines(shot(distilling(7, reason="no room"))) == ["round 1: no room"]
    assert display.lines(shot(distilling(9, reason="no room"))) == []
    first = PlainDisplay(Console(file=io.StringIO()))
    assert first.lines(shot(distilling(1, number=0))) == [
        "before the first round: the coordinator trains for 40 epochs"
    ]


def test_the_picture_of_a_run_that_has_not_started_shows_what_it_waits_for() -> None:
    assert "waiting for clients" in drawn(shot(run(0, reason="waiting for clients: 0 of 4")))


def test_the_live_display_draws_the_round() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with LiveDisplay(screen) as display:
        display.show(shot(run(1, [part("a", step=5)]), {1: -1.25}))

    assert isinstance(screen.file, io.StringIO)
    assert "round 2 of 4" in screen.file.getvalue()


def test_a_round_of_many_clients_is_shown_as_counts() -> None:
    view = run(1, [])
    assert view.current_round is not None
    counts = {AssignmentState.OFFERED: 100, AssignmentState.SUBMITTED: 50, AssignmentState.ACCEPTED: 1100}
    view = view.model_copy(update={"current_round": view.current_round.model_copy(update={"counts": counts})})
    assert num_clients(view) == 1250
    assert shot(view).share_done == (1 + 0.92) / 4
    assert "1,250 clients: 100 offered, 50 submitted, 1,100 accepted" in drawn(shot(view))
    assert num_clients(run(1, [part("a", "leased")])) == 0  # the answer of an older coordinator has no counts
