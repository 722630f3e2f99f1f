"""The data owner's policy, from its file to the network: what it forbids is not sent, and is declined with a reason."""

from pathlib import Path
from uuid import uuid4

import pytest

from fedssl.artifacts.header import file_bytes
from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.engine.secure_sums import context_of, tensors_sent
from fedssl.methods import METHODS
from fedssl.protocol.work import CheckNumbers, WorkItem
from fedssl_worker.disclosure.ledger import Ledger
from fedssl_worker.disclosure.policy import NotPermitted, PolicyError

from .conftest import INTRODUCTION, WorkerHarness, good_update, make_item, make_spec

WEIGHTS = ("[[allow]]", 'artifact = "weights"', 'methods = ["fedbyol"]')


def test_work_that_the_policy_forbids_is_declined_before_training(harness: WorkerHarness) -> None:
    agent = harness.restart(harness.write_policy())
    harness.offer(make_spec(), 1)
    agent.step()
    (declined,) = harness.coordinator.declined
    assert "the data owner's policy" in declined.reason
    assert "no rule allows weights of fedbyol" in declined.reason
    assert harness.coordinator.calls == ["claim", "decline"]  # not even the broadcast was fetched
    refused = harness.ledger()[-1]
    assert refused["kind"] == "refused"
    assert refused["reason"] == declined.reason
    assert len(refused["policy"]) == 64


def test_the_policy_also_applies_to_an_update_that_is_already_trained(harness: WorkerHarness, item: WorkItem) -> None:
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    with pytest.raises(NotPermitted):
        harness.egress(harness.write_policy()).send(item, path, digest_of(path))
    assert "PUT artifact" not in harness.coordinator.calls
    assert harness.kinds() == ["opened", "refused"]


def test_permitted_work_is_done_and_only_permitted_numbers_leave(harness: WorkerHarness) -> None:
    path = harness.write_policy(*WEIGHTS, "[metrics]", "allow = []")
    harness.offer(make_spec(), 1)
    harness.restart(path).step()
    (submitted,) = harness.coordinator.submissions
    assert submitted.metrics == {}
    assert submitted.num_examples == 32
    intent = next(body for body in harness.ledger() if body["kind"] == "intent")
    assert intent["numbers"] == ["num_examples=32"]
    assert intent["reported"] == []
    harness.write_policy(*WEIGHTS, "[metrics]", 'allow = ["loss"]')
    harness.offer(make_spec(), 2, harness.sent())
    harness.restart(path).step()
    assert set(harness.coordinator.submissions[-1].metrics) == {"loss"}
    assert next(body for body in reversed(harness.ledger()) if body["kind"] == "intent")["reported"] == ["loss"]


@pytest.mark.usefixtures("many_heartbeats")
def test_heartbeats_do_not_contain_a_loss_that_the_policy_withholds(harness: WorkerHarness) -> None:
    harness.offer(make_spec(), 1)
    harness.restart(harness.write_policy(*WEIGHTS)).step()
    told = [beat.progress for beat in harness.coordinator.heartbeats if beat.progress is not None]
    assert any(progress.phase == "training" for progress in told)
    assert [progress.loss for progress in told] == [None] * len(told)
    assert [progress.images_per_second for progress in told] == [None] * len(told)


def test_the_number_of_images_is_not_registered_if_the_policy_requires_secure_rounds(harness: WorkerHarness) -> None:
    path = harness.write_policy(*WEIGHTS, 'secure = "required"', "[metrics]", 'allow = ["loss"]')
    agent, reregister = harness.reregistering(path)
    reregister()
    harness.write_policy(*WEIGHTS, 'secure = "required"', "[[allow]]", 'artifact = "centers"', 'methods = ["fedrlc"]')
    agent.step()
    assert [introduction.num_images for introduction in harness.coordinator.introductions] == [None, 32]


