"""What the engine tells of a training on the coordinator, written to Postgres and the artifact store."""

import time
from uuid import uuid4

import structlog
import torch
from safetensors import SafetensorError
from sqlalchemy import Connection

from fedssl.artifacts.tensors import Tensors, load_tensors
from fedssl.engine import DistillationProgress, epochs_done
from fedssl.errors import ArtifactError, Cancelled, StoreUnavailable
from fedssl_coordinator.aggregator.rounds import Stored, put
from fedssl_coordinator.core.celery_app import is_stopping
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.federation.distillation import repository, service
from fedssl_coordinator.federation.distillation.service import Begun
from fedssl_coordinator.storage.artifacts import service as artifacts
from fedssl_coordinator.storage.artifacts.removal import release

log = structlog.get_logger(__name__)

PROGRESS_SECONDS = 1.0  # how often Postgres hears of it, however short an epoch is
_WRITER = "writer"


class Training:
    """One try at a job: where it goes on (the engine's `Checkpoint`), and who hears how far it is (`on_epoch`).

    A checkpoint is an artifact, so that another machine can go on. Every try signs its own: no two files have the same
    bytes, so one that is replaced can be removed without a look at who else may be about to store it.
    """

    def __init__(self, connection: Connection, begun: Begun) -> None:
        self.is_leaving = False
        self._connection = connection
        self._begun = begun
        self._job_id = begun.job.id
        self._checkpoint = begun.job.checkpoint
        self._signature = torch.tensor(list(uuid4().bytes), dtype=torch.uint8)
        self._pace = _Pace()
        self._saved_at = time.monotonic()
        self._told_at = float("-inf")

    def load(self) -> Tensors | None:
        """What an earlier try saved; None: nothing, or nothing that can be read."""
        saved = None if self._checkpoint is None else _read(self._checkpoint)
        if saved is not None:
            saved.pop(_WRITER, None)
        if self._begun.is_resumed:
            epoch = 0 if saved is None else epochs_done(saved)
            with transaction(self._connection) as session:
                service.note_resumption(session, self._begun.job, epoch, tell=self._begun.is_told)
        return saved

    def save(self, tensors: Tensors) -> None:
        """Replace what was saved, where it is old enough or this process is about to end."""
        is_asked_to_leave = is_stopping.is_set()
        if not is_asked_to_leave and time.monotonic() - self._saved_at < settings().checkpoint_seconds:
            return
        try:
            self._replace(put({**tensors, _WRITER: self._signature}))
        except OSError as error:  # a full disk and a store that is away cost safety, not the training
            log.warning("checkpoint.failed", job=str(self._job_id), error=str(error))
        self._saved_at = time.monotonic()
        self.is_leaving = is_asked_to_leave

    def on_epoch(self, progress: DistillationProgress) -> None:
        """Say how far it is. Raises Cancelled where the job was called off or this process is about to end."""
        self._pace.tick()
        is_last = progress.epoch == progress.num_epochs
        if not (is_last or self.is_leaving) and time.monotonic() - self._told_at < PROGRESS_SECONDS:
            return
        self._told_at = time.monotonic()
        values = {"epoch": progress.epoch, "loss": progress.loss, "seconds_per_epoch": self._pace.seconds_per_epoch}
        with transaction(self._connection) as session:
            if not repository.set_while_running(session, self._job_id, **values):
                raise Cancelled("the job was called off")
        if self.is_leaving and not is_last:
            raise Cancelled("this process was asked to end")

    def _replace(self, stored: Stored) -> None:
        try:
            with transaction(self._connection) as session:
                artifacts.record_stored(session, stored.digest, stored.num_bytes)
                # It has come further than any try before, so what failed before is past.
                is_mine = repository.set_while_running(
                    session, self._job_id, checkpoint=stored.digest, num_tries=1, retry_at=None, reason=None
                )
                if not is_mine:
                    raise Cancelled("the job was called off")
        except Cancelled:
            store().delete(stored.digest)
            raise
        if self._checkpoint is not None:
            release(self._checkpoint)
        self._checkpoint = stored.digest


class _Pace:
    """How long an epoch takes. The first one counts only until there is a second: it warms up."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None
        self._epochs = 0
        self.seconds_per_epoch = 0.0

    def tick(self) -> None:
        """One more epoch is done."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self.seconds_per_epoch = now - self._began
            return
        self._epochs += 1
        self.seconds_per_epoch = (now - self._first) / self._epochs


def _read(digest: str) -> Tensors | None:
    try:
        return load_tensors(store().path(digest))
    except StoreUnavailable:  # it may well be there
        raise
    except (ArtifactError, OSError, SafetensorError) as error:
        log.warning("checkpoint.unreadable", digest=digest, error=str(error), consequence="the job begins anew")
        return None
