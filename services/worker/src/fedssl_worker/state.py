"""Client states on disk, written in two phases, so that a crash costs at most the training in progress.

Phase one: a trained round is written as one folder, `ROUND-UPDATE`, with the update, the client state that belongs to
it and a record. It is on the disk before the update leaves. Phase two: the coordinator decides which of these states
is the client's. Every work item names the update that the coordinator accepted last, and the client's state is the one
that was written with that update. This needs no write, so a crash cannot interrupt it.

    runs/RUN/000004-9f86d0.../note.json            round, digests, number of examples, metrics
                             /note.sha256          the digest of note.json
                             /state.safetensors    never leaves this machine
                             /update.safetensors   until the claim after the one in which it was accepted
                             /masked               in a secure round: the digest of the masked vector, which is what
                                                   the coordinator accepts and names
    runs/RUN.ended                                 its time is when this worker learned that the run has ended
"""

import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID

from pydantic import Field
from safetensors import SafetensorError

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import Tensors, read_tensors, save_tensors
from fedssl.engine import LocalResult
from fedssl.errors import ArtifactDamaged, FedSSLError
from fedssl.files import sync, write_atomically
from fedssl.protocol.base import Digest, StrictModel
from fedssl.protocol.work import AcceptedUpdate, Metrics, StateLost, WorkItem

_RECORD, _CHECKSUM = "note.json", "note.sha256"
_STATE, _UPDATE, _INCOMING = "state.safetensors", "update.safetensors", "incoming-"
_ENDED = ".ended"
_MASKED = "masked"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class _RoundRecord(StrictModel):
    """One kept round. `work` identifies everything that its training depended on."""

    format: Literal[1] = 1
    round_number: int
    work: Digest
    update: Digest
    state: Digest
    num_examples: int
    metrics: Metrics
    lost: StateLost | None = Field(default=None, exclude_if=lambda it: it is None)


class ClientStateLost(FedSSLError):
    """The client state of the newest accepted update is missing or damaged."""

    def __init__(self, accepted: AcceptedUpdate, reason: Literal["missing", "damaged"], detail: str) -> None:
        super().__init__(f"the client state of round {accepted.round_number} is {reason}: {detail}")
        self.lost = StateLost(round_number=accepted.round_number, reason=reason)


class StateUnwritable(FedSSLError):
    """This worker's folder of client states cannot be written. The message names the file, so it stays here."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A trained round whose update is ready to be sent. `lost`: it was trained without this client state."""

    update: Path
    digest: str
    num_examples: int
    metrics: Metrics
    lost: StateLost | None = None


def work_digest(item: WorkItem, fingerprint: str, environment: str) -> str:
    """Return a digest of everything that an update's bits depend on: the work item, the images and the environment."""
    given = {
        "run_id",
        "round_number",
        "client_id",
        "spec",
        "method_version",
        "broadcast",
        "frozen",
        "last_accepted",
        "dimensions",
    }
    text = item.model_dump_json(include=given)
    return hashlib.sha256(f"{text}\n{fingerprint}\n{environment}".encode()).hexdigest()


