"""Heartbeats report the resources of the worker's process if the coordinator supports that and the policy permits
it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from pynvml import NVMLError_NotSupported

from fedssl.protocol.work import Heartbeat, Resources
from fedssl_worker import resources
from fedssl_worker.disclosure.policy import PolicyEnforcer

from .conftest import WorkerHarness, make_item, make_spec
from .coordinator import Refusal

MEASURED = Resources(memory_bytes=123_456_789, gpu_memory_bytes=2_000_000_000, gpu_utilisation=0.75)
WEIGHTS = ("[[allow]]", 'artifact = "weights"', 'methods = ["*"]')


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl_worker.agent.measured_resources", lambda: MEASURED)


def trained(harness: WorkerHarness, policy: Path | None = None) -> list[Heartbeat]:
    """Return the heartbeats of one training."""
    harness.offer(make_spec(), 1)
    harness.restart(policy).step()
    assert len(harness.coordinator.submissions) == 1
    heartbeats = [beat for beat in harness.coordinator.heartbeats if beat.progress is not None]
    assert heartbeats
    return heartbeats


@pytest.mark.usefixtures("many_heartbeats")
def test_heartbeats_report_the_resources_of_the_process(harness: WorkerHarness) -> None:
    harness.coordinator.takes_resources = True
    heartbeats = trained(harness)
    assert [beat.resources for beat in heartbeats] == [MEASURED] * len(heartbeats)


@pytest.mark.usefixtures("many_heartbeats")
def test_resources_are_not_sent_to_an_older_coordinator(harness: WorkerHarness) -> None:
    heartbeats = trained(harness)
    assert all("resources" not in beat.model_fields_set for beat in heartbeats)


@pytest.mark.usefixtures("many_heartbeats")
def test_a_heartbeat_that_an_older_process_refuses_is_sent_without_resources(harness: WorkerHarness) -> None:
    """During an upgrade, the process that answers the claim and the one that answers the heartbeat may differ in
    version."""
    harness.coordinator.takes_resources = True
    refused: list[str] = []

    def refuse(call: str) -> None:
        if call == "heartbeat" and not refused:
            refused.append(call)
            raise Refusal("invalid-request", 422, "resources: Extra inputs are not permitted")

    harness.coordinator.before = refuse
    heartbeats = trained(harness)
    assert refused
    assert all(beat.resources is None for beat in heartbeats)
    assert harness.coordinator.declined == []


@pytest.mark.usefixtures("many_heartbeats")
@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        ("[]", None),
        ('["loss"]', None),
        ('["memory_bytes"]', Resources(memory_bytes=MEASURED.memory_bytes)),
        ('["gpu_utilisation"]', Resources(gpu_utilisation=MEASURED.gpu_utilisation)),
        ('["*"]', MEASURED),
    ],
)
def test_the_policy_permits_or_withholds_each_resource(
    harness: WorkerHarness, allow: str, expected: Resources | None
) -> None:
    harness.coordinator.takes_resources = True
    heartbeats = trained(harness, harness.write_policy(*WEIGHTS, "[metrics]", f"allow = {allow}"))
    assert [beat.resources for beat in heartbeats] == [expected] * len(heartbeats)
    intent = next(body for body in harness.ledger() if body["kind"] == "intent")
    names = set() if expected is None else set(expected.model_dump(exclude_none=True))
    assert names == set(intent["reported"]) & set(Resources.model_fields)


def test_the_ledger_names_every_number_that_reports_may_contain(harness: WorkerHarness) -> None:
    enforcer = PolicyEnforcer(
        harness.write_policy(*WEIGHTS, "[metrics]", 'allow = ["loss", "memory_bytes"]'), harness.coordinator.url
    )
    assert enforcer.reportable(make_item(make_spec(), 1)) == ["loss", "memory_bytes"]


def test_the_resident_memory_is_plausible_and_no_gpu_memory_is_reported_without_a_gpu() -> None:
    measured = resources.measured_resources()
    assert measured.memory_bytes is not None
    assert 10_000_000 < measured.memory_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert measured.gpu_memory_bytes is None  # no GPU was used


@pytest.mark.parametrize("content", [None, "", "12", "12 many"])
def test_memory_is_not_reported_if_the_system_does_not_provide_it(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "statm").write_text(content)
    assert resources.measured_resources(tmp_path / "statm").memory_bytes is None


def test_gpu_memory_is_reported_once_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    held: Callable[[], float] = lambda: 3e9  # noqa: E731
    monkeypatch.setattr(resources, "gpu_bytes", held)
    assert resources.measured_resources().gpu_memory_bytes == 3_000_000_000


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int | Exception]]:
    """GPUs as torch reports them, by number: the bytes that this process holds, and NVML's percentage or its error."""
    found: dict[int, tuple[int, int | Exception]] = {}

    def utilization(number: int) -> int:
        percent = found[number][1]
        if isinstance(percent, Exception):
            raise percent
        return percent

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: found[number][0])
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    return found


def test_utilisation_is_averaged_over_the_gpus_in_use(gpus: dict[int, tuple[int, int | Exception]]) -> None:
    assert resources.measured_resources().gpu_utilisation is None  # no GPU was used
    gpus.update({0: (2**30, 90), 1: (0, 20), 2: (2**20, 40)})
    assert resources.measured_resources().gpu_utilisation == pytest.approx(0.65)  # the second is only used by others
    gpus.update({0: (2**30, 0), 2: (0, 40)})
    assert resources.measured_resources().gpu_utilisation == 0.0


@pytest.mark.parametrize("error", [NVMLError_NotSupported(), RuntimeError("cuda driver can't be loaded")])
def test_utilisation_is_not_reported_if_a_gpu_does_not_measure_it(
    gpus: dict[int, tuple[int, int | Exception]], error: Exception
) -> None:
    gpus[0] = (2**30, error)
    measured = resources.measured_resources()
    assert (measured.gpu_utilisation, measured.gpu_memory_bytes) == (None, 2**30)


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), float("inf")])
def test_an_impossible_utilisation_is_refused(share: float) -> None:
    with pytest.raises(ValidationError, match="gpu_utilisation"):
        Resources(gpu_utilisation=share)


def test_a_report_without_utilisation_has_only_keys_that_older_coordinators_know() -> None:
    assert set(Resources(memory_bytes=5).model_dump(mode="json")) == {"memory_bytes", "gpu_memory_bytes"}
