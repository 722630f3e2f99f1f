"""What may leave, and what is written down about it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedssl_worker
from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.client import Rejected
from fedssl.engine import start_run
from fedssl.errors import ArtifactError, DigestMismatch, NotFinite, PlanMismatch
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.work import WorkItem
from fedssl_worker.egress import Egress, Ledger

from .conftest import Setting, make_spec
from .coordinator import Refusal

NAME = "encoder.blocks.0.conv.weight"


def good_update() -> Tensors:
    spec = make_spec()
    return start_run(METHODS["fedbyol"], Context(spec=spec, round_number=0)).broadcast


@pytest.fixture
def item(setting: Setting) -> WorkItem:
    setting.offer(make_spec(), 1)
    item = setting.client.claim(0)
    assert item is not None
    return item


def send(setting: Setting, item: WorkItem, path: Path, digest: str | None = None) -> None:
    Egress(setting.client, Ledger(setting.folder / "ledger.jsonl")).send(item, path, digest or digest_of(path))


def lines(setting: Setting) -> list[dict[str, object]]:
    path = setting.folder / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_nothing_left(setting: Setting) -> None:
    assert "PUT artifact" not in setting.coordinator.calls
    assert lines(setting) == []


def with_value(value: float, dtype: torch.dtype = torch.float32) -> Tensors:
    update = good_update()
    update[NAME] = update[NAME].clone().to(dtype)
    update[NAME].view(-1)[-1] = value
    return update


@pytest.mark.parametrize(
    ("update", "error", "words"),
    [
        (good_update() | {"images": torch.zeros(4)}, PlanMismatch, "not declared: images"),
        ({k: v for k, v in good_update().items() if k != NAME}, PlanMismatch, f"missing: {NAME}"),
        (good_update() | {NAME: torch.zeros(4, 1, 3, 4)}, PlanMismatch, NAME),
        (with_value(1, torch.float64), PlanMismatch, "F64"),
        (with_value(float("nan")), NotFinite, NAME),
        (with_value(float("-inf")), NotFinite, NAME),
    ],
    ids=["undeclared", "missing", "misshapen", "other dtype", "nan", "infinity"],
)
def test_what_is_not_declared_or_not_finite_stays(
    setting: Setting, item: WorkItem, update: Tensors, error: type[Exception], words: str
) -> None:
    save_tensors(update, setting.folder / "update")
    with pytest.raises(error, match=words):
        send(setting, item, setting.folder / "update")
    assert_nothing_left(setting)


def test_nothing_hides_behind_or_between_the_tensors(setting: Setting, item: WorkItem) -> None:
    path = setting.folder / "update"
    save_tensors(good_update(), path)
    path.write_bytes(path.read_bytes() + b"labels")
    with pytest.raises(ArtifactError, match="longer or shorter"):
        send(setting, item, path)
    save_file(good_update(), path, metadata={"patient": "42"})
    with pytest.raises(ArtifactError, match="__metadata__"):
        send(setting, item, path)
    path.write_bytes(b"\x00" * 4)
    with pytest.raises(ArtifactError):
        send(setting, item, path)
    assert_nothing_left(setting)


def test_a_file_that_changed_after_training_stays(setting: Setting, item: WorkItem) -> None:
    save_tensors(good_update(), setting.folder / "update")
    with pytest.raises(DigestMismatch):
        send(setting, item, setting.folder / "update", "0" * 64)
    assert_nothing_left(setting)


def test_the_ledger_is_written_before_the_first_byte_leaves(setting: Setting, item: WorkItem) -> None:
    path = setting.folder / "update"
    save_tensors(good_update(), path)
    seen: list[int] = []

    def look(call: str) -> None:
        seen.append(len(lines(setting)))
        raise Refusal("artifact-rejected", 422)

    setting.coordinator.before = look
    with pytest.raises(Rejected):
        send(setting, item, path)
    assert seen == [1]
    line = lines(setting)[0]
    assert line.pop("time")
    assert line == {
        "run": str(item.run_id),
        "round": 1,
        "kinds": ["weights"],
        "num_tensors": len(item.plan.update),
        "num_bytes": path.stat().st_size,
        "digest": digest_of(path),
    }


def test_a_line_that_a_crash_cut_short_is_not_continued(setting: Setting, item: WorkItem) -> None:
    path = setting.folder / "update"
    save_tensors(good_update(), path)
    send(setting, item, path)
    ledger = setting.folder / "ledger.jsonl"
    whole = ledger.read_text()
    ledger.write_text(whole + '{"time":"20')
    send(setting, item, path)
    first, cut, last = ledger.read_text().splitlines()
    assert first == whole.strip()
    assert cut == '{"time":"20'
    assert json.loads(last)["digest"] == digest_of(path)


def test_only_egress_sends_artifacts() -> None:
    package = Path(fedssl_worker.__path__[0])
    assert [path.name for path in package.glob("*.py") if ".upload(" in path.read_text()] == ["egress.py"]
    assert not [path.name for path in package.glob("*.py") if "httpx." in path.read_text()]
