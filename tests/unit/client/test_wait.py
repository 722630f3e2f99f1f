"""How often a client polls a run that it waits for."""

import itertools
from types import SimpleNamespace
from uuid import uuid4

import pytest

from fedssl.client import Client, RunNotFinished, operator
from fedssl.protocol.states import RunState


def test_a_wait_of_hours_polls_less_and_less_often_and_ends_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def run(*_: object) -> SimpleNamespace:
        asked.append(now)
        return SimpleNamespace(id=uuid4(), state=RunState.RUNNING, rounds_closed=0, num_rounds=1)

    monkeypatch.setattr(operator, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(Client, "run", run)
    with pytest.raises(RunNotFinished):
        Client("http://127.0.0.1:1", "token").wait(uuid4(), timeout_seconds=7203)

    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert pauses[0] == 0.5
    assert all(pause < max(0.5, 0.01 * at) + 1e-6 for pause, at in zip(pauses, asked, strict=False))
    assert len(asked) < 1200
    assert asked[-1] == pytest.approx(7203)