def test_the_coordinator_receives_the_policy_and_each_change_of_it(harness: WorkerHarness) -> None:
    path = harness.write_policy(*WEIGHTS)
    agent, reregister = harness.reregistering(path)
    assert reregister() == "hospital-a"
    agent.step()
    harness.write_policy(*WEIGHTS, "max_rounds = 2")
    agent.step()
    agent.step()
    first, second = (introduction.policy for introduction in harness.coordinator.introductions)
    assert first is not None
    assert second is not None
    assert [rule.artifact for rule in first.allow] == ["weights"]
    assert (first.allow[0].max_rounds, second.allow[0].max_rounds) == (None, 2)
    changed = [body for body in harness.ledger() if body["kind"] == "policy"]
    assert [body["policy"] for body in changed] == [second.digest]


def test_only_the_numbers_of_a_check_that_the_policy_allows_are_registered(harness: WorkerHarness) -> None:
    numbers = CheckNumbers(method="fedbyol", problems=0, seconds_per_round=12.5)
    for rules in (WEIGHTS, (*WEIGHTS, "[metrics]", 'allow = ["check/problems"]')):
        harness.egress(harness.write_policy(*rules)).register(
            lambda news: harness.client.register(INTRODUCTION.model_copy(update=news)), numbers
        )
    registered = [introduction.check for introduction in harness.coordinator.introductions]
    assert registered == [None, CheckNumbers(method="fedbyol", problems=0)]


def test_a_policy_that_changes_while_a_claim_waits_applies_to_the_claimed_work(harness: WorkerHarness) -> None:
    path = harness.write_policy(*WEIGHTS)
    agent, _ = harness.reregistering(path)
    harness.offer(make_spec(), 1)

    def forbid(call: str) -> None:
        if call == "claim":
            harness.write_policy()

    harness.coordinator.before = forbid
    agent.step()
    assert harness.coordinator.submissions == []
    assert len(harness.coordinator.declined) == 1


def test_a_policy_that_becomes_invalid_ends_the_worker(harness: WorkerHarness) -> None:
    agent = harness.restart(harness.write_policy(*WEIGHTS))
    harness.write_policy("[[alow]]")
    harness.offer(make_spec(), 1)
    with pytest.raises(PolicyError, match="alow: there is no such key"):
        agent.run()
    assert harness.coordinator.calls == []


def test_another_clients_policy_ends_the_worker(harness: WorkerHarness) -> None:
    path = harness.write_policy(*WEIGHTS)
    harness.coordinator.client_id = "hospital-b"
    _, reregister = harness.reregistering(path)
    with pytest.raises(PolicyError, match="hospital-b"):
        reregister()


def _refused(harness: WorkerHarness) -> str:
    return str([body for body in harness.ledger() if body["kind"] == "refused"][-1]["reason"])


def _limited(harness: WorkerHarness, *limits: str) -> Path:
    """Write a policy with limits on all runs together. They stand before the first rule."""
    path = harness.write_policy(*WEIGHTS)
    head, rules = path.read_text().split("[[allow]]", 1)
    path.write_text("\n".join([head, *limits, "[[allow]]" + rules]))
    return path


def test_rounds_are_limited_over_all_runs_and_restarts(harness: WorkerHarness) -> None:
    """A coordinator could start new runs without end, and each run of one round would respect `max_rounds`."""
    path = _limited(harness, "max_rounds_total = 2")
    for _ in range(2):
        harness.offer(make_spec(num_rounds=1), 1, run_id=uuid4())
        harness.restart(path).step()
    assert len(harness.coordinator.submissions) == 2
    harness.offer(make_spec(num_rounds=1), 1, run_id=uuid4())
    harness.restart(path).step()
    (declined,) = harness.coordinator.declined
    message = "permits updates of 2 rounds in all runs together (max_rounds_total), and those of 2 have left"
    assert message in declined.reason
    assert message in _refused(harness)
    assert harness.coordinator.calls[-2:] == ["claim", "decline"]  # nothing was fetched or trained


def test_another_update_of_a_round_counts_as_another_round(harness: WorkerHarness) -> None:
    """A coordinator could have one round trained repeatedly from other weights, or with another spec."""
    path, spec = _limited(harness, "max_rounds_total = 2"), make_spec()
    for factor in (1, 2, 3):
        harness.offer(spec, 1, {name: factor * tensor for name, tensor in good_update().items()})
        harness.restart(path).step()
    assert len({submission.update for submission in harness.coordinator.submissions}) == 2
    (declined,) = harness.coordinator.declined
    assert "permits updates of 2 rounds in all runs together" in declined.reason


