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

from .conftest import Setting, make_spec, write_images
from .coordinator import Refusal

INTRODUCTION = Register(
    worker_version="0", methods={"fedbyol": 1}, device="cpu", num_images=32, channels=1, image_size=16
)


class Killed(BaseException):
    """An exception that stands for the death of the process."""


def play_rounds(setting: Setting, disturb: Callable[[int], Any] = lambda number: None, num_rounds: int = 3) -> None:
    """Play rounds in which each update is the next broadcast. If a step dies, a new worker finishes the round."""
    broadcast: Tensors | None = None
    for number in range(1, num_rounds + 1):
        setting.offer(make_spec(), number, broadcast)
        with pytest.MonkeyPatch.context() as patch:
            if (interfere := disturb(number)) is not None:
                interfere(patch)
                with pytest.raises((Killed, Unreachable)):
                    setting.restart().step()
        if len(setting.coordinator.submissions) < number:
            setting.restart().step()
        broadcast = setting.sent()


def assert_like_undisturbed(setting: Setting) -> None:
    for index, expected in enumerate(setting.train_directly(make_spec(), 3)):
        assert are_equal(setting.sent(index), expected), f"round {index + 1} differs"


def test_three_rounds_give_the_same_bits_as_the_engine(setting: Setting) -> None:
    play_rounds(setting)
    assert_like_undisturbed(setting)
    assert [submit.num_examples for submit in setting.coordinator.submissions] == [32] * 3
    assert all("loss" in submit.metrics for submit in setting.coordinator.submissions)
    kept = sorted((setting.folder / "runs").glob("*/*"))
    # The older state is needed if the last round is skipped.
    assert [path.name.partition("-")[0] for path in kept] == ["000002", "000003"]
    # The newest update is needed if the coordinator loses it.
    assert [(path / "update.safetensors").exists() for path in kept] == [False, True]


@pytest.mark.parametrize("has_it", [True, False], ids=["sent from the disk", "trained again"])
def test_an_accepted_update_is_sent_again_with_the_same_bits_if_it_is_requested_again(
    setting: Setting, *, has_it: bool
) -> None:
    """If the coordinator lost the update, it gets the same bits again, trained from the same state as the first
    time."""
    broadcast: Tensors | None = None
    for number in (1, 2, 3):
        before = setting.coordinator.last_accepted
        setting.offer(make_spec(), number, broadcast)
        setting.restart().step()
        if number > 1:
            setting.coordinator.last_accepted = before  # as if this round had accepted nothing of this client
            setting.offer(make_spec(), number, broadcast)
            [kept] = (setting.folder / "runs").glob(f"*/00000{number}-*/update.safetensors")
            if not has_it:  # an older worker has removed it
                kept.unlink()
            with capture_logs() as logs:
                setting.restart().step()
            assert any(line["event"] == "work.already_trained" for line in logs) == has_it
            first, second = setting.coordinator.submissions[-2:]
            assert second.model_dump(exclude={"assignment_id", "anchor"}) == first.model_dump(
                exclude={"assignment_id", "anchor"}
            )
        broadcast = setting.sent()
    expected = setting.train_directly(make_spec(), 3)
    assert are_equal(setting.sent(), expected[2])
    assert setting.coordinator.declined == []


def dies_in(owner: type, name: str, *, after: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a patch that kills the process before or after this call."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if after:
            original(*args, **kwargs)
        raise Killed

    return lambda patch: patch.setattr(owner, name, call)


@pytest.mark.full(but=4)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Executor, "_fetch"),
        (Executor, "execute"),
        (ClientStates, "keep"),
        (Egress, "send"),
        (Agent, "_train_and_submit"),
    ],
)
def test_a_worker_killed_at_any_point_submits_the_same_weights(
    setting: Setting, owner: type, name: str, *, after: bool
) -> None:
    play_rounds(setting, lambda number: dies_in(owner, name, after=after) if number == 2 else None)
    assert_like_undisturbed(setting)


