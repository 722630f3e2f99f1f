"""A worker's requests, sent by hand with tensors that match the plan."""

from pathlib import Path

import torch

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.client import WorkerClient
from fedssl.protocol.plan import TensorSpec
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.work import Submit, Submitted, WorkItem

TINY: dict[str, object] = {
    "num_rounds": 2,
    "model": {"encoder": {"widths": [4, 8]}, "projector": {"hidden_dims": [8], "out_dim": 4}},
    "data": {"channels": 1, "image_size": 8},
    "training": {"batch_size": 16},
}


def tiny_spec(**changes: object) -> RunSpec:
    """Return a spec small enough that a round takes almost no time; `changes` replace whole sections."""
    return RunSpec.model_validate({**TINY, **changes})


_MOST = 1e30  # a metric must not be larger
_DTYPES = {"F32": torch.float32, "I64": torch.int64}


def tensors_for(specs: tuple[TensorSpec, ...], value: float = 0.0) -> Tensors:
    """Return tensors exactly as declared, filled with one value."""
    return {spec.name: torch.full(spec.shape, value).to(_DTYPES[spec.dtype]) for spec in specs}


def upload(worker: WorkerClient, item: WorkItem, tensors: Tensors, folder: Path) -> str:
    """Save and upload tensors as the update of an assignment, and return the digest."""
    path = folder / f"{item.assignment_id}.safetensors"
    save_tensors(tensors, path)
    digest = digest_of(path)
    worker.upload(digest, path, item.assignment_id)
    return digest


def deliver(
    worker: WorkerClient, item: WorkItem, folder: Path, value: float = 0.0, num_examples: int = 10
) -> Submitted:
    """Send and submit a constant update in one request, as workers do with small updates."""
    return deliver_tensors(
        worker, item, tensors_for(item.plan.update, value), folder, num_examples, {"loss": min(value, _MOST)}
    )


def deliver_tensors(
    worker: WorkerClient, item: WorkItem, tensors: Tensors, folder: Path, num_examples: int, metrics: dict[str, float]
) -> Submitted:
    """Send and submit tensors as the update of an assignment, in one request."""
    path = folder / f"{item.assignment_id}.safetensors"
    save_tensors(tensors, path)
    submission = Submit(
        assignment_id=item.assignment_id, update=digest_of(path), num_examples=num_examples, metrics=metrics
    )
    submitted = worker.deliver(submission, path).submitted
    assert submitted is not None
    return submitted


def upload_and_submit(
    worker: WorkerClient, item: WorkItem, folder: Path, value: float = 0.0, num_examples: int = 10
) -> Submitted:
    """Upload a constant update and submit it, as workers do with large updates."""
    digest, metrics = upload(worker, item, tensors_for(item.plan.update, value), folder), {"loss": min(value, _MOST)}
    return worker.submit(
        Submit(assignment_id=item.assignment_id, update=digest, num_examples=num_examples, metrics=metrics)
    )
