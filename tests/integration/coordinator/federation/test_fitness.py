"""Clients that cannot take part in a run are left out before they are asked, and declines are shown at once."""

from pathlib import Path
from typing import Any

import pytest

from fedssl.client import Conflict, WorkerClient
from fedssl.protocol.data import ServedShapes
from fedssl.protocol.states import RunState
from fedssl.protocol.work import CheckNumbers, Register
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.dashboard.runs import overview
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import Tables


def introduce(worker: WorkerClient, **changes: Any) -> None:
    """Register like an older worker, which serves images of one shape."""
    values: dict[str, Any] = {
        "worker_version": "test", "methods": {"fedalignuniform": 1}, "device": "cpu", "num_images": 100, "channels": 1,
        "image_size": 8, **changes,
    }  # fmt: skip
    worker.register(Register(**values))


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"image_size": 16}, "1 channel and 8 x 8 pixels, but this client's have 1 channel and 16 x 16 pixels"),
    ({"channels": 3}, "but this client's have 3 channels and 8 x 8 pixels"),
    ({"channels": 5, "serves": ServedShapes(max_channels=5)}, "1 channel and 8 x 8 pixels, but this client serves 5"),
    ({"methods": {"fedbyol": 1}}, "its worker lacks fedalignuniform, and the run needs version 1: update the worker"),
    ({"methods": {"fedalignuniform": 0}}, "its worker has version 0 of fedalignuniform"),
]


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("changes", "words"), UNFIT)
def test_a_client_that_cannot_take_part_is_left_out_of_an_open_cohort(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    introduce(coordinator.worker("b", register=False), **changes)
    scenario = Scenario(coordinator, tables, tmp_path, "a", cohort={"clients": None, "min_clients": 1})
    assert scenario.states() == [("a", 1, "offered")]
    [event] = scenario.events("client.left_out")
    assert event.message.startswith("left out: b: ")
    assert words in event.message
    assert words in event.data["clients"]["b"]
    assert words in scenario.run.left_out["b"]
    scenario.work("a")
    scenario.advance()
    assert scenario.run.rounds_closed == 1


@pytest.mark.parametrize(("changes", "words"), UNFIT)
def test_a_run_that_names_a_client_that_cannot_take_part_is_refused(
    coordinator: Coordinator, changes: dict[str, Any], words: str
) -> None:
    coordinator.worker("a")
    introduce(coordinator.worker("b", register=False), **changes)
    for ask in (coordinator.client.create_run, coordinator.client.estimate):
        with pytest.raises(Conflict, match=r"1 of the run's 2 clients .* cannot take part: b: ") as error:
            ask(tiny_spec(cohort={"clients": ["a", "b"]}))
        assert words in str(error.value)
    assert list(coordinator.client.runs()) == []


def test_a_client_without_labels_is_left_out_of_a_run_that_trains_on_them(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    introduce(coordinator.worker("b", register=False))
    probe = {"name": "ridge-probe"}
    scenario = Scenario(coordinator, tables, tmp_path, "a", method=probe, cohort={"clients": None, "min_clients": 1})
    assert scenario.states() == [("a", 1, "offered")]
    assert scenario.run.left_out["b"].startswith("its worker lacks ridge-probe, or the labels that it trains on: give")


def test_a_worker_that_serves_the_shape_of_the_run_takes_part(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    introduce(coordinator.worker("a", register=False), image_size=64, channels=3, serves=ServedShapes())
    bounded = ServedShapes(max_image_size=8, max_channels=1)
    introduce(coordinator.worker("b", register=False), image_size=8, serves=bounded)
    scenario = Scenario(coordinator, tables, tmp_path, "", cohort={"clients": ["a", "b"], "min_clients": 2})
    assert {name for name, _, _ in scenario.states()} == {"a", "b"}
    assert coordinator.client.client("b").serves == bounded
    with pytest.raises(Conflict, match=r"this client serves at most 8 pixels: lower data\.image_size"):
        coordinator.client.create_run(tiny_spec(cohort={"clients": ["a", "b"]}, data={"channels": 1, "image_size": 16}))


def test_a_run_of_five_channels_waits_for_clients_that_have_them(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    introduce(coordinator.worker("a", register=False), serves=ServedShapes())
    five = {"channels": 5, "image_size": 8, "window": {"percentiles": [1, 99]}}
    scenario = Scenario(coordinator, tables, tmp_path, "", data=five, cohort={"clients": None, "min_clients": 1})
    assert scenario.rounds == []
    words = "the run needs images of 5 channels and 8 x 8 pixels, but this client serves 1 or 3 channels"
    assert scenario.run.reason is not None
    assert f"a: {words}" in scenario.run.reason
    introduce(coordinator.worker("b", register=False), channels=5, serves=ServedShapes(max_channels=5))
    scenario.advance()
    assert scenario.states() == [("b", 1, "offered")]
    assert words in scenario.run.left_out["a"]


def test_an_older_worker_that_replaces_a_newer_one_serves_one_shape_again(coordinator: Coordinator) -> None:
    worker = coordinator.worker("a")
    assert coordinator.client.client("a").serves == ServedShapes()
    introduce(worker, image_size=16)
    assert coordinator.client.client("a").serves is None


def test_a_run_without_any_suitable_client_waits_with_the_reason(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    worker = coordinator.worker("b", register=False)
    introduce(worker, image_size=16)
    scenario = Scenario(coordinator, tables, tmp_path, "", cohort={"clients": None, "min_clients": 1})
    assert scenario.rounds == []
    assert scenario.run.reason is not None
    assert (
        "0 of 1 have registered and may take part; b: the run needs images of 1 channel and 8 x 8"
        in scenario.run.reason
    )
    introduce(worker)  # now with images of that shape
    scenario.advance()
    assert scenario.states() == [("b", 1, "offered")]
    assert scenario.run.reason is None


def _decline(scenario: Scenario, name: str, reason: str) -> None:
    scenario.workers[name].decline(scenario.claim(name).assignment_id, reason)


def test_a_run_shows_the_reasons_of_declines_while_its_round_waits(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "abcd")
    assert scenario.run.reason is None
    for name in "bd":
        _decline(scenario, name, f"no images at {name}")
    expected = "2 of 4 clients declined: b: no images at b; d: no images at d"
    assert scenario.run.reason == expected
    assert [run.reason for run in coordinator.client.runs()] == [expected]
    with transaction() as session:
        [row] = overview.needing_attention(session)
    assert row.status.reason.startswith(f"{expected}; 0 of 4 updates received; ")
    scenario.work("a", "c")
    scenario.advance()  # offered again, after a pause
    assert scenario.run.state is RunState.RUNNING
    assert scenario.run.reason == expected
    tables.execute("UPDATE assignments SET offered_at = now() WHERE run_id = %s", scenario.id)
    scenario.claim("b")
    assert scenario.run.reason == "1 of 4 clients declined: d: no images at d"
    scenario.deliver("b")
    scenario.work("d")
    scenario.advance()
    assert scenario.run.reason is None
    assert scenario.run.rounds_closed == 1


def test_a_clients_check_numbers_are_those_of_its_last_registration(coordinator: Coordinator) -> None:
    worker = coordinator.worker("a", register=False)
    numbers = CheckNumbers(method="fedbyol", problems=0, seconds_per_round=12.5)
    introduce(worker, check=numbers)
    assert coordinator.client.client("a").check == numbers
    introduce(worker)
    assert coordinator.client.client("a").check is None