class ClientStates:
    """The client states of every run that this worker has trained in."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for unfinished in root.glob(f"*/{_INCOMING}*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def accepted(self, run_id: UUID, last: AcceptedUpdate | None) -> Tensors | None:
        """Return the client's state, or None for a cold start if no update was accepted yet. Raises ClientStateLost."""
        if last is None:
            return None
        folder = self._folder_of(run_id, last.round_number, last.update)
        try:
            record = _read_record(folder)
            if folder.name != f"{record.round_number:06d}-{record.update}":
                raise ClientStateLost(last, "damaged", "its record is of another update")
            return read_tensors(folder / _STATE, record.state)
        except ArtifactDamaged as error:
            raise ClientStateLost(last, "damaged", "its bytes have changed") from error
        except FileNotFoundError as error:
            raise ClientStateLost(last, "missing", f"there is no {Path(error.filename or folder).name}") from error
        except (OSError, ValueError, SafetensorError) as error:
            raise ClientStateLost(last, "damaged", f"it cannot be read: {error}") from error

    def require_writable(self, run_id: UUID) -> None:
        """Raise StateUnwritable unless files can be created here. Without the folder of all states, none is created."""
        run = self._root / str(run_id)
        try:
            self._root.mkdir(exist_ok=True)
            run.mkdir(exist_ok=True)
            Path(tempfile.mkdtemp(prefix=_INCOMING, dir=run)).rmdir()
        except OSError as error:
            raise StateUnwritable(str(error)) from error

    def finished(self, run_id: UUID, work: str) -> Finished | None:
        """Return the update of exactly this work if it was trained before, but not submitted."""
        for folder in self._kept_folders(run_id):
            try:
                record = _read_record(folder)
                if record.work == work and digest_of(folder / _UPDATE) == record.update:
                    return Finished(folder / _UPDATE, record.update, record.num_examples, record.metrics, record.lost)
            except (OSError, ValueError):
                continue  # damaged: training again gives the same update
        return None

    def keep(self, item: WorkItem, work: str, result: LocalResult, lost: StateLost | None = None) -> Finished:
        """Carry out phase one: write the update and the state to the disk, completely or not at all.

        `lost`: the client state that the training lacked.
        """
        run = self._root / str(item.run_id)
        run.mkdir(parents=True, exist_ok=True)
        incoming = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=run))
        save_tensors(result.update, incoming / _UPDATE)
        save_tensors(result.state, incoming / _STATE)
        record = _RoundRecord(
            round_number=item.round_number,
            work=work,
            update=digest_of(incoming / _UPDATE),
            state=digest_of(incoming / _STATE),
            num_examples=result.num_examples,
            metrics=result.metrics,
            lost=lost,
        )
        (incoming / _RECORD).write_text(record.model_dump_json(), encoding="utf-8")
        (incoming / _CHECKSUM).write_text(digest_of(incoming / _RECORD), encoding="utf-8")
        for file in (*incoming.iterdir(), incoming):
            sync(file)
        place = self._folder_of(item.run_id, item.round_number, record.update)
        shutil.rmtree(place, ignore_errors=True)  # it is here only if it is damaged
        incoming.rename(place)
        sync(run)
        return Finished(place / _UPDATE, record.update, record.num_examples, record.metrics, lost)

    def set_masked(self, finished: Finished, digest: str) -> None:
        """Record that the coordinator knows an update only by the digest of its masked vector."""
        write_atomically(finished.update.with_name(_MASKED), digest)

    def discard(
        self,
        run_id: UUID,
        *but: AcceptedUpdate | None,
        work: str | None = None,
        resent: AcceptedUpdate | None = None,
        keeps_accepted: bool = False,
    ) -> None:
        """Remove what a run no longer needs: all but the states of these updates and the finished round of `work`.

        The round of `resent` stays as a whole: the coordinator has accepted its update, and may ask for it again.
        `keeps_accepted`: the states of updates that were accepted earlier stay too, because they may be evaluated.
        """
        kept = {self._folder_of(run_id, each.round_number, each.update) for each in but if each is not None}
        whole = None if resent is None else self._folder_of(run_id, resent.round_number, resent.update)
        for folder in self._kept_folders(run_id):
            if folder == whole:
                continue
            if folder in kept:
                (folder / _UPDATE).unlink(missing_ok=True)
            elif keeps_accepted and not (folder / _UPDATE).exists():
                continue  # only an accepted round is without its update
            elif work is None or not _belongs_to(folder, work):
                shutil.rmtree(folder, ignore_errors=True)

    def runs(self) -> list[UUID]:
        """Return the runs that have files here."""
        names = (path.name for path in self._root.glob("*-*-*-*-*") if path.is_dir())
        return sorted(UUID(name) for name in names if _UUID.fullmatch(name))

    def remove_ended(self, ended: Set[UUID], keep_seconds: float) -> list[UUID]:
        """Remove the states of runs known to have ended `keep_seconds` ago, and return those runs."""
        removed = []
        for run_id in self.runs():
            folder = self._root / str(run_id)
            marker = folder.with_suffix(_ENDED)
            if run_id not in ended:
                marker.unlink(missing_ok=True)  # a coordinator that was restored from a backup continues it
                continue
            if not marker.exists():
                marker.touch()
            if time.time() - marker.stat().st_mtime >= keep_seconds:
                shutil.rmtree(folder, ignore_errors=True)
                marker.unlink(missing_ok=True)
                removed.append(run_id)
        return removed

    def _kept_folders(self, run_id: UUID) -> Iterator[Path]:
        run = self._root / str(run_id)
        yield from sorted(run.iterdir()) if run.is_dir() else ()

    def _folder_of(self, run_id: UUID, round_number: int, update: str) -> Path:
        run, name = self._root / str(run_id), f"{round_number:06d}-{update}"
        masked = run.glob(f"{round_number:06d}-*/{_MASKED}")
        return next((file.parent for file in masked if file.read_text() == update), run / name)


def _read_record(folder: Path) -> _RoundRecord:
    """Return a kept round's record. Raises OSError, and ValueError if it is damaged; older ones have no checksum."""
    content, checksum = (folder / _RECORD).read_bytes(), folder / _CHECKSUM
    if checksum.exists() and checksum.read_bytes() != hashlib.sha256(content).hexdigest().encode():
        raise ValueError("the bytes of its record have changed")
    return _RoundRecord.model_validate_json(content)


def _belongs_to(folder: Path, work: str) -> bool:
    try:
        return _read_record(folder).work == work
    except (OSError, ValueError):
        return False
