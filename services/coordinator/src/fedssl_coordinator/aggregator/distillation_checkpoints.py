"""Writes the progress and the checkpoints of a training on the coordinator to Postgres and the artifact store."""

import time
from uuid import uuid4

import structlog
import torch
from sqlalchemy import Connection

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import DistillationProgress, epochs_done
from fedssl.errors import ArtifactError, Cancelled, StoreUnavailable
from fedssl_coordinator.aggregator.rounds import StoredArtifact, put
from fedssl_coordinator.aggregator.stored import stored_tensors
from fedssl_coordinator.core.celery_app import is_stopping
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import DistillationJob
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.federation import retries
from fedssl_coordinator.federation.distillation import repository, service
from fedssl_coordinator.federation.jobs.service import StartedJob
from fedssl_coordinator.storage.artifacts import service as artifacts
from fedssl_coordinator.storage.artifacts.removal import release

log = structlog.get_logger(__name__)

PROGRESS_SECONDS = 1.0  # between two writes to Postgres, even if epochs are shorter
_WRITER = "writer"


class Training:
    """One attempt at a job: loads and saves checkpoints (the engine's `Checkpoint`), and writes progress (`on_epoch`).

    A checkpoint is an artifact, so that another machine can resume the job. Every attempt signs its own checkpoints, so
    no two files have the same bytes, and a replaced one can be removed without checking whether another attempt stores
    it.
    """

    def __init__(self, connection: Connection, started: StartedJob[DistillationJob]) -> None:
        self.is_leaving = False
        self._connection = connection
        self._started = started
        self._job_id = started.job.id
        self._checkpoint = started.job.checkpoint
        self._signature = torch.tensor(list(uuid4().bytes), dtype=torch.uint8)
        self._timer = _EpochTimer()
        self._saved_at = time.monotonic()
        self._written_at = float("-inf")

    def load(self) -> Tensors | None:
        """Return what an earlier attempt saved, or None if it saved nothing, or nothing that can be read."""
        saved = None if self._checkpoint is None else _read(self._checkpoint)
        if saved is not None:
            saved.pop(_WRITER, None)
        if self._started.is_resumed:
            epoch = 0 if saved is None else epochs_done(saved)
            with transaction(self._connection) as session:
                service.record_resumption(session, self._started, epoch)
        return saved

    def save(self, tensors: Tensors) -> None:
        """Replace the checkpoint if it is old enough, or if this process is about to end."""
        is_asked_to_leave = is_stopping.is_set()
        if not is_asked_to_leave and time.monotonic() - self._saved_at < settings().checkpoint_seconds:
            return
        try:
            self._replace(put({**tensors, _WRITER: self._signature}))
        except OSError as error:  # a full disk or an unreachable store must not end the training
            log.warning("checkpoint.failed", job=str(self._job_id), error=str(error))
        self._saved_at = time.monotonic()
        self.is_leaving = is_asked_to_leave

    def on_epoch(self, progress: DistillationProgress) -> None:
        """Write the progress. Raises Cancelled if the job was cancelled or this process is about to end."""
        self._timer.tick()
        is_last = progress.epoch == progress.num_epochs
        if not (is_last or self.is_leaving) and time.monotonic() - self._written_at < PROGRESS_SECONDS:
            return
        self._written_at = time.monotonic()
        values = {"epoch": progress.epoch, "loss": progress.loss, "seconds_per_epoch": self._timer.seconds_per_epoch}
        with transaction(self._connection) as session:
            if not repository.set_while_running(session, self._job_id, **values):
                raise Cancelled("the job was cancelled")
        if self.is_leaving and not is_last:
            raise Cancelled("this process was asked to end")

    def _replace(self, stored: StoredArtifact) -> None:
        try:
            with transaction(self._connection) as session:
                artifacts.record_stored(session, stored.digest, stored.num_bytes)
                # It has come further than any earlier attempt, so the earlier failures are over.
                is_mine = repository.set_while_running(
                    session, self._job_id, checkpoint=stored.digest, **retries.PROGRESS
                )
                if not is_mine:
                    raise Cancelled("the job was cancelled")
        except Cancelled:
            store().delete(stored.digest)
            raise
        if self._checkpoint is not None:
            release(self._checkpoint)
        self._checkpoint = stored.digest


class _EpochTimer:
    """Measures the seconds per epoch. The first epoch, which warms up, counts only until there is a second one."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None
        self._epochs = 0
        self.seconds_per_epoch = 0.0

    def tick(self) -> None:
        """Count one more epoch."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self.seconds_per_epoch = now - self._began
            return
        self._epochs += 1
        self.seconds_per_epoch = (now - self._first) / self._epochs


def _read(digest: str) -> Tensors | None:
    try:
        return stored_tensors(digest, "checkpoint")
    except StoreUnavailable:  # the checkpoint may well exist
        raise
    except (ArtifactError, OSError) as error:
        log.warning("checkpoint.unreadable", digest=digest, error=str(error), consequence="the job starts from scratch")
        return None