def test_bytes_are_limited_over_all_runs(harness: WorkerHarness, item: WorkItem) -> None:
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    size, digest = path.stat().st_size, digest_of(path)
    policy = _limited(harness, f"max_bytes_total = {2 * size - 1}")
    harness.egress(policy).send(item, path, digest)
    harness.egress(policy).send(item, path, digest)  # the same update after a restart counts once
    other = item.model_copy(update={"run_id": uuid4()})
    match = (
        rf"{2 * size - 1} bytes in all runs together \(max_bytes_total\): {size} have left, and this update has {size}"
    )
    with pytest.raises(NotPermitted, match=match):
        harness.egress(policy).send(other, path, digest)
    harness.egress(_limited(harness, f"max_bytes_total = {2 * size}")).send(other, path, digest)


def test_a_masked_vector_beyond_the_limit_is_refused_before_training(harness: WorkerHarness) -> None:
    secure = {"min_cohort": 3, "collusion": 0}
    item = make_item(make_spec(aggregation={"arithmetic": "fixed"}, secure_aggregation=secure), 1)
    vector = file_bytes(tensors_sent(METHODS["fedbyol"], context_of(item)))
    assert vector > file_bytes(item.plan.update)
    harness.egress(_limited(harness, f"max_bytes_total = {vector}")).require_permitted(item)
    with pytest.raises(NotPermitted, match=f"this update has {vector}"):
        harness.egress(_limited(harness, f"max_bytes_total = {vector - 1}")).require_permitted(item)


def test_an_update_that_was_counted_may_be_sent_again(harness: WorkerHarness, item: WorkItem) -> None:
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    policy = _limited(harness, "max_rounds_total = 1", f"max_bytes_total = {path.stat().st_size}")
    for _ in range(2):  # as if its first transfer was interrupted and the worker restarted
        egress = harness.egress(policy)
        egress.require_permitted(item)
        egress.send(item, path, digest_of(path))


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_totals_are_kept_after_old_files_of_the_ledger_are_deleted(
    harness: WorkerHarness, item: WorkItem, deleted: int
) -> None:
    """Old segments may be deleted. The first entry of each segment has the totals before it."""
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    policy = _limited(harness, "max_rounds_total = 4")
    policy.write_text(policy.read_text() + "\n[ledger]\nsegment_entries = 3\n")
    for _ in range(4):
        harness.egress(policy).send(item.model_copy(update={"run_id": uuid4()}), path, digest_of(path))
    segments = sorted((harness.folder / "ledger").glob("0*.jsonl"))
    assert len(segments) > 3
    segments[deleted].unlink()
    size = path.stat().st_size
    for limit, words in (
        ("rounds_total = 4", "those of 4 have left"),
        (f"bytes_total = {4 * size}", f"{4 * size} have"),
    ):
        with pytest.raises(NotPermitted, match=words):
            harness.egress(_limited(harness, f"max_{limit}")).send(
                item.model_copy(update={"run_id": uuid4()}), path, digest_of(path)
            )


def test_nothing_is_sent_if_an_earlier_version_left_no_totals_and_its_files_are_missing(
    harness: WorkerHarness, item: WorkItem
) -> None:
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    policy = _limited(harness, "max_rounds_total = 9")
    policy.write_text(policy.read_text() + "\n[ledger]\nsegment_entries = 3\n")

    def send() -> None:
        harness.egress(policy).send(item.model_copy(update={"run_id": uuid4()}), path, digest_of(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "_known_totals", lambda ledger: {})
        send()
        send()
    min((harness.folder / "ledger").glob("0*.jsonl")).unlink()
    for _ in range(4):  # a further file does not add the missing totals
        with pytest.raises(NotPermitted, match="earlier files of the ledger are missing"):
            send()


def test_without_limits_on_all_runs_nothing_is_counted(harness: WorkerHarness, item: WorkItem) -> None:
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    egress = harness.egress(harness.write_policy(*WEIGHTS))
    for _ in range(3):
        egress.send(item.model_copy(update={"run_id": uuid4()}), path, digest_of(path))