@pytest.mark.parametrize(
    "where", ["fedssl_worker.state.save_tensors", "fedssl_worker.disclosure.ledger.journal._write_all"]
)
def test_work_is_done_after_a_full_disk_has_space_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """If the state or the ledger does not fit on the disk, the work is not declined. It is done once there is space."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    setting.offer(make_spec(), 1)
    agent = setting.restart()
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        for _ in range(3):
            agent.step()
    assert setting.coordinator.declined == []
    assert setting.coordinator.submissions == []
    agent.step()
    assert are_equal(setting.sent(), setting.train_directly(make_spec(), 1)[0])


def is_read_only(setting: Setting, patch: pytest.MonkeyPatch) -> None:
    """Make creating and removing files fail, as on a read-only disk."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    patch.setattr("fedssl_worker.state.tempfile.mkdtemp", fail)
    patch.setattr("pathlib.Path.unlink", fail)


def has_a_file_as_folder(setting: Setting, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(setting.folder / "runs")
    (setting.folder / "runs").touch()


def is_missing(setting: Setting, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(setting.folder)


@pytest.mark.parametrize("breaks", [is_read_only, has_a_file_as_folder, is_missing])
def test_work_is_declined_before_training_if_the_state_cannot_be_written(
    setting: Setting, breaks: Callable[[Setting, pytest.MonkeyPatch], None]
) -> None:
    play_rounds(setting, num_rounds=1)
    setting.offer(make_spec(), 2, setting.sent())
    agent, trained = setting.restart(), []
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(executor_module, "run_local_round", lambda *_: trained.append(1))
        breaks(setting, patch)
        agent.step()
    assert not trained
    [declined] = setting.coordinator.declined
    assert declined.reason == "the worker cannot write its state, so it sends nothing: see its log"
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["state.unwritable"]


def test_work_is_declined_before_training_if_the_ledger_could_not_be_written(setting: Setting) -> None:
    play_rounds(setting, num_rounds=1)
    agent, train, trained = setting.restart(), executor_module.run_local_round, []

    def count(*arguments: Any, **named: Any) -> Any:
        trained.append(1)
        return train(*arguments, **named)

    shutil.rmtree(setting.folder / "ledger")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_module, "run_local_round", count)
        for _ in range(2):
            setting.offer(make_spec(), 2, setting.sent())
            agent.step()
    assert len(trained) == 1  # the ledger first fails when it has to record this update
    assert {each.reason for each in setting.coordinator.declined} == {
        "the worker cannot write its ledger, so it sends nothing: see its log"
    }


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_worker_killed_during_a_delivery_submits_the_same_weights(setting: Setting, *, after: bool) -> None:
    setting.coordinator.delivery_bytes = DELIVERY_BYTES
    play_rounds(setting, lambda number: dies_in(WorkerClient, "deliver", after=after) if number == 2 else None)
    assert_like_undisturbed(setting)
    assert "submit" not in setting.coordinator.calls


def test_a_worker_killed_after_training_does_not_train_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.offer(make_spec(), 1)
    with pytest.MonkeyPatch.context() as patch:
        dies_in(Egress, "send", after=False)(patch)
        with pytest.raises(Killed):
            setting.restart().step()
    monkeypatch.setattr(executor_module, "run_local_round", None)
    setting.restart().step()
    assert len(setting.coordinator.submissions) == 1


def test_a_request_is_repeated_if_its_answer_is_lost(setting: Setting) -> None:
    def lose(number: int) -> None:
        setting.coordinator.drop_answer_of = "submit" if number < 3 else "PUT artifact"

    play_rounds(setting, lose)
    assert_like_undisturbed(setting)
    assert len(setting.coordinator.submissions) == 3


def test_an_update_is_submitted_once_the_coordinator_is_reachable_again(setting: Setting) -> None:
    away = threading.Event()

    def refuse(call: str) -> None:
        if call == "PUT artifact" and len(setting.coordinator.calls) < 10:
            away.set()
        if away.is_set():
            raise Refusal("unavailable", 503)

    setting.coordinator.before = refuse
    setting.offer(make_spec(), 1)
    thread = threading.Thread(target=run_until_refused, args=(setting.restart(),))
    thread.start()
    wait_until(lambda: setting.coordinator.calls[-1:] == ["claim"] and away.is_set())
    away.clear()
    wait_until(lambda: setting.coordinator.submissions)
    leave(setting, thread)
    assert are_equal(setting.sent(), setting.train_directly(make_spec(), 1)[0])


def test_an_upload_that_was_too_slow_is_sent_again_without_training_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stall(call: str) -> None:
        if call == "PUT artifact":
            raise Refusal("too-slow", 408, "Less than 4096 bytes came in 30 seconds.")

    setting.coordinator.before = stall
    setting.offer(make_spec(), 1)
    agent = setting.restart()
    with pytest.raises(TryAgain):
        agent.step()
    assert setting.coordinator.declined == []
    setting.coordinator.before = lambda call: None
    monkeypatch.setattr(executor_module, "run_local_round", None)  # nothing is trained twice
    agent.step()
    assert len(setting.coordinator.submissions) == 1


def run_until_refused(agent: Agent) -> None:
    with pytest.raises(Refused):
        agent.run()


def leave(setting: Setting, thread: threading.Thread) -> None:
    def revoke(call: str) -> None:
        raise Refusal("forbidden", 403, "This client was revoked.")

    setting.coordinator.before = revoke
    thread.join(20)
    assert not thread.is_alive()


def test_a_revoked_worker_ends(setting: Setting) -> None:
    def revoke(call: str) -> None:
        raise Refusal("unauthenticated", 401, "Ask the operator for a new token.")

    setting.coordinator.before = revoke
    with pytest.raises(Refused, match="Ask the operator"):
        setting.restart().run()
    with pytest.raises(Refused, match="Ask the operator"):
        register(setting.client, INTRODUCTION, Backoff())


def test_registration_waits_for_the_coordinator(setting: Setting) -> None:
    def refuse(call: str) -> None:
        if len(setting.coordinator.calls) < 12:
            raise Refusal("unavailable", 503)

    setting.coordinator.before = refuse
    registered = register(setting.client, INTRODUCTION, Backoff(first=0.01, longest=0.05))
    assert registered.client_id == "hospital-a"
    assert setting.coordinator.introductions == [INTRODUCTION]


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
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch)
    assignment_id = setting.offer(make_spec(), 1)
    thread = threading.Thread(target=setting.restart().step)
    thread.start()
    wait_until(lambda: len(setting.coordinator.heartbeats) > 4)
    setting.coordinator.reply = HeartbeatReply(carry_on=False, reason="the run was stopped")
    thread.join(10)
    assert not thread.is_alive()
    assert {beat.assignment_id for beat in setting.coordinator.heartbeats} == {assignment_id}
    steps = [beat.progress.step for beat in setting.coordinator.heartbeats if beat.progress is not None]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert not setting.coordinator.submissions
    assert not setting.coordinator.declined


