"""Rounds that a data owner's policy refuses are not offered to its client, and an event gives the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedssl.client import WorkerClient
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.states import Outcome, RunState, Verdict
from fedssl.protocol.work import Register
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import Tables

WEIGHTS = {"artifact": "weights", "methods": ["fedalignuniform"]}


def introduce(worker: WorkerClient, *rules: dict[str, Any], policy: bool = True, digest: str = "0" * 64) -> None:
    notice = PolicyNotice.model_validate({"digest": digest, "allow": rules})
    worker.register(
        Register(
            worker_version="test",
            methods={"fedalignuniform": 1},
            device="cpu",
            num_images=100,
            channels=1,
            image_size=8,
            policy=notice if policy else None,
        )
    )


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    """Return a run of two clients. `a` has no policy. The policy of `b`, registered before the run, allows nothing."""
    introduce(coordinator.worker("b"))
    scenario = Scenario(
        coordinator, tables, tmp_path, "a", cohort={"clients": ["a", "b"], "min_clients": 1}, num_rounds=2
    )
    scenario.workers["b"] = coordinator.worker("b", register=False)
    return scenario


def test_a_round_is_not_offered_to_clients_whose_policy_refuses_it(scenario: Scenario) -> None:
    assert scenario.states() == [("a", 1, "offered")]
    assert scenario.workers["b"].claim(0) is None
    [event] = scenario.events("policy.refuses")
    assert event.message.startswith("not offered to b: its data owner's policy: no rule allows weights of fedalign")
    assert event.data["clients"].keys() == {"b"}
    scenario.work("a")
    scenario.advance()
    assert scenario.rounds[0].verdict == Verdict.AGGREGATED


def test_the_rules_of_a_policy_are_shown(scenario: Scenario) -> None:
    introduce(scenario.workers["b"], WEIGHTS)
    shown = scenario.coordinator.client.client("b").policy
    assert shown is not None
    assert [rule.artifact for rule in shown.allow] == ["weights"]
    assert str(shown) == "weights of fedalignuniform (00000000)"
    assert scenario.coordinator.client.client("a").policy is None


def test_a_client_whose_policy_also_allows_metrics_takes_part_and_is_listed(scenario: Scenario) -> None:
    introduce(scenario.workers["b"], WEIGHTS, {"artifact": "metrics", "methods": ["fed*"], "tensors": ["loss"]})
    client = scenario.coordinator.client
    shown = client.client("b").policy
    assert shown is not None
    assert [rule.artifact for rule in shown.allow] == ["weights", "metrics"]
    assert [view.id for view in client.clients()] == ["a", "b"]
    scenario.work("a")
    scenario.advance()
    scenario.advance()
    assert {name for name, _, _ in scenario.states()} == {"a", "b"}
    client.revoke_client("b")
    assert client.client("b").revoked_at is not None


def test_a_relaxed_policy_counts_from_the_next_round(scenario: Scenario) -> None:
    introduce(scenario.workers["b"], WEIGHTS)
    scenario.work("a")
    scenario.advance()
    assert scenario.states() == [("a", 1, "offered"), ("b", 1, "offered")]
    assert len(scenario.events("policy.refuses")) == 1


def test_a_run_waits_for_a_policy_that_allows_it(coordinator: Coordinator, tables: Tables) -> None:
    worker = coordinator.worker("b", register=False)
    introduce(worker, {**WEIGHTS, "max_rounds": 1})
    run = coordinator.client.create_run(tiny_spec(cohort={"clients": ["b"]}, num_rounds=2))
    for _ in range(3):
        coordinator.advance(run.id)
    reason = coordinator.client.run(run.id).reason
    assert reason is not None
    assert reason.startswith("waiting for clients: 0 of 1 have registered and may take part; b: its data owner's")
    assert "the run has 2 rounds, max_rounds allows 1" in reason
    assert tables.one("SELECT count(*) FROM events WHERE kind = 'run.waiting'") == 1
    introduce(worker, policy=False)
    coordinator.advance(run.id)
    assert worker.claim(0) is not None


def test_a_round_does_not_wait_for_a_client_whose_policy_was_tightened_meanwhile(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "ab", num_rounds=1)
    item = scenario.claim("b")
    introduce(scenario.workers["b"])
    scenario.workers["b"].decline(item.assignment_id, "the data owner's policy does not permit this work")
    scenario.work("a")
    scenario.advance()
    assert scenario.rounds[0].verdict == Verdict.PARTIAL
    assert scenario.events("round.reoffered") == []  # not offered to `b` again, only to be declined again
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


def test_a_quorum_that_policies_make_impossible_in_mid_round_is_asked_for_again(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """The run waits as it does before a round opens, because the data owner may relax the policy again."""
    scenario = Scenario(coordinator, tables, tmp_path, "ab", num_rounds=1, cohort={"min_updates": 2, "max_attempts": 2})
    item = scenario.claim("b")
    introduce(scenario.workers["b"])
    scenario.workers["b"].decline(item.assignment_id, "the data owner's policy does not permit this work")
    scenario.work("a")
    scenario.advance()
    assert (scenario.run.state, scenario.round.attempt) == (RunState.RUNNING, 2)
    introduce(scenario.workers["b"], policy=False)
    tables.execute("UPDATE assignments SET offered_at = now() WHERE state = 'offered'")
    scenario.work("b")
    scenario.advance()
    assert (scenario.rounds[0].verdict, scenario.run.outcome) == (Verdict.AGGREGATED, Outcome.COMPLETED)


def test_equal_policies_are_read_once_whatever_their_digests(coordinator: Coordinator) -> None:
    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.identity import clients

    for name in "edcb":
        introduce(coordinator.worker(name), *([WEIGHTS] if name in "bd" else []), digest=name * 64)
    coordinator.worker("a")
    with transaction() as session:
        found = {str(each.client_ids): each.notice for each in clients.policies(session, "abcd")}
        assert {name: len(notice.allow) for name, notice in found.items()} == {"['b', 'd']": 1, "['c']": 0}
        assert [row.client_id for row in clients.registrations(session, "edcba")] == list("abcde")
    run = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 3}))
    coordinator.advance(run.id)
    coordinator.advance(run.id)
    left_out = coordinator.client.run(run.id).left_out
    assert {name: why.partition(":")[0] for name, why in left_out.items()} == dict.fromkeys(
        "ce", "its data owner's policy"
    )


def _long(num_bytes: int) -> dict[str, Any]:
    """Return a policy notice whose names and patterns take `num_bytes` bytes."""
    left = num_bytes - 2 * len('"fedalignuniform",') - len('"*",')
    patterns = [f"*{number:060}" for number in range(left // 64)]
    patterns[0] += "x" * (left % 64)
    rules = [{**WEIGHTS, "tensors": ["*", *patterns[:200]]}, {**WEIGHTS, "tensors": patterns[200:]}]
    return {"digest": "0" * 64, "allow": rules}


def test_a_policy_that_is_too_long_to_check_is_refused(scenario: Scenario, coordinator: Coordinator) -> None:
    introduction = {
        "worker_version": "1",
        "methods": {},
        "device": "cpu",
        "num_images": 1,
        "channels": 1,
        "image_size": 8,
    }
    with coordinator.http(coordinator.worker_token("b")) as http:
        for num_bytes, status in ((2**14, 200), (2**14 + 1, 422)):
            answer = http.post("/v1/work/register", json={**introduction, "policy": _long(num_bytes)})
            assert answer.status_code == status
    [mistake] = answer.json()["errors"]
    assert mistake["loc"] == ["policy"]
    assert "patterns take 16385 bytes in all, and at most 16384 are allowed: write fewer" in mistake["msg"]


def test_a_policy_that_an_older_version_accepted_is_not_compiled_if_it_is_too_long(
    scenario: Scenario, tables: Tables
) -> None:
    scenario.work("a")
    tables.execute("UPDATE clients SET policy = %s::jsonb WHERE id = 'b'", json.dumps(_long(2**14 + 1)))
    scenario.advance()
    scenario.advance()
    *_, event = scenario.events("policy.refuses")
    assert event.message.startswith("not offered to b: its data owner's policy: the policy's names and patterns take")
