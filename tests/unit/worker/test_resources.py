"""Heartbeats report the memory of the worker's process, if the coordinator reads that and the policy permits it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedssl.engine import local
from fedssl.protocol.work import Heartbeat, Resources
from fedssl_worker import lease, resources
from fedssl_worker.disclosure.policy import PolicyEnforcer

from .conftest import Setting, make_item, make_spec
from .coordinator import Refusal

MEASURED = Resources(memory_bytes=123_456_789, gpu_memory_bytes=2_000_000_000)
WEIGHTS = ("[[allow]]", 'artifact = "weights"', 'methods = ["*"]')


@pytest.fixture(autouse=True)
def _many_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(lease, "_REPORTS_PER_LEASE", 6000)
    monkeypatch.setattr(local, "PROGRESS_SECONDS", 0.0)  # however quickly it trains
    monkeypatch.setattr("fedssl_worker.agent.measured_resources", lambda: MEASURED)


def trained(setting: Setting, policy: Path | None = None) -> list[Heartbeat]:
    """Return the heartbeats of one training."""
    setting.offer(make_spec(training={"batch_size": 8, "local_epochs": 30}), 1)
    setting.restart(policy).step()
    assert len(setting.coordinator.submissions) == 1
    heartbeats = [beat for beat in setting.coordinator.heartbeats if beat.progress is not None]
    assert heartbeats
    return heartbeats


def test_heartbeats_report_what_the_process_holds(setting: Setting) -> None:
    setting.coordinator.takes_resources = True
    heartbeats = trained(setting)
    assert [beat.resources for beat in heartbeats] == [MEASURED] * len(heartbeats)


def test_an_older_coordinator_is_sent_no_resources(setting: Setting) -> None:
    heartbeats = trained(setting)
    assert all("resources" not in beat.model_fields_set for beat in heartbeats)


def test_an_older_process_of_the_coordinator_gets_the_heartbeat_without_them(setting: Setting) -> None:
    """During an upgrade one process answers the claim, and another one the heartbeat."""
    setting.coordinator.takes_resources = True
    refused: list[str] = []

    def refuse(call: str) -> None:
        if call == "heartbeat" and not refused:
            refused.append(call)
            raise Refusal("invalid-request", 422, "resources: Extra inputs are not permitted")

    setting.coordinator.before = refuse
    heartbeats = trained(setting)
    assert refused
    assert all(beat.resources is None for beat in heartbeats)
    assert setting.coordinator.declined == []


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        ("[]", None),
        ('["loss"]', None),
        ('["memory_bytes"]', Resources(memory_bytes=MEASURED.memory_bytes)),
        ('["*"]', MEASURED),
    ],
)
def test_the_policy_decides_about_each_number(setting: Setting, allow: str, expected: Resources | None) -> None:
    setting.coordinator.takes_resources = True
    heartbeats = trained(setting, setting.write_policy(*WEIGHTS, "[metrics]", f"allow = {allow}"))
    assert [beat.resources for beat in heartbeats] == [expected] * len(heartbeats)
    intent = next(body for body in setting.ledger() if body["kind"] == "intent")
    names = set() if expected is None else set(expected.model_dump(exclude_none=True))
    assert names == set(intent["reported"]) & {"memory_bytes", "gpu_memory_bytes"}


def test_the_ledger_names_every_number_that_reports_may_contain(setting: Setting) -> None:
    enforcer = PolicyEnforcer(
        setting.write_policy(*WEIGHTS, "[metrics]", 'allow = ["loss", "memory_bytes"]'), setting.coordinator.url
    )
    assert enforcer.reportable(make_item(make_spec(), 1)) == ["loss", "memory_bytes"]


def test_the_resident_memory_is_the_systems_number() -> None:
    measured = resources.measured_resources()
    assert measured.memory_bytes is not None
    assert 10_000_000 < measured.memory_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert measured.gpu_memory_bytes is None  # no GPU was used


@pytest.mark.parametrize("content", [None, "", "12", "12 many"])
def test_a_system_without_this_number_reports_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "statm").write_text(content)
    assert resources.measured_resources(tmp_path / "statm").memory_bytes is None


def test_the_gpus_memory_is_reported_once_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    held: Callable[[], float] = lambda: 3e9  # noqa: E731
    monkeypatch.setattr(resources, "gpu_bytes", held)
    assert resources.measured_resources().gpu_memory_bytes == 3_000_000_000
