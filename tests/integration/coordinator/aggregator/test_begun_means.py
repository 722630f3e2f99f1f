"""Updates are added to the mean before the round closes, and the bits never depend on when they are added."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedssl.protocol.states import Outcome, Verdict
from fedssl_coordinator.aggregator import begun_means, updates
from fedssl_coordinator.core.queues import redis_connection
from support.coordinator import Coordinator
from support.scenario import Scenario
from support.tables import Tables

VALUES = {"a": 0.1, "b": 0.7, "c": 0.3}


@pytest.fixture(autouse=True)
def nothing_begun() -> Iterator[None]:
    begun_means._begun = None
    yield
    begun_means._begun = None


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the digests of the updates that are added to a mean, in their order."""
    found: list[str] = []
    extend = begun_means.PrefixMean.extend

    def recorded(self: Any, loads: Any, weights: Any) -> None:
        before = len(self._added)
        extend(self, loads, weights)
        found.extend(load.load.digest for load in loads[before:])

    monkeypatch.setattr(begun_means.PrefixMean, "extend", recorded)
    return found


def _begin(scenario: Scenario) -> None:
    from fedssl_coordinator.aggregator.tasks import begin_mean

    begin_mean(str(scenario.id))


def _scenario(coordinator: Coordinator, tables: Tables, folder: Path, names: str = "abc", **changes: Any) -> Scenario:
    return Scenario(coordinator, tables, folder, names, num_rounds=1, **changes)


def _digests(scenario: Scenario) -> dict[str, str]:
    rows = scenario.tables.query(
        "SELECT client_id, update_digest FROM assignments WHERE run_id = %s AND state = 'accepted'", scenario.id
    )
    return dict(rows)


def _work(scenario: Scenario, *names: str, begins: bool = True) -> None:
    for name in names:
        scenario.claim(name)
        scenario.upload(name, VALUES[name])  # an update that is delivered in one request begins no mean
        if begins:
            _begin(scenario)


def test_each_update_is_added_once_in_the_order_of_the_clients(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, loaded: list[str]
) -> None:
    plain = _scenario(coordinator, tables, tmp_path)
    _work(plain, "c", "a", "b", begins=False)
    plain.advance()
    loaded.clear()
    scenario = _scenario(coordinator, tables, tmp_path)
    waiting = redis_connection().llen("aggregate")
    _work(scenario, "c")
    assert loaded == []  # updates of earlier clients may still arrive
    assert redis_connection().llen("aggregate") == waiting + 1
    _work(scenario, "a")
    digests = _digests(scenario)
    assert loaded == [digests["a"]]
    other = _scenario(coordinator, tables, tmp_path)
    _work(other, "a")
    assert loaded == [digests["a"]]  # one mean at a time: two runs would take turns and read everything again
    _work(scenario, "b", begins=False)
    scenario.advance()
    digests = _digests(scenario)
    assert loaded == [digests[name] for name in "abc"]
    assert scenario.run.outcome == Outcome.COMPLETED
    assert scenario.run.model == plain.run.model
    _begin(other)
    assert loaded[3:] == [_digests(other)["a"]]
    _begin(scenario)  # a late message has no effect


def test_events_between_an_update_and_the_close_change_no_bit(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, loaded: list[str]
) -> None:
    """A client does not deliver, one declines, an aggregator is killed, or an added update is lost and sent again."""
    plain = _scenario(coordinator, tables, tmp_path, "bc")
    _work(plain, "b", "c", begins=False)
    plain.advance()

    over_sampled = _scenario(coordinator, tables, tmp_path, cohort={"fraction": 0.67, "over_sampling": 1.5})
    _work(over_sampled, "b", "c")  # a does not deliver, and the round closes without it
    over_sampled.advance()

    lost = _scenario(coordinator, tables, tmp_path, cohort={"min_updates": 2})
    _work(lost, "b", "c")
    lost.workers["a"].decline(lost.claim("a").assignment_id, "no memory")
    _begin(lost)
    lost.pass_deadline()
    lost.advance()
    assert lost.round.verdict == Verdict.PARTIAL

    killed = _scenario(coordinator, tables, tmp_path, "bc")
    _work(killed, "b")
    begun_means._begun = None
    _work(killed, "c")
    killed.advance()

    damaged = _scenario(coordinator, tables, tmp_path, "bc")
    _work(damaged, "b")
    path = coordinator.store / _digests(damaged)["b"][:2] / _digests(damaged)["b"][2:4] / _digests(damaged)["b"]
    kept = path.read_bytes()
    path.unlink()
    _work(damaged, "c")
    damaged.advance()
    assert [state for name, attempt, state in damaged.states() if name == "b"] == ["expired", "offered"]
    path.write_bytes(kept)
    damaged.advance()
    _work(damaged, "b")
    damaged.advance()

    for scenario in (over_sampled, lost, killed, damaged):
        assert scenario.run.outcome == Outcome.COMPLETED
        assert scenario.run.model == plain.run.model


def test_an_update_that_is_missing_when_it_would_be_added_is_left_to_the_close(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, loaded: list[str]
) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, "bc")
    scenario.work("b", value=VALUES["b"])
    digest = _digests(scenario)["b"]
    path = coordinator.store / digest[:2] / digest[2:4] / digest
    kept = path.read_bytes()
    path.unlink()
    _begin(scenario)
    assert loaded == []
    path.write_bytes(kept)
    scenario.work("c", value=VALUES["c"])
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


def test_an_update_is_hashed_again_only_if_its_file_was_written_to(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    read = updates.read_tensors
    monkeypatch.setattr(updates, "read_tensors", lambda path, digest: hashed.append(path.name) or read(path, digest))
    scenario = _scenario(coordinator, tables, tmp_path, "bc")
    _work(scenario, "b")
    name = _digests(scenario)["b"]
    first = updates._LoadStored(name)
    path = coordinator.store / name[:2] / name[2:4] / name
    with first.reopen() as again:
        assert again is not None
        assert hashed == [name]
        known = first()
        assert known.keys() == again.keys()
        assert all(known[each].equal(again[each]) for each in known)
    assert hashed == [name, name]
    path.write_bytes(path.read_bytes())
    with first.reopen() as again:
        assert again is None
    first()
    _work(scenario, "c")
    scenario.advance()
    assert hashed == [name, name, name, _digests(scenario)["c"]]  # both are measured without being hashed again
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with first.reopen() as again:
        assert again is None
    with pytest.raises(updates.UpdateLost, match="was damaged"):
        first()
    path.unlink()
    with pytest.raises(updates.UpdateLost, match="is missing"), first.reopen():
        pass


@pytest.mark.parametrize(
    "changes",
    [{"aggregation": {"arithmetic": "fixed"}}, {"robustness": {"max_weight_share": 0.5}},
     {"method": {"name": "fedsimclr", "reducer": {"name": "median"}}, "cohort": {"min_updates": 3}}],
    ids=["fixed arithmetic", "weights that depend on each other", "median"],
)  # fmt: skip
def test_a_mean_that_needs_all_updates_at_once_is_not_begun(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, loaded: list[str], changes: dict[str, Any]
) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, **changes)
    _work(scenario, "a", "b")
    assert loaded == []
    _work(scenario, "c")
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED
