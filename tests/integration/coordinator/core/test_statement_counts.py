"""The statements, transactions and round trips of workers' requests and of a round. Lower a number here if it falls."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import event

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.protocol.ledger import LedgerAnchor
from fedssl.protocol.work import Register, Submit
from fedssl_coordinator.core.db import engine
from support.coordinator import Coordinator
from support.federation import tensors_for, upload
from support.scenario import Scenario
from support.tables import Tables


class Cost(NamedTuple):
    """The numbers of a request to the API. Each statement, BEGIN, COMMIT and ROLLBACK is a round trip."""

    statements: int
    transactions: int
    round_trips: int


def _cost(request: Callable[[], object]) -> Cost:
    """Return what a request costs, as this process's API sends it.

    A statement outside of a transaction, which needs no BEGIN and COMMIT, counts as a statement only.
    """
    counts = {"before_cursor_execute": 0, "begin": 0, "commit": 0, "rollback": 0}

    def counting(name: str) -> Callable[..., None]:
        def count(*_: object) -> None:
            counts[name] += 1

        return count

    listeners = {name: counting(name) for name in counts}
    for name, listener in listeners.items():
        event.listen(engine(), name, listener)
    try:
        request()
    finally:
        for name, listener in listeners.items():
            event.remove(engine(), name, listener)
    return Cost(counts["before_cursor_execute"], counts["begin"], sum(counts.values()))


def test_an_uploaded_update_costs_eighteen_statements_in_three_transactions(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "abc", num_rounds=1)
    scenario.work("a")  # so that nothing is left to be compiled or cached
    worker, update = scenario.workers["b"], {}
    costs = {"claim": _cost(lambda: scenario.claim("b"))}
    item = scenario.item("b")
    costs["heartbeat"] = _cost(lambda: worker.heartbeat(item.assignment_id))
    costs["download"] = _cost(lambda: worker.download(item.broadcast, tmp_path / "broadcast"))
    costs["upload"] = _cost(
        lambda: update.update(digest=upload(worker, item, tensors_for(item.plan.update, 2.0), tmp_path))
    )
    submission = Submit(
        assignment_id=item.assignment_id, update=update["digest"], num_examples=10, metrics={"loss": 1.0}
    )
    costs["submit"] = _cost(lambda: worker.submit(submission))
    assert costs == {
        "claim": (1, 0, 1),
        "heartbeat": (1, 0, 1),
        "download": (1, 0, 1),
        "upload": (7, 2, 11),
        "submit": (8, 1, 10),
    }
    assert [sum(numbers) for numbers in zip(*costs.values(), strict=True)] == [18, 3, 24]


def test_a_delivery_costs_four_statements_with_or_without_an_anchor(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "abc", num_rounds=1)
    anchors = [LedgerAnchor(key="a" * 64, seq=seq, head=f"{seq:064x}") for seq in (1, 2)]
    assert scenario.workers["b"].heartbeat(anchor=anchors[0]).receipt is not None

    def delivery(name: str, anchor: LedgerAnchor | None) -> Cost:
        item, path = scenario.claim(name), tmp_path / "update"
        save_tensors(tensors_for(item.plan.update, 2.0), path)
        submission = Submit(
            assignment_id=item.assignment_id,
            update=digest_of(path),
            num_examples=10,
            metrics={"loss": 1.0},
            anchor=anchor,
        )
        return _cost(lambda: scenario.workers[name].deliver(submission, path))

    assert delivery("a", None) == (4, 1, 6)
    assert delivery("b", anchors[1]) == (4, 1, 6)


def test_a_claim_without_work_costs_two_or_three_statements(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1)
    scenario.work("a")
    worker = coordinator.worker("a", register=False)
    assert _cost(lambda: worker.claim(0)) == (2, 1, 4)
    assert _cost(lambda: worker.claim(0)) == (3, 1, 5)  # it also asks for evaluations at its site


def test_a_claim_of_a_client_that_was_not_drawn_costs_two_or_three_statements(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1)
    scenario.work("a")
    tables.execute("UPDATE rounds SET opened_at = now() - interval '96 seconds'")
    worker = coordinator.worker("a", register=False)
    assert _cost(lambda: worker.claim(60)) == (2, 1, 4)
    assert _cost(lambda: worker.claim(60)) == (3, 1, 5)  # it also asks for evaluations at its site


def test_a_registration_costs_six_statements(coordinator: Coordinator) -> None:
    worker = coordinator.worker("a")
    introduction = Register(worker_version="1", methods={}, device="cpu", num_images=1000, channels=1, image_size=8)
    assert _cost(lambda: worker.register(introduction)) == (6, 1, 8)


def test_an_anchor_adds_two_statements(coordinator: Coordinator) -> None:
    worker = coordinator.worker("a")
    anchors = [LedgerAnchor(key="a" * 64, seq=seq, head=f"{seq:064x}") for seq in (1, 2)]
    assert worker.heartbeat(anchor=anchors[0]).receipt is not None
    assert _cost(lambda: worker.heartbeat(anchor=anchors[1])) == (3, 1, 5)


def test_closing_a_round_and_opening_the_next_costs_as_much_for_many_clients_as_for_few(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    costs = []
    for names in ("ab", "cdefg"):
        scenario = Scenario(coordinator, tables, tmp_path, names)
        scenario.work(*names)
        costs.append(_cost(scenario.advance))
        assert [row.number for row in scenario.rounds] == [1, 2]
    assert costs == [(41, 7, 55)] * 2