@pytest.mark.parametrize(("lease", "news"), [(2.0, 2 / 3), (60.0, 2.0), (300.0, 10.0), (3600.0, 120.0)])
def test_heartbeats_are_less_frequent_with_a_long_lease(lease: float, news: float) -> None:
    assert lease_module.progress_interval(lease) == news


def test_a_full_disk_during_idle_tasks_does_not_end_the_worker(setting: Setting) -> None:
    def on_idle() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    setting.restart(on_idle=on_idle).step()
    assert setting.coordinator.calls[0] == "claim"


def test_a_worker_waits_for_the_pause_in_the_answer_before_it_claims_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fedssl_worker.agent.time.sleep", slept.append)
    idle: list[None] = []
    agent = setting.restart(claim_seconds=0, on_idle=lambda: idle.append(None))
    for given in ("7", "86400", "-1", "soon", "0", None):
        setting.coordinator.pause_seconds = given
        agent.step()
    assert slept[:2] == [7.0, 60.0]  # a coordinator cannot make a worker wait for a day
    assert set(slept[2:]) == {0.5}  # as with a coordinator that answers claims at once
    assert len(idle) == 6


@pytest.mark.parametrize(("slug", "status"), [("lease-lost", 409), ("round-closed", 410), ("not-found", 404)])
def test_a_lost_lease_ends_the_training(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, slug: str, status: int
) -> None:
    slow(monkeypatch)

    def lose(call: str) -> None:
        if call == "heartbeat":
            raise Refusal(slug, status, "The lease is another's.")

    setting.coordinator.before = lose
    setting.offer(make_spec(), 1)
    with capture_logs() as logs:
        setting.restart().step()
    assert {"event": "work.cancelled", "reason": "The lease is another's."}.items() <= logs[-1].items()
    assert setting.coordinator.declined == []


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("slug", "status", "num_failures"), [("unavailable", 503, 30), ("", 404, 5), ("", 410, 5)])
def test_an_outage_of_heartbeats_does_not_end_the_training(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, slug: str, status: int, num_failures: int
) -> None:
    """An outage may also look like a proxy's answer: an ingress controller that restarts answers every request with
    404."""
    slow(monkeypatch)
    failures = iter(range(num_failures))

    def fail(call: str) -> None:
        if call == "heartbeat" and next(failures, None) is not None:
            raise Refusal(slug, status)

    setting.coordinator.before = fail
    setting.offer(make_spec(), 1, lease_seconds=0.3)
    thread = threading.Thread(target=setting.restart().step)
    thread.start()
    wait_until(lambda: len(setting.coordinator.heartbeats) > 2)
    setting.coordinator.reply = HeartbeatReply(carry_on=False)
    thread.join(10)
    assert not thread.is_alive()


