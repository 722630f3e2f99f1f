"""Updates are added to the mean before the round closes, and the bits never depend on when they are added."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedssl.protocol.states import Outcome, Verdict
from fedssl_coordinator.aggregator import begun_means, updates
from fedssl_coordinator.core.queues import redis_connection
from support.cast import Cast
from support.coordinator import Coordinator
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


def _begin(cast: Cast) -> None:
    from fedssl_coordinator.aggregator.tasks import begin_mean

    begin_mean(str(cast.id))


def _cast(coordinator: Coordinator, tables: Tables, folder: Path, names: str = "abc", **changes: Any) -> Cast:
    return Cast(coordinator, tables, folder, names, num_rounds=1, **changes)


def _digests(cast: Cast) -> dict[str, str]:
    rows = cast.tables.query(
        "SELECT client_id, update_digest FROM assignments WHERE run_id = %s AND state = 'accepted'", cast.id
    )
    return dict(rows)


def _work(cast: Cast, *names: str, begins: bool = True) -> None:
    for name in names:
        cast.work(name, value=VALUES[name])
        if begins:
            _begin(cast)


def test_each_update_is_added_once_in_the_order_of_the_clients(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, loaded: list[str]
) -> None:
    plain = _cast(coordinator, tables, tmp_path)
    _work(plain, "c", "a", "b", begins=False)
    plain.advance()
    loaded.clear()
    cast = _cast(coordinator, tables, tmp_path)
    waiting = redis_connection().llen("aggregate")
    _work(cast, "c")
    assert loaded == []  # updates of earlier clients may still arrive
    assert redis_connection().llen("aggregate") == waiting + 1
    _work(cast, "a")
    digests = _digests(cast)
    assert loaded == [digests["a"]]
    other = _cast(coordinator, tables, tmp_path)
    _work(other, "a")
    assert loaded == [digests["a"]]  # one mean at a time: two runs would take turns and read everything again
    _work(cast, "b", begins=False)
    cast.advance()
    digests = _digests(cast)
    assert loaded == [digests[name] for name in "abc"]
    assert cast.run.outcome == Outcome.COMPLETED
    assert cast.run.model == plain.run.model
    _begin(other)
    assert loaded[3:] == [_digests(other)["a"]]
    _begin(cast)  # a late message has no effect


def test_events_between_an_update_and_the_close_change_no_bit(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, loaded: list[str]
) -> None:
    """A client does not deliver, one declines, an aggregator is killed, or an added update is lost and sent again."""
    plain = _cast(coordinator, tables, tmp_path, "bc")
    _work(plain, "b", "c", begins=False)
    plain.advance()

    over_sampled = _cast(coordinator, tables, tmp_path, cohort={"fraction": 0.67, "over_sampling": 1.5})
    _work(over_sampled, "b", "c")  # a does not deliver, and the round closes without it
    over_sampled.advance()

    lost = _cast(coordinator, tables, tmp_path, cohort={"min_updates": 2})
    _work(lost, "b", "c")
    lost.workers["a"].decline(lost.claim("a").assignment_id, "no memory")
    _begin(lost)
    lost.pass_deadline()
    lost.advance()
    assert lost.round.verdict == Verdict.PARTIAL

    killed = _cast(coordinator, tables, tmp_path, "bc")
    _work(killed, "b")
    begun_means._begun = None
    _work(killed, "c")
    killed.advance()

    damaged = _cast(coordinator, tables, tmp_path, "bc")
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

    for cast in (over_sampled, lost, killed, damaged):
        assert cast.run.outcome == Outcome.COMPLETED
        assert cast.run.model == plain.run.model


def test_an_update_that_is_missing_when_it_would_be_added_is_left_to_the_close(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, loaded: list[str]
) -> None:
    cast = _cast(coordinator, tables, tmp_path, "bc")
    cast.work("b", value=VALUES["b"])
    digest = _digests(cast)["b"]
    path = coordinator.store / digest[:2] / digest[2:4] / digest
    kept = path.read_bytes()
    path.unlink()
    _begin(cast)
    assert loaded == []
    path.write_bytes(kept)
    cast.work("c", value=VALUES["c"])
    cast.advance()
    assert cast.run.outcome == Outcome.COMPLETED


def test_an_update_is_hashed_again_only_if_its_file_was_written_to(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    read = updates.read_tensors
    monkeypatch.setattr(updates, "read_tensors", lambda path, digest: hashed.append(path.name) or read(path, digest))
    cast = _cast(coordinator, tables, tmp_path, "bc")
    _work(cast, "b")
    name = _digests(cast)["b"]
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
    _work(cast, "c")
    cast.advance()
    assert hashed == [name, name, name, _digests(cast)["c"]]  # both are measured without being hashed again
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
    cast = _cast(coordinator, tables, tmp_path, **changes)
    _work(cast, "a", "b")
    assert loaded == []
    _work(cast, "c")
    cast.advance()
    assert cast.run.outcome == Outcome.COMPLETED
