"""The worker's loop: claim, train, submit, and everything that can interrupt it."""

import errno
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from fedssl.artifacts.tensors import Tensors
from fedssl.backoff import Backoff
from fedssl.client import NotFound, TooManyRequests, TryAgain, Unreachable, Untrusted, WorkerClient
from fedssl.engine import LocalProgress
from fedssl.protocol.errors import Problem
from fedssl.protocol.work import DELIVERY_BYTES, HeartbeatReply, Register
from fedssl_worker import executor as executor_module
from fedssl_worker import lease as lease_module
from fedssl_worker.agent import Agent, register
from fedssl_worker.backoff import Refused, retry_until_answered
from fedssl_worker.data import OwnImages
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.executor import Executor
from fedssl_worker.state import ClientStates
from support.tensors import are_equal
from support.waiting import wait_until

from .conftest import WorkerHarness, make_spec, write_images
from .coordinator import Refusal

INTRODUCTION = Register(
    worker_version="0", methods={"fedbyol": 1}, device="cpu", num_images=32, channels=1, image_size=16
)


class Killed(BaseException):
    """An exception that stands for the death of the process."""


def play_rounds(
    harness: WorkerHarness, disturb: Callable[[int], Any] = lambda number: None, num_rounds: int = 3
) -> None:
    """Play rounds in which each update is the next broadcast. If a step dies, a new worker finishes the round."""
    broadcast: Tensors | None = None
    for number in range(1, num_rounds + 1):
        harness.offer(make_spec(), number, broadcast)
        with pytest.MonkeyPatch.context() as patch:
            if (interfere := disturb(number)) is not None:
                interfere(patch)
                with pytest.raises((Killed, Unreachable)):
                    harness.restart().step()
        if len(harness.coordinator.submissions) < number:
            harness.restart().step()
        broadcast = harness.sent()


def assert_like_undisturbed(harness: WorkerHarness) -> None:
    for index, expected in enumerate(harness.train_directly(make_spec(), 3)):
        assert are_equal(harness.sent(index), expected), f"round {index + 1} differs"


def test_three_rounds_give_the_same_bits_as_the_engine(harness: WorkerHarness) -> None:
    play_rounds(harness)
    assert_like_undisturbed(harness)
    assert [submit.num_examples for submit in harness.coordinator.submissions] == [32] * 3
    assert all("loss" in submit.metrics for submit in harness.coordinator.submissions)
    kept = sorted((harness.folder / "runs").glob("*/*"))
    # The older state is needed if the last round is skipped.
    assert [path.name.partition("-")[0] for path in kept] == ["000002", "000003"]
    # The newest update is needed if the coordinator loses it.
    assert [(path / "update.safetensors").exists() for path in kept] == [False, True]


@pytest.mark.parametrize("has_it", [True, False], ids=["sent from the disk", "trained again"])
def test_an_accepted_update_is_sent_again_with_the_same_bits_if_it_is_requested_again(
    harness: WorkerHarness, *, has_it: bool
) -> None:
    """If the coordinator lost the update, it gets the same bits again, trained from the same state as the first
    time."""
    broadcast: Tensors | None = None
    for number in (1, 2, 3):
        before = harness.coordinator.last_accepted
        harness.offer(make_spec(), number, broadcast)
        harness.restart().step()
        if number > 1:
            harness.coordinator.last_accepted = before  # as if this round had accepted nothing of this client
            harness.offer(make_spec(), number, broadcast)
            [kept] = (harness.folder / "runs").glob(f"*/00000{number}-*/update.safetensors")
            if not has_it:  # an older worker has removed it
                kept.unlink()
            with capture_logs() as logs:
                harness.restart().step()
            assert any(line["event"] == "work.already_trained" for line in logs) == has_it
            first, second = harness.coordinator.submissions[-2:]
            assert second.model_dump(exclude={"assignment_id", "anchor"}) == first.model_dump(
                exclude={"assignment_id", "anchor"}
            )
        broadcast = harness.sent()
    expected = harness.train_directly(make_spec(), 3)
    assert are_equal(harness.sent(), expected[2])
    assert harness.coordinator.declined == []