def test_a_worker_that_is_revoked_while_it_trains_ends(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)

    def revoke(call: str) -> None:
        if call == "heartbeat":
            raise Refusal("forbidden", 403, "Revoked.")

    setting.coordinator.before = revoke
    setting.offer(make_spec(), 1)
    with pytest.raises(Refused, match="Revoked"):
        setting.restart().run()


def decline_reason(setting: Setting) -> str:
    setting.restart().step()
    assert setting.coordinator.submissions == []
    (decline,) = setting.coordinator.declined
    return decline.reason


def test_work_with_an_unknown_method_is_declined(setting: Setting) -> None:
    setting.offer(make_spec(), 1)
    setting.coordinator.rename = (b'"name":"fedbyol"', b'"name":"fednewest"')
    assert "fednewest" in decline_reason(setting)


def test_work_whose_plan_differs_from_the_workers_is_declined(setting: Setting) -> None:
    item = setting.item(make_spec(), 1)
    plan = item.plan.model_copy(update={"update": item.plan.update[:-1]})
    setting.coordinator.offer(item.model_copy(update={"plan": plan}))
    assert "which determines what may leave" in decline_reason(setting)


def test_work_that_needs_more_channels_than_allowed_is_declined(setting: Setting) -> None:
    path = write_images(setting.folder / "bounded.npz")
    setting.images = OwnImages(str(path), torch.device("cpu"), image_size=16, channels=1)
    setting.offer(make_spec(data={"channels": 3, "image_size": 16}), 1)
    assert "--channels 3" in decline_reason(setting)


def _scaled(setting: Setting, factor: float) -> Tensors:
    update = setting.train_directly(make_spec(), 1)[0]
    return {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in update.items()}


def test_a_diverged_training_is_declined_and_leaves_no_state(setting: Setting) -> None:
    spec = make_spec(training={"batch_size": 8, "local_epochs": 30, "optimizer": {"learning_rate": 100.0}})
    setting.offer(spec, 1, _scaled(setting, 1e30))
    assert "learning_rate" in decline_reason(setting)
    assert not list((setting.folder / "runs").glob("*/*"))


def test_work_with_an_unexpected_error_is_declined_and_the_worker_continues(setting: Setting) -> None:
    def fail(*args: object) -> None:
        raise ValueError("/home/owner/private/patient-42.png is odd")

    setting.offer(make_spec(), 1)
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(executor_module, "run_local_round", fail)
        reason = decline_reason(setting)
    assert "ValueError" in reason
    assert "patient" not in reason
    assert any(line["event"] == "work.failed" for line in logs)
    setting.offer(make_spec(), 1)
    setting.restart().step()
    assert len(setting.coordinator.submissions) == 1


