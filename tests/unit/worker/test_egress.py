"""The egress: which updates may leave, and which ledger entries record them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedssl_worker
from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.client import Rejected
from fedssl.errors import ArtifactError, DigestMismatch, NotFinite, PlanMismatch
from fedssl.protocol.initial import InitialConfig
from fedssl.protocol.work import WorkItem
from fedssl_worker.disclosure.ledger import Ledger, LedgerError

from .conftest import WorkerHarness, good_update, make_spec
from .coordinator import Refusal

NAME = "encoder.blocks.0.conv.weight"


def send(harness: WorkerHarness, item: WorkItem, path: Path, digest: str | None = None) -> None:
    harness.egress().send(item, path, digest or digest_of(path))


def assert_nothing_left(harness: WorkerHarness) -> None:
    assert "PUT artifact" not in harness.coordinator.calls
    *_, last = harness.ledger()
    assert last["kind"] == "refused"
    assert "intent" not in harness.kinds()


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
def test_an_update_with_undeclared_or_non_finite_tensors_is_not_sent(
    harness: WorkerHarness, item: WorkItem, update: Tensors, error: type[Exception], words: str
) -> None:
    save_tensors(update, harness.folder / "update")
    with pytest.raises(error, match=words):
        send(harness, item, harness.folder / "update")
    assert_nothing_left(harness)


def test_bytes_behind_the_tensors_or_in_the_metadata_are_refused(harness: WorkerHarness, item: WorkItem) -> None:
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    path.write_bytes(path.read_bytes() + b"labels")
    with pytest.raises(ArtifactError, match="longer or shorter"):
        send(harness, item, path)
    save_file(good_update(), path, metadata={"patient": "42"})
    with pytest.raises(ArtifactError, match="__metadata__"):
        send(harness, item, path)
    path.write_bytes(b"\x00" * 4)
    with pytest.raises(ArtifactError):
        send(harness, item, path)
    assert_nothing_left(harness)


def test_a_file_that_changed_after_training_is_not_sent(harness: WorkerHarness, item: WorkItem) -> None:
    save_tensors(good_update(), harness.folder / "update")
    with pytest.raises(DigestMismatch):
        send(harness, item, harness.folder / "update", "0" * 64)
    assert_nothing_left(harness)


def test_a_refusal_is_recorded_with_its_reason(harness: WorkerHarness, item: WorkItem) -> None:
    save_tensors(with_value(float("nan")), harness.folder / "update")
    with pytest.raises(NotFinite):
        send(harness, item, harness.folder / "update")
    refused = harness.ledger()[-1]
    assert (refused["run"], refused["round"], refused["method"]) == (str(item.run_id), 1, "fedbyol")
    assert NAME in refused["reason"]
    assert refused["digest"] == digest_of(harness.folder / "update")


def test_the_ledger_is_written_before_the_first_byte_leaves(harness: WorkerHarness, item: WorkItem) -> None:
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    seen: list[list[str]] = []

    def look(call: str) -> None:
        seen.append(harness.kinds())
        raise Refusal("artifact-rejected", 422)

    harness.coordinator.before = look
    with pytest.raises(Rejected):
        send(harness, item, path)
    assert seen == [["opened", "intent"]]
    intent = harness.ledger()[-1]
    about = {key: intent[key] for key in intent.keys() - {"time", "salt", "kind", "seq"}}
    assert about == {
        "policy": "none",
        "run": str(item.run_id),
        "round": 1,
        "method": "fedbyol",
        "artifact": ["weights"],
        "tensors": sorted(tensor.name for tensor in item.plan.update),
        "numbers": [],
        "reported": ["gpu_memory_bytes", "gpu_utilisation", "images_per_second", "loss", "memory_bytes"],
        "bytes": path.stat().st_size,
        "digest": digest_of(path),
    }


def test_the_ledger_names_the_weights_that_the_run_started_from(harness: WorkerHarness, item: WorkItem) -> None:
    initial = InitialConfig(weights="start", digest="5" * 64)
    model = item.spec.model.model_copy(update={"initial": initial})
    started = item.model_copy(update={"spec": item.spec.model_copy(update={"model": model})})
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    send(harness, started, path)
    assert [(entry["kind"], entry["initial"]) for entry in harness.ledger()[-2:]] == [
        ("intent", "5" * 64),
        ("sent", "5" * 64),
    ]


def test_an_update_is_recorded_as_sent_after_the_coordinator_has_received_it(
    harness: WorkerHarness, item: WorkItem
) -> None:
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    harness.egress().send(item, path, digest_of(path), {"loss": 0.1, "num_examples": 32})
    opened, intent, sent = harness.ledger()
    assert (opened["kind"], intent["kind"], sent["kind"]) == ("opened", "intent", "sent")
    assert intent["numbers"] == ["loss=0.1", "num_examples=32"]
    assert (sent["intent"], sent["digest"], sent["bytes"]) == (intent["seq"], intent["digest"], intent["bytes"])
    assert sent["sent_bytes"] == sent["bytes"]  # once


def test_nothing_is_sent_if_the_ledger_cannot_be_written(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(ledger: Ledger, *args: object, **fields: object) -> None:
        raise LedgerError("cannot write the ledger in /home/owner: No space left on device")

    agent = harness.restart()
    monkeypatch.setattr(Ledger, "append", full)
    harness.offer(make_spec(), 1)
    agent.step()
    assert "PUT artifact" not in harness.coordinator.calls
    (declined,) = harness.coordinator.declined
    assert declined.reason == "the worker cannot write its ledger, so it sends nothing: see its log"


def test_only_egress_sends_artifacts() -> None:
    package = Path(fedssl_worker.__path__[0])
    assert [path.name for path in package.rglob("*.py") if ".upload(" in path.read_text()] == ["egress.py"]
    assert not [path.name for path in package.rglob("*.py") if "httpx." in path.read_text()]
