"""The data owner's policy, from its file to the wire: what it forbids does not leave, with a reason for people."""

import pytest

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.engine import local
from fedssl.protocol.work import WorkItem
from fedssl_worker import lease
from fedssl_worker.disclosure.policy import NotPermitted, PolicyError

from .conftest import Setting, good_update, make_spec

WEIGHTS = ("[[allow]]", 'artifact = "weights"', 'methods = ["fedbyol"]')


def test_what_the_policy_keeps_back_is_declined_before_training(setting: Setting) -> None:
    agent = setting.restart(setting.write_policy())
    setting.offer(make_spec(), 1)
    agent.step()
    (declined,) = setting.coordinator.declined
    assert "the data owner's policy" in declined.reason
    assert "no rule allows weights of fedbyol" in declined.reason
    assert setting.coordinator.calls == ["claim", "decline"]  # not even the broadcast was fetched
    refused = setting.ledger()[-1]
    assert refused["kind"] == "refused"
    assert refused["reason"] == declined.reason
    assert len(refused["policy"]) == 64


def test_the_policy_binds_also_where_only_the_file_is_left_to_send(setting: Setting, item: WorkItem) -> None:
    path = setting.folder / "update"
    save_tensors(good_update(), path)
    with pytest.raises(NotPermitted):
        setting.egress(setting.write_policy()).send(item, path, digest_of(path))
    assert "PUT artifact" not in setting.coordinator.calls
    assert setting.kinds() == ["opened", "refused"]


def test_permitted_work_is_done_and_only_permitted_numbers_leave(setting: Setting) -> None:
    path = setting.write_policy(*WEIGHTS, "[metrics]", "allow = []")
    setting.offer(make_spec(), 1)
    setting.restart(path).step()
    (submitted,) = setting.coordinator.submissions
    assert submitted.metrics == {}
    assert submitted.num_examples == 32
    intent = next(body for body in setting.ledger() if body["kind"] == "intent")
    assert intent["numbers"] == ["num_examples=32"]
    setting.write_policy(*WEIGHTS, "[metrics]", 'allow = ["loss"]')
    setting.offer(make_spec(), 2, setting.sent())
    setting.restart(path).step()
    assert set(setting.coordinator.submissions[-1].metrics) == {"loss"}


def test_heartbeats_carry_no_loss_that_may_not_leave(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(lease, "_REPORTS_PER_LEASE", 6000)
    monkeypatch.setattr(local, "PROGRESS_SECONDS", 0.0)  # however quickly it trains
    setting.offer(make_spec(training={"batch_size": 8, "local_epochs": 30}), 1)
    setting.restart(setting.write_policy(*WEIGHTS)).step()
    told = [beat.progress for beat in setting.coordinator.heartbeats if beat.progress is not None]
    assert any(progress.phase == "training" for progress in told)
    assert [progress.loss for progress in told] == [None] * len(told)
    assert [progress.images_per_second for progress in told] == [None] * len(told)


def test_the_coordinator_receives_the_policy_and_its_changes(setting: Setting) -> None:
    path = setting.write_policy(*WEIGHTS)
    agent, reregister = setting.reregistering(path)
    assert reregister() == "hospital-a"
    agent.step()
    setting.write_policy(*WEIGHTS, "max_rounds = 2")
    agent.step()
    agent.step()
    first, second = (introduction.policy for introduction in setting.coordinator.introductions)
    assert first is not None
    assert second is not None
    assert [rule.artifact for rule in first.allow] == ["weights"]
    assert (first.allow[0].max_rounds, second.allow[0].max_rounds) == (None, 2)
    changed = [body for body in setting.ledger() if body["kind"] == "policy"]
    assert [body["policy"] for body in changed] == [second.digest]


def test_a_policy_that_is_changed_while_a_claim_waits_binds_its_work(setting: Setting) -> None:
    path = setting.write_policy(*WEIGHTS)
    agent, _ = setting.reregistering(path)
    setting.offer(make_spec(), 1)

    def forbid(call: str) -> None:
        if call == "claim":
            setting.write_policy()

    setting.coordinator.before = forbid
    agent.step()
    assert setting.coordinator.submissions == []
    assert len(setting.coordinator.declined) == 1


def test_a_policy_that_becomes_invalid_ends_the_worker(setting: Setting) -> None:
    agent = setting.restart(setting.write_policy(*WEIGHTS))
    setting.write_policy("[[alow]]")
    setting.offer(make_spec(), 1)
    with pytest.raises(PolicyError, match="alow: there is no such key"):
        agent.run()
    assert setting.coordinator.calls == []


def test_another_clients_policy_ends_the_worker(setting: Setting) -> None:
    path = setting.write_policy(*WEIGHTS)
    setting.coordinator.client_id = "hospital-b"
    _, reregister = setting.reregistering(path)
    with pytest.raises(PolicyError, match="hospital-b"):
        reregister()