def test_a_broken_device_ends_the_worker(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise torch.AcceleratorError("device-side assert triggered")

    monkeypatch.setattr(executor_module, "run_local_round", fail)
    setting.offer(make_spec(), 1)
    with pytest.raises(torch.AcceleratorError):
        setting.restart().run()
    [declined] = setting.coordinator.declined
    assert declined.reason == "the worker lost its GPU, and ends (AcceleratorError): see its log"


def test_work_is_declined_if_its_update_is_refused(setting: Setting) -> None:
    def refuse(call: str) -> None:
        if call == "PUT artifact":
            raise Refusal("artifact-rejected", 422, "Tensor x is odd.")

    setting.coordinator.before = refuse
    setting.offer(make_spec(), 1)
    assert "Tensor x is odd." in decline_reason(setting)
    assert not list((setting.folder / "runs").glob("*/*"))


@pytest.mark.parametrize("call", ["PUT artifact", "submit"])
@pytest.mark.parametrize("error", [Refusal("", 404), Untrusted("The certificate has expired.")], ids=["404", "expired"])
def test_an_answer_of_another_server_does_not_lose_a_trained_update(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    def fail(*args: Any, **_: Any) -> None:
        if isinstance(error, Untrusted) or args[0] == call:
            raise error

    setting.offer(make_spec(), 1)
    with monkeypatch.context() as patch:
        if isinstance(error, Untrusted):
            patch.setattr(setting.client, "submit" if call == "submit" else "upload", fail)
        else:
            setting.coordinator.before = fail
        with pytest.raises((NotFound, Untrusted)):
            setting.restart().step()
    setting.coordinator.before = lambda _: None
    assert setting.coordinator.declined == []
    monkeypatch.setattr(executor_module, "run_local_round", None)  # nothing is trained again
    setting.restart().step()
    assert are_equal(setting.sent(), setting.train_directly(make_spec(), 1)[0])


def test_a_proxy_that_refuses_the_update_is_reported(setting: Setting) -> None:
    def refuse(call: str) -> None:
        if call == "PUT artifact":
            raise Refusal("", 413)

    setting.coordinator.before = refuse
    setting.offer(make_spec(), 1)
    assert "413" in decline_reason(setting)


def test_an_update_is_removed_only_after_the_decline_has_arrived(setting: Setting) -> None:
    away = threading.Event()
    away.set()

    def refuse(call: str) -> None:
        if call == "PUT artifact":
            raise Refusal("artifact-rejected", 422, "Tensor x is odd.")
        if call == "decline" and away.is_set():
            raise Refusal("", 404)

    setting.coordinator.before = refuse
    setting.offer(make_spec(), 1)
    with pytest.raises(NotFound):
        setting.restart().step()
    assert list((setting.folder / "runs").glob("*/*"))
    away.clear()
    assert "Tensor x is odd." in decline_reason(setting)
    assert not list((setting.folder / "runs").glob("*/*"))


def test_the_update_of_a_deleted_run_is_removed(setting: Setting) -> None:
    def gone(call: str) -> None:
        if call in ("PUT artifact", "decline"):
            raise Refusal("not-found", 404, "No such assignment any more.")

    setting.coordinator.before = gone
    setting.offer(make_spec(), 1)
    setting.restart().step()
    assert not list((setting.folder / "runs").glob("*/*"))


def test_a_rejected_submission_does_not_change_the_client_state(setting: Setting) -> None:
    setting.offer(make_spec(), 1)
    setting.restart().step()
    setting.coordinator.rejects = True
    setting.offer(make_spec(), 2, setting.sent())
    setting.restart().step()
    (kept,) = (setting.folder / "runs").glob("*/*")
    assert kept.name.startswith("000001-")


@pytest.mark.parametrize(("slug", "status"), [("duplicate-update", 409), ("round-closed", 410), ("lease-lost", 409)])
def test_a_late_submission_is_not_a_failure(setting: Setting, slug: str, status: int) -> None:
    def late(call: str) -> None:
        if call == "submit":
            raise Refusal(slug, status)

    setting.coordinator.before = late
    setting.offer(make_spec(), 1)
    setting.restart().step()
    assert setting.coordinator.declined == []


def test_a_client_whose_state_is_lost_trains_without_it(setting: Setting) -> None:
    setting.offer(make_spec(), 1)
    setting.restart().step()
    (kept,) = (setting.folder / "runs").glob("*/*")
    (kept / "state.safetensors").unlink()
    setting.offer(make_spec(), 2, setting.sent())
    with capture_logs() as logs:
        setting.restart().step()
    assert len(setting.coordinator.submissions) == 2
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
