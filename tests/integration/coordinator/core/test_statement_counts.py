"""A guard: how many statements and transactions each request of an update costs. Lower a number if it falls."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.protocol.work import Submit
from fedssl_coordinator.core.db import engine
from support.cast import Cast
from support.coordinator import Coordinator
from support.federation import tensors_for, upload
from support.tables import Tables


def _cost(request: Callable[[], object]) -> tuple[int, int]:
    """Return the numbers of statements and of transactions that this process's API sends to Postgres.

    A statement outside of a transaction, which needs no BEGIN and COMMIT, counts as a statement only.
    """
    counts = {"before_cursor_execute": 0, "begin": 0}

    def counting(name: str) -> Callable[..., None]:
        def count(connection: Connection, *_: Any) -> None:
            is_alone = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
            counts[name] += not (name == "begin" and is_alone)

        return count

    listeners = {name: counting(name) for name in counts}
    for name, listener in listeners.items():
        event.listen(engine(), name, listener)
    try:
        request()
    finally:
        for name, listener in listeners.items():
            event.remove(engine(), name, listener)
    return counts["before_cursor_execute"], counts["begin"]


def test_an_uploaded_update_costs_twenty_statements_in_four_transactions(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cast = Cast(coordinator, tables, tmp_path, "abc", num_rounds=1)
    cast.work("a")  # so that nothing is left to be compiled or cached
    worker, update = cast.workers["b"], {}
    costs = {"claim": _cost(lambda: cast.claim("b"))}
    item = cast.item("b")
    costs["heartbeat"] = _cost(lambda: worker.heartbeat(item.assignment_id))
    costs["download"] = _cost(lambda: worker.download(item.broadcast, tmp_path / "broadcast"))
    costs["upload"] = _cost(
        lambda: update.update(digest=upload(worker, item, tensors_for(item.plan.update, 2.0), tmp_path))
    )
    submission = Submit(
        assignment_id=item.assignment_id, update=update["digest"], num_examples=10, metrics={"loss": 1.0}
    )
    costs["submit"] = _cost(lambda: worker.submit(submission))
    assert costs == {"claim": (3, 1), "heartbeat": (1, 0), "download": (1, 0), "upload": (7, 2), "submit": (8, 1)}
    assert [sum(numbers) for numbers in zip(*costs.values(), strict=True)] == [20, 4]


def test_a_delivery_costs_less_than_an_upload_and_a_submission(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cast = Cast(coordinator, tables, tmp_path, "ab", num_rounds=1)
    item, path = cast.claim("a"), tmp_path / "update"
    save_tensors(tensors_for(item.plan.update, 2.0), path)
    submission = Submit(
        assignment_id=item.assignment_id, update=digest_of(path), num_examples=10, metrics={"loss": 1.0}
    )
    assert _cost(lambda: cast.workers["a"].deliver(submission, path)) == (4, 1)


def test_a_claim_without_work_asks_twice_and_then_waits(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cast = Cast(coordinator, tables, tmp_path, num_rounds=1)
    cast.work("a")
    worker = coordinator.worker("a", register=False)
    assert _cost(lambda: worker.claim(0)) == (5, 2)
    assert _cost(lambda: worker.claim(0)) == (6, 2)  # it asks for evaluations at its site, too


def test_a_claim_of_a_client_that_is_not_drawn_asks_once(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cast = Cast(coordinator, tables, tmp_path, num_rounds=1)
    cast.work("a")
    tables.execute("UPDATE rounds SET opened_at = now() - interval '80 seconds'")
    worker = coordinator.worker("a", register=False)
    assert _cost(lambda: worker.claim(60)) == (3, 1)
    assert _cost(lambda: worker.claim(60)) == (4, 1)  # with evaluations at its site
