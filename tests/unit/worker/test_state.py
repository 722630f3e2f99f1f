"""Client states: crashes at every possible moment, and every kind of damage."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.artifacts.tensors import Tensors, load_tensors
from fedssl.engine import LocalResult
from fedssl.protocol.work import AcceptedUpdate, StateLost, WorkItem
from fedssl_worker.state import ClientStateLost, ClientStates, Finished
from support.tensors import are_equal

from .conftest import RUN, make_item, make_spec

OLD_WORK, NEW_WORK = "1" * 64, "2" * 64


class Crash(BaseException):
    """Stands for the death of the process."""


def result(value: float, state: Tensors | None = None) -> LocalResult:
    kept = {"target.weight": torch.full((5,), value + 0.5)} if state is None else state
    return LocalResult({"encoder.weight": torch.full((3, 2), value)}, kept, 32, {"loss": value})


def accepted(round_number: int, finished: Finished) -> AcceptedUpdate:
    return AcceptedUpdate(round_number=round_number, update=finished.digest)


@contextmanager
def crashing_at(step: int) -> Iterator[Callable[[], bool]]:
    """Raise Crash before the `step`-th change of the file system. The yielded function returns whether it was
    raised."""
    calls = 0
    names = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
    originals = {name: getattr(os, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= step:
                raise Crash
            return originals[name](*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, counted(name))
        yield lambda: calls >= step


@pytest.fixture(scope="session")
def items() -> list[WorkItem]:
    return [make_item(make_spec(), number) for number in (1, 2)]


def test_the_accepted_state_is_restored(tmp_path: Path, items: list[WorkItem]) -> None:
    finished = ClientStates(tmp_path / "runs").keep(items[0], OLD_WORK, result(1))
    states = ClientStates(tmp_path / "runs")
    state = states.accepted(RUN, accepted(1, finished))
    assert state is not None
    assert are_equal(state, result(1).state)
    assert states.finished(RUN, OLD_WORK) == finished
    assert are_equal(load_tensors(finished.update), result(1).update)
    assert states.finished(RUN, NEW_WORK) is None


def test_a_discard_without_an_accepted_update_removes_what_was_kept(tmp_path: Path, items: list[WorkItem]) -> None:
    states = ClientStates(tmp_path / "runs")
    states.keep(items[0], OLD_WORK, result(1))
    assert states.accepted(RUN, None) is None
    states.discard(RUN)
    assert states.finished(RUN, OLD_WORK) is None


def test_the_state_of_another_update_is_reported_as_missing(tmp_path: Path, items: list[WorkItem]) -> None:
    states = ClientStates(tmp_path / "runs")
    finished = states.keep(items[0], OLD_WORK, result(1))
    for other in (accepted(2, finished), AcceptedUpdate(round_number=1, update="0" * 64)):
        with pytest.raises(ClientStateLost, match=r"is missing: there is no note\.json") as caught:
            states.accepted(RUN, other)
        assert caught.value.lost == StateLost(round_number=other.round_number, reason="missing")


def test_the_record_of_another_round_is_refused(tmp_path: Path, items: list[WorkItem]) -> None:
    states = ClientStates(tmp_path)
    first, second = (states.keep(item, OLD_WORK, result(value)) for item, value in zip(items, (1.0, 2.0), strict=False))
    shutil.rmtree(first.update.parent)
    shutil.copytree(second.update.parent, first.update.parent)
    with pytest.raises(ClientStateLost, match="its record is of another update"):
        states.accepted(RUN, accepted(1, first))


def test_a_discard_can_keep_a_state_that_is_still_to_be_evaluated(tmp_path: Path, items: list[WorkItem]) -> None:
    states = ClientStates(tmp_path)
    first = accepted(1, states.keep(items[0], OLD_WORK, result(1)))
    states.discard(RUN, first)
    second = accepted(2, states.keep(items[1], NEW_WORK, result(2)))
    states.keep(items[1], "3" * 64, result(3))  # this update is not accepted
    states.discard(RUN, second, keeps_accepted=True)
    assert states.finished(RUN, "3" * 64) is None
    kept = states.accepted(RUN, first)
    assert kept is not None
    assert are_equal(kept, result(1).state)
    states.discard(RUN, second)
    with pytest.raises(ClientStateLost):
        states.accepted(RUN, first)


def test_an_empty_state_is_restored(tmp_path: Path, items: list[WorkItem]) -> None:
    states = ClientStates(tmp_path / "runs")
    finished = states.keep(items[0], OLD_WORK, result(1, state={}))
    assert states.accepted(RUN, accepted(1, finished)) == {}


@pytest.mark.parametrize("step", range(1, 40))
def test_a_crash_while_storing_a_state_keeps_the_old_or_the_whole_new_one(
    tmp_path: Path, items: list[WorkItem], step: int
) -> None:
    states = ClientStates(tmp_path / "runs")
    old = accepted(1, states.keep(items[0], OLD_WORK, result(1)))
    try:
        with crashing_at(step) as happened:
            new = accepted(2, states.keep(items[1], NEW_WORK, result(2)))
    except Crash:
        pass
    else:
        assert not happened()
        state = ClientStates(tmp_path / "runs").accepted(RUN, new)
        assert state is not None
        assert are_equal(state, result(2).state)
    restarted = ClientStates(tmp_path / "runs")
    state = restarted.accepted(RUN, old)
    assert state is not None
    assert are_equal(state, result(1).state)
    finished = restarted.finished(RUN, NEW_WORK)
    if finished is not None:  # the crash came after the rename, so all of it is there
        assert are_equal(load_tensors(finished.update), result(2).update)
        state = restarted.accepted(RUN, accepted(2, finished))
        assert state is not None
        assert are_equal(state, result(2).state)
    assert not list((tmp_path / "runs").glob("*/incoming-*"))


@pytest.mark.parametrize("step", range(1, 20))
def test_a_crash_while_discarding_keeps_the_accepted_state(tmp_path: Path, items: list[WorkItem], step: int) -> None:
    states = ClientStates(tmp_path / "runs")
    states.keep(items[0], OLD_WORK, result(1))
    new = accepted(2, states.keep(items[1], NEW_WORK, result(2)))
    try:
        with crashing_at(step) as happened:
            states.discard(RUN, new)
        assert not happened()
    except Crash:
        pass
    restarted = ClientStates(tmp_path / "runs")
    restarted.discard(RUN, new)
    state = restarted.accepted(RUN, new)
    assert state is not None
    assert are_equal(state, result(2).state)
    assert len(list((tmp_path / "runs" / str(RUN)).iterdir())) == 1


def test_the_tested_crash_points_cover_every_change_of_the_file_system(tmp_path: Path, items: list[WorkItem]) -> None:
    """The ranges above extend beyond the last change of the file system."""
    states = ClientStates(tmp_path / "runs")
    with crashing_at(40) as happened:
        states.keep(items[0], OLD_WORK, result(1))
        new = accepted(2, states.keep(items[1], NEW_WORK, result(2)))
        assert not happened()
    with crashing_at(20) as happened:
        states.discard(RUN, new)
        assert not happened()


def test_the_unaccepted_update_of_this_work_survives_a_discard(tmp_path: Path, items: list[WorkItem]) -> None:
    states = ClientStates(tmp_path / "runs")
    old = accepted(1, states.keep(items[0], OLD_WORK, result(1)))
    states.keep(items[1], NEW_WORK, result(2))
    states.discard(RUN, old, work=NEW_WORK)
    assert states.finished(RUN, NEW_WORK) is not None
    assert states.accepted(RUN, old) is not None
    assert states.finished(RUN, OLD_WORK) is None  # its update is no longer needed


def test_an_accepted_update_stays_until_the_next_claim(tmp_path: Path, items: list[WorkItem]) -> None:
    states = ClientStates(tmp_path / "runs")
    old = accepted(1, states.keep(items[0], OLD_WORK, result(1)))
    finished = states.keep(items[1], NEW_WORK, result(2))
    states.discard(RUN, old, resent=accepted(2, finished))
    assert states.finished(RUN, NEW_WORK) == finished
    assert states.finished(RUN, OLD_WORK) is None
    states.discard(RUN, old, work=NEW_WORK)  # it was requested again
    assert states.finished(RUN, NEW_WORK) == finished
    states.discard(RUN, accepted(2, finished), work="3" * 64)  # the next round
    assert states.finished(RUN, NEW_WORK) is None
    assert states.accepted(RUN, accepted(2, finished)) is not None


def damage(folder: Path, name: str, how: str) -> None:
    path = folder / name
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[:-3])
    elif how == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "gone"])
@pytest.mark.parametrize("name", ["note.json", "state.safetensors"])
def test_a_damaged_state_is_reported_as_lost(tmp_path: Path, items: list[WorkItem], name: str, how: str) -> None:
    states = ClientStates(tmp_path / "runs")
    finished = states.keep(items[0], OLD_WORK, result(1))
    damage(finished.update.parent, name, how)
    with pytest.raises(ClientStateLost) as caught:
        states.accepted(RUN, accepted(1, finished))
    assert caught.value.lost.reason == ("missing" if how == "gone" else "damaged")
    assert str(tmp_path) not in str(caught.value)


def test_every_flipped_bit_of_a_state_and_of_its_record_is_detected(tmp_path: Path, items: list[WorkItem]) -> None:
    """This includes the number of examples, the update's weight in the mean, which would still be valid JSON."""
    states = ClientStates(tmp_path / "runs")
    finished = states.keep(items[0], OLD_WORK, result(1))
    for name in ("note.json", "state.safetensors"):
        path = finished.update.parent / name
        whole = path.read_bytes()
        for place in range(0, len(whole), 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(ClientStateLost, match="is damaged"):
                states.accepted(RUN, accepted(1, finished))
            assert name == "state.safetensors" or states.finished(RUN, OLD_WORK) is None
        path.write_bytes(whole)
    assert states.accepted(RUN, accepted(1, finished)) is not None


def test_a_record_of_an_older_worker_without_a_checksum_is_accepted(tmp_path: Path, items: list[WorkItem]) -> None:
    states = ClientStates(tmp_path / "runs")
    finished = states.keep(items[0], OLD_WORK, result(1))
    (finished.update.parent / "note.sha256").unlink()
    assert states.accepted(RUN, accepted(1, finished)) is not None
    assert states.finished(RUN, OLD_WORK) == finished


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "gone"])
@pytest.mark.parametrize("name", ["note.json", "update.safetensors"])
def test_a_damaged_update_is_trained_again(tmp_path: Path, items: list[WorkItem], name: str, how: str) -> None:
    states = ClientStates(tmp_path / "runs")
    finished = states.keep(items[0], OLD_WORK, result(1))
    damage(finished.update.parent, name, how)
    assert states.finished(RUN, OLD_WORK) is None
    assert states.keep(items[0], OLD_WORK, result(1)) == finished
    assert states.finished(RUN, OLD_WORK) == finished
