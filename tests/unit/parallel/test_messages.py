"""The order in which several processes train clients, and the report if one of them fails. No process trains."""

import json
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from fedssl.engine import LocalProgress, LocalResult
from fedssl.errors import LocalError, MethodError
from fedssl.methods.api import Context
from fedssl.parallel.pool import ClientProcesses, _Process
from fedssl.parallel.shared_tensors import SharedTensors
from support.federation import tiny_spec

SPEC = tiny_spec()


class Trainer:
    """Takes the place of a process: reports its progress once, and then its result."""

    def __init__(self, order: list[tuple[str, Any]]) -> None:
        self.client, self._order = "", order
        self.connection, self._theirs = Pipe()

    def start_round(self, ctx: Context, layout: object, kept: object) -> None:
        self.client = ctx.client_id
        self._order.append((ctx.client_id, kept))
        self._theirs.send_bytes(b"progress")
        self._theirs.send_bytes(b"result")

    def receive(self) -> LocalProgress | LocalResult:
        if self.connection.recv_bytes() == b"progress":
            return LocalProgress(1, 1, 1, 2, None, 100.0)
        return LocalResult({}, {}, len(self.client), {}, 1)


def test_clients_with_many_images_train_first_and_results_are_in_the_order_of_the_round() -> None:
    """So that no process waits at the end of a round for one that has begun with a large client."""
    order: list[tuple[str, Any]] = []
    processes = ClientProcesses.__new__(ClientProcesses)
    processes._sizes = {"a": 10, "b": 30, "c": 20}
    processes._broadcast = SharedTensors()
    processes._processes = [Trainer(order), Trainer(order)]  # type: ignore[list-item]
    told: list[str] = []
    contexts = [Context(spec=SPEC, round_number=1, client_id=name) for name in "abc"]
    state = {"w": torch.ones(1)}

    found = processes.train({"w": torch.zeros(2)}, {"b": state}, contexts, lambda name, progress: told.append(name))

    assert list(found) == ["a", "b", "c"]
    assert order == [("b", state), ("c", None), ("a", None)]
    assert sorted(told) == ["a", "b", "c"]
    processes._broadcast.close()


@pytest.fixture
def ended(request: pytest.FixtureRequest) -> Iterator[tuple[_Process, Connection]]:
    """Return a process that has run the given code, and the other end of its connection."""
    process = _Process.__new__(_Process)
    process.client, process._remedy = "client-1", "Use fewer --jobs"
    process.connection, theirs = Pipe()
    process._exchange = SharedTensors()
    process._process = subprocess.Popen([sys.executable, "-S", "-c", request.param])
    yield process, theirs
    theirs.close()
    process._process.wait()
    process.connection.close()
    process._exchange.close()


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "was ended by SIGKILL, which is what the system does when memory runs out",
        ),
        ("import os; os.kill(os.getpid(), 15)", "was ended by SIGTERM"),
        ("raise SystemExit(3)", "ended with code 3"),
    ],
    indirect=["ended"],
)
def test_a_process_that_ended_is_reported_with_its_client_and_a_remedy(
    ended: tuple[_Process, Connection], reason: str
) -> None:
    process, theirs = ended
    theirs.close()
    with pytest.raises(LocalError) as caught:
        process.receive()
    assert str(caught.value) == f"a process that trains clients {reason} (it had client-1). Use fewer --jobs"
    with pytest.raises(LocalError):
        process.send({})


@pytest.mark.parametrize("ended", [""], indirect=True)
@pytest.mark.parametrize(("sent", "raised"), [("MethodError", MethodError), (None, RuntimeError)])
def test_an_error_of_a_process_keeps_its_kind_and_traceback(
    ended: tuple[_Process, Connection], sent: str | None, raised: type[Exception]
) -> None:
    process, theirs = ended
    theirs.send_bytes(json.dumps({"error": sent, "text": "not finite", "traceback": "in line 1"}).encode())
    with pytest.raises(raised, match="not finite") as caught:
        process.receive()
    assert caught.value.__notes__ == ["in line 1"]