def dies_in(owner: type, name: str, *, after: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a patch that kills the process before or after this call."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if after:
            original(*args, **kwargs)
        raise Killed

    return lambda patch: patch.setattr(owner, name, call)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ClientStates, "keep"),
        (Executor, "_fetch"),
        (Executor, "execute"),
        (Egress, "send"),
        (Agent, "_train_and_submit"),
    ],
)
def test_a_worker_killed_at_any_point_submits_the_same_weights(
    harness: WorkerHarness, owner: type, name: str, *, after: bool
) -> None:
    play_rounds(harness, lambda number: dies_in(owner, name, after=after) if number == 2 else None)
    assert_like_undisturbed(harness)


@pytest.mark.parametrize(
    "where", ["fedssl_worker.state.save_tensors", "fedssl_worker.disclosure.ledger.journal._write_all"]
)
def test_work_is_done_after_a_full_disk_has_space_again(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """If the state or the ledger does not fit on the disk, the work is not declined. It is done once there is space."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    harness.offer(make_spec(), 1)
    agent = harness.restart()
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        for _ in range(3):
            agent.step()
    assert harness.coordinator.declined == []
    assert harness.coordinator.submissions == []
    agent.step()
    assert are_equal(harness.sent(), harness.train_directly(make_spec(), 1)[0])


def is_read_only(harness: WorkerHarness, patch: pytest.MonkeyPatch) -> None:
    """Make creating and removing files fail, as on a read-only disk."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    patch.setattr("fedssl_worker.state.tempfile.mkdtemp", fail)
    patch.setattr("pathlib.Path.unlink", fail)


def has_a_file_as_folder(harness: WorkerHarness, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(harness.folder / "runs")
    (harness.folder / "runs").touch()


def is_missing(harness: WorkerHarness, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(harness.folder)


@pytest.mark.parametrize("breaks", [is_read_only, has_a_file_as_folder, is_missing])
def test_work_is_declined_before_training_if_the_state_cannot_be_written(
    harness: WorkerHarness, breaks: Callable[[WorkerHarness, pytest.MonkeyPatch], None]
) -> None:
    play_rounds(harness, num_rounds=1)
    harness.offer(make_spec(), 2, harness.sent())
    agent, trained = harness.restart(), []
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(executor_module, "run_local_round", lambda *_: trained.append(1))
        breaks(harness, patch)
        agent.step()
    assert not trained
    [declined] = harness.coordinator.declined
    assert declined.reason == "the worker cannot write its state, so it sends nothing: see its log"
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["state.unwritable"]


def test_work_is_declined_before_training_if_the_ledger_could_not_be_written(harness: WorkerHarness) -> None:
    play_rounds(harness, num_rounds=1)
    agent, train, trained = harness.restart(), executor_module.run_local_round, []

    def count(*arguments: Any, **named: Any) -> Any:
        trained.append(1)
        return train(*arguments, **named)

    shutil.rmtree(harness.folder / "ledger")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_module, "run_local_round", count)
        for _ in range(2):
            harness.offer(make_spec(), 2, harness.sent())
            agent.step()
    assert len(trained) == 1  # the ledger first fails when it has to record this update
    assert {each.reason for each in harness.coordinator.declined} == {
        "the worker cannot write its ledger, so it sends nothing: see its log"
    }


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_worker_killed_during_a_delivery_submits_the_same_weights(harness: WorkerHarness, *, after: bool) -> None:
    harness.coordinator.delivery_bytes = DELIVERY_BYTES
    play_rounds(harness, lambda number: dies_in(WorkerClient, "deliver", after=after) if number == 2 else None)
    assert_like_undisturbed(harness)
    assert "submit" not in harness.coordinator.calls


def test_a_worker_killed_after_training_does_not_train_again(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.offer(make_spec(), 1)
    with pytest.MonkeyPatch.context() as patch:
        dies_in(Egress, "send", after=False)(patch)
        with pytest.raises(Killed):
            harness.restart().step()
    monkeypatch.setattr(executor_module, "run_local_round", None)
    harness.restart().step()
    assert len(harness.coordinator.submissions) == 1


def test_a_request_is_repeated_if_its_answer_is_lost(harness: WorkerHarness) -> None:
    def lose(number: int) -> None:
        harness.coordinator.drop_answer_of = "submit" if number < 3 else "PUT artifact"

    play_rounds(harness, lose)
    assert_like_undisturbed(harness)
    assert len(harness.coordinator.submissions) == 3


def test_an_update_is_submitted_once_the_coordinator_is_reachable_again(harness: WorkerHarness) -> None:
    away = threading.Event()

    def refuse(call: str) -> None:
        if call == "PUT artifact" and len(harness.coordinator.calls) < 10:
            away.set()
        if away.is_set():
            raise Refusal("unavailable", 503)

    harness.coordinator.before = refuse
    harness.offer(make_spec(), 1)
    thread = threading.Thread(target=run_until_refused, args=(harness.restart(),))
    thread.start()
    wait_until(lambda: harness.coordinator.calls[-1:] == ["claim"] and away.is_set())
    away.clear()
    wait_until(lambda: harness.coordinator.submissions)
    leave(harness, thread)
    assert are_equal(harness.sent(), harness.train_directly(make_spec(), 1)[0])


def test_an_upload_that_was_too_slow_is_sent_again_without_training_again(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stall(call: str) -> None:
        if call == "PUT artifact":
            raise Refusal("too-slow", 408, "Less than 4096 bytes came in 30 seconds.")

    harness.coordinator.before = stall
    harness.offer(make_spec(), 1)
    agent = harness.restart()
    with pytest.raises(TryAgain):
        agent.step()
    assert harness.coordinator.declined == []
    harness.coordinator.before = lambda call: None
    monkeypatch.setattr(executor_module, "run_local_round", None)  # nothing is trained twice
    agent.step()
    assert len(harness.coordinator.submissions) == 1


def run_until_refused(agent: Agent) -> None:
    with pytest.raises(Refused):
        agent.run()


def leave(harness: WorkerHarness, thread: threading.Thread) -> None:
    def revoke(call: str) -> None:
        raise Refusal("forbidden", 403, "This client was revoked.")

    harness.coordinator.before = revoke
    thread.join(20)
    assert not thread.is_alive()


def test_a_revoked_worker_ends(harness: WorkerHarness) -> None:
    def revoke(call: str) -> None:
        raise Refusal("unauthenticated", 401, "Ask the operator for a new token.")

    harness.coordinator.before = revoke
    with pytest.raises(Refused, match="Ask the operator"):
        harness.restart().run()
    with pytest.raises(Refused, match="Ask the operator"):
        register(harness.client, INTRODUCTION, Backoff())


def test_registration_waits_for_the_coordinator(harness: WorkerHarness) -> None:
    def refuse(call: str) -> None:
        if len(harness.coordinator.calls) < 12:
            raise Refusal("unavailable", 503)

    harness.coordinator.before = refuse
    registered = register(harness.client, INTRODUCTION, Backoff(first=0.01, longest=0.05))
    assert registered.client_id == "hospital-a"
    assert harness.coordinator.introductions == [INTRODUCTION]


def slow(monkeypatch: pytest.MonkeyPatch, beats: float = 0.05) -> None:
    """Make training continue until it is cancelled, with a lease that is renewed often."""
    monkeypatch.setattr(lease_module, "_PROGRESS_SECONDS", beats)
    monkeypatch.setattr(lease_module, "_REPORTS_PER_LEASE", 60 / beats)

    def train(*args: Any) -> None:
        for step in range(10_000):
            args[-1](
                LocalProgress(epoch=1, num_epochs=1, step=step, num_steps=10_000, loss=1.0, images_per_second=10.0)
            )
            threading.Event().wait(0.01)

    monkeypatch.setattr(executor_module, "run_local_round", train)


def test_heartbeats_carry_the_newest_progress_and_may_cancel_the_work(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch)
    assignment_id = harness.offer(make_spec(), 1)
    thread = threading.Thread(target=harness.restart().step)
    thread.start()
    wait_until(lambda: len(harness.coordinator.heartbeats) > 4)
    harness.coordinator.reply = HeartbeatReply(carry_on=False, reason="the run was stopped")
    thread.join(10)
    assert not thread.is_alive()
    assert {beat.assignment_id for beat in harness.coordinator.heartbeats} == {assignment_id}
    steps = [beat.progress.step for beat in harness.coordinator.heartbeats if beat.progress is not None]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert not harness.coordinator.submissions
    assert not harness.coordinator.declined


@pytest.mark.parametrize(("lease", "news"), [(2.0, 2 / 3), (60.0, 2.0), (300.0, 10.0), (3600.0, 120.0)])
def test_heartbeats_are_less_frequent_with_a_long_lease(lease: float, news: float) -> None:
    assert lease_module.progress_interval(lease) == news


def test_a_full_disk_during_idle_tasks_does_not_end_the_worker(harness: WorkerHarness) -> None:
    def on_idle() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    harness.restart(on_idle=on_idle).step()
    assert harness.coordinator.calls[0] == "claim"


def test_a_worker_waits_for_the_pause_in_the_answer_before_it_claims_again(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fedssl_worker.agent.time.sleep", slept.append)
    idle: list[None] = []
    agent = harness.restart(claim_seconds=0, on_idle=lambda: idle.append(None))
    for given in ("7", "86400", "-1", "soon", "0", None):
        harness.coordinator.pause_seconds = given
        agent.step()
    assert slept[:2] == [7.0, 60.0]  # a coordinator cannot make a worker wait for a day
    assert set(slept[2:]) == {0.5}  # as with a coordinator that answers claims at once
    assert len(idle) == 6


@pytest.mark.parametrize(("slug", "status"), [("lease-lost", 409), ("round-closed", 410), ("not-found", 404)])
def test_a_lost_lease_ends_the_training(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, slug: str, status: int
) -> None:
    slow(monkeypatch)

    def lose(call: str) -> None:
        if call == "heartbeat":
            raise Refusal(slug, status, "The lease is another's.")

    harness.coordinator.before = lose
    harness.offer(make_spec(), 1)
    with capture_logs() as logs:
        harness.restart().step()
    assert {"event": "work.cancelled", "reason": "The lease is another's."}.items() <= logs[-1].items()
    assert harness.coordinator.declined == []


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("slug", "status", "num_failures"), [("unavailable", 503, 30), ("", 404, 5), ("", 410, 5)])
def test_an_outage_of_heartbeats_does_not_end_the_training(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, slug: str, status: int, num_failures: int
) -> None:
    """An outage may also look like a proxy's answer: an ingress controller that restarts answers every request with
    404."""
    slow(monkeypatch)
    failures = iter(range(num_failures))

    def fail(call: str) -> None:
        if call == "heartbeat" and next(failures, None) is not None:
            raise Refusal(slug, status)

    harness.coordinator.before = fail
    harness.offer(make_spec(), 1, lease_seconds=0.3)
    thread = threading.Thread(target=harness.restart().step)
    thread.start()
    wait_until(lambda: len(harness.coordinator.heartbeats) > 2)
    harness.coordinator.reply = HeartbeatReply(carry_on=False)
    thread.join(10)
    assert not thread.is_alive()


def test_a_worker_that_is_revoked_while_it_trains_ends(harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)

    def revoke(call: str) -> None:
        if call == "heartbeat":
            raise Refusal("forbidden", 403, "Revoked.")

    harness.coordinator.before = revoke
    harness.offer(make_spec(), 1)
    with pytest.raises(Refused, match="Revoked"):
        harness.restart().run()


def decline_reason(harness: WorkerHarness) -> str:
    harness.restart().step()
    assert harness.coordinator.submissions == []
    (decline,) = harness.coordinator.declined
    return decline.reason


def test_work_with_an_unknown_method_is_declined(harness: WorkerHarness) -> None:
    harness.offer(make_spec(), 1)
    harness.coordinator.rename = (b'"name":"fedbyol"', b'"name":"fednewest"')
    assert "fednewest" in decline_reason(harness)


def test_work_whose_plan_differs_from_the_workers_is_declined(harness: WorkerHarness) -> None:
    item = harness.item(make_spec(), 1)
    plan = item.plan.model_copy(update={"update": item.plan.update[:-1]})
    harness.coordinator.offer(item.model_copy(update={"plan": plan}))
    assert "which determines what may leave" in decline_reason(harness)


def test_work_that_needs_more_channels_than_allowed_is_declined(harness: WorkerHarness) -> None:
    path = write_images(harness.folder / "bounded.npz")
    harness.images = OwnImages(str(path), torch.device("cpu"), image_size=16, channels=1)
    harness.offer(make_spec(data={"channels": 3, "image_size": 16}), 1)
    assert "--channels 3" in decline_reason(harness)


def _scaled(harness: WorkerHarness, factor: float) -> Tensors:
    update = harness.train_directly(make_spec(), 1)[0]
    return {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in update.items()}


def test_a_diverged_training_is_declined_and_leaves_no_state(harness: WorkerHarness) -> None:
    spec = make_spec(training={"batch_size": 8, "local_epochs": 3, "optimizer": {"learning_rate": 100.0}})
    harness.offer(spec, 1, _scaled(harness, 1e30))
    assert "learning_rate" in decline_reason(harness)
    assert not list((harness.folder / "runs").glob("*/*"))


def test_work_with_an_unexpected_error_is_declined_and_the_worker_continues(harness: WorkerHarness) -> None:
    def fail(*args: object) -> None:
        raise ValueError("/home/owner/private/patient-42.png is odd")

    harness.offer(make_spec(), 1)
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(executor_module, "run_local_round", fail)
        reason = decline_reason(harness)
    assert "ValueError" in reason
    assert "patient" not in reason
    assert any(line["event"] == "work.failed" for line in logs)
    harness.offer(make_spec(), 1)
    harness.restart().step()
    assert len(harness.coordinator.submissions) == 1


def test_a_broken_device_ends_the_worker(harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise torch.AcceleratorError("device-side assert triggered")

    monkeypatch.setattr(executor_module, "run_local_round", fail)
    harness.offer(make_spec(), 1)
    with pytest.raises(torch.AcceleratorError):
        harness.restart().run()
    [declined] = harness.coordinator.declined
    assert declined.reason == "the worker lost its GPU, and ends (AcceleratorError): see its log"


def test_work_is_declined_if_its_update_is_refused(harness: WorkerHarness) -> None:
    def refuse(call: str) -> None:
        if call == "PUT artifact":
            raise Refusal("artifact-rejected", 422, "Tensor x is odd.")

    harness.coordinator.before = refuse
    harness.offer(make_spec(), 1)
    assert "Tensor x is odd." in decline_reason(harness)
    assert not list((harness.folder / "runs").glob("*/*"))


@pytest.mark.parametrize("call", ["PUT artifact", "submit"])
@pytest.mark.parametrize("error", [Refusal("", 404), Untrusted("The certificate has expired.")], ids=["404", "expired"])
def test_an_answer_of_another_server_does_not_lose_a_trained_update(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    def fail(*args: Any, **_: Any) -> None:
        if isinstance(error, Untrusted) or args[0] == call:
            raise error

    harness.offer(make_spec(), 1)
    with monkeypatch.context() as patch:
        if isinstance(error, Untrusted):
            patch.setattr(harness.client, "submit" if call == "submit" else "upload", fail)
        else:
            harness.coordinator.before = fail
        with pytest.raises((NotFound, Untrusted)):
            harness.restart().step()
    harness.coordinator.before = lambda _: None
    assert harness.coordinator.declined == []
    monkeypatch.setattr(executor_module, "run_local_round", None)  # nothing is trained again
    harness.restart().step()
    assert are_equal(harness.sent(), harness.train_directly(make_spec(), 1)[0])


def test_a_proxy_that_refuses_the_update_is_reported(harness: WorkerHarness) -> None:
    def refuse(call: str) -> None:
        if call == "PUT artifact":
            raise Refusal("", 413)

    harness.coordinator.before = refuse
    harness.offer(make_spec(), 1)
    assert "413" in decline_reason(harness)


def test_an_update_is_removed_only_after_the_decline_has_arrived(harness: WorkerHarness) -> None:
    away = threading.Event()
    away.set()

    def refuse(call: str) -> None:
        if call == "PUT artifact":
            raise Refusal("artifact-rejected", 422, "Tensor x is odd.")
        if call == "decline" and away.is_set():
            raise Refusal("", 404)

    harness.coordinator.before = refuse
    harness.offer(make_spec(), 1)
    with pytest.raises(NotFound):
        harness.restart().step()
    assert list((harness.folder / "runs").glob("*/*"))
    away.clear()
    assert "Tensor x is odd." in decline_reason(harness)
    assert not list((harness.folder / "runs").glob("*/*"))


def test_the_update_of_a_deleted_run_is_removed(harness: WorkerHarness) -> None:
    def gone(call: str) -> None:
        if call in ("PUT artifact", "decline"):
            raise Refusal("not-found", 404, "No such assignment any more.")

    harness.coordinator.before = gone
    harness.offer(make_spec(), 1)
    harness.restart().step()
    assert not list((harness.folder / "runs").glob("*/*"))


def test_a_rejected_submission_does_not_change_the_client_state(harness: WorkerHarness) -> None:
    harness.offer(make_spec(), 1)
    harness.restart().step()
    harness.coordinator.rejects = True
    harness.offer(make_spec(), 2, harness.sent())
    harness.restart().step()
    (kept,) = (harness.folder / "runs").glob("*/*")
    assert kept.name.startswith("000001-")


@pytest.mark.parametrize(("slug", "status"), [("duplicate-update", 409), ("round-closed", 410), ("lease-lost", 409)])
def test_a_late_submission_is_not_a_failure(harness: WorkerHarness, slug: str, status: int) -> None:
    def late(call: str) -> None:
        if call == "submit":
            raise Refusal(slug, status)

    harness.coordinator.before = late
    harness.offer(make_spec(), 1)
    harness.restart().step()
    assert harness.coordinator.declined == []


def test_a_client_whose_state_is_lost_trains_without_it(harness: WorkerHarness) -> None:
    harness.offer(make_spec(), 1)
    harness.restart().step()
    (kept,) = (harness.folder / "runs").glob("*/*")
    (kept / "state.safetensors").unlink()
    harness.offer(make_spec(), 2, harness.sent())
    with capture_logs() as logs:
        harness.restart().step()
    assert len(harness.coordinator.submissions) == 2
    assert any(line["event"] == "client_state.lost" for line in logs)


def test_retries_wait_as_long_as_retry_after_asks_with_an_upper_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fedssl_worker.backoff.time.sleep", slept.append)
    busy = Problem(type="about:blank", title="Asked too often", status=429, detail="Come back.")
    errors = [TooManyRequests(busy, retry_after=7.0), TooManyRequests(busy, retry_after=1e12), TooManyRequests(busy)]

    def ask() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert retry_until_answered(ask, Backoff()) == "done"
    assert slept == [7.0, 300.0, 2.0]
