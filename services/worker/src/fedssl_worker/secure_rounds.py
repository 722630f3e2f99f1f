"""A worker's part in secure rounds: it answers each phase, and continues after it was killed.

What must not be lost is in one file per run, `secure/RUN.json`: the newest round, the seed of its keys, the shares that
were made, and what the coordinator sent in each phase, written before the answer leaves. A client that is rebuilt from
these gives the same answers (`SecureClient`), so that no second vector is masked, and no second list is signed. The
seed is deleted at the end of the round, or, if this worker did not see that, once it learns that the run has ended. The
number of the round stays, so that no round is answered twice.
"""

import contextvars
import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import UUID

import numpy as np
import structlog
import torch
from pydantic import ValidationError, model_validator

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import read_tensors, save_tensors
from fedssl.client import Gone, WorkerClient
from fedssl.errors import Cancelled
from fedssl.files import write_private
from fedssl.protocol.base import Digest, StrictModel
from fedssl.protocol.secure_work import (
    SECURE_PROTOCOL,
    VECTOR_NAME,
    Hex32,
    Hex64,
    SecureInbox,
    SecureKeys,
    SecurePhase,
    SecureShares,
    SecureStatus,
    SecureVector,
)
from fedssl.protocol.work import WorkItem
from fedssl.secure_aggregation import Refused, RoundContext, SecureClient, Words, wire
from fedssl.secure_aggregation.client import Signer
from fedssl.secure_aggregation.messages import Confirmation
from fedssl_worker.causes import CannotTrain
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.state import ClientStates, Finished

log = structlog.get_logger()

M = TypeVar("M")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
"""The pause between two requests for the phase. It grows while the phase lasts."""

_MASKED = "masked.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class _Trained:
    """A trained update with its words and their digest, and where the file of its masked vector will be."""

    finished: Finished
    words: Words
    digest: str
    masked: Path


class Record(StrictModel):
    """The file of a run. `seed` is None once the round has ended. `words`: the digest of what was masked.

    A round of another version of the protocol has ended: only its number is kept, so that it is not answered again.
    """

    protocol: int
    round: int
    context: Hex32
    seed: Hex32 | None
    roster: dict[str, SecureKeys] | None = None
    shares: SecureShares | None = None
    inbox: SecureInbox | None = None
    words: Digest | None = None
    survivors: dict[str, Hex64] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_this_version(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("protocol", 1) != SECURE_PROTOCOL:
            kept = {name: body.get(name) for name in ("round", "context")}
            return {**kept, "protocol": SECURE_PROTOCOL, "seed": None}
        return body

    def ended(self) -> Self:
        """Return the record without the secrets of its round."""
        return type(self)(protocol=self.protocol, round=self.round, context=self.context, seed=None)


def _read(path: Path) -> Record | None:
    """Return a run's record, or None if there is none or it is damaged, in which case `begin` refuses the run."""
    try:
        return Record.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


class SecureRounds:
    """Begins the secure rounds of a worker, or continues one."""

    def __init__(
        self, client: WorkerClient, egress: Egress, states: ClientStates, root: Path, identity: Signer
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._client, self._egress, self._states = client, egress, states
        self._root, self._identity = root, identity

    def begin(self, item: WorkItem, context: RoundContext) -> "SecureRound":
        """Return this worker's part in a round. Nothing has left yet.

        Raises NotPermitted, with an entry `refused` in the ledger, if the owner's limits or an earlier answer forbid
        it.
        """
        path = self._path(item.run_id)
        try:
            record = self._record_for(path, item.round_number, context)
            seed = bytes.fromhex(record.seed or "")
            client = SecureClient(context, item.client_id, self._identity, self._egress.secure_limits, seed)
            if record.roster is not None and record.shares is not None:
                before = wire.shares_from_wire(item.client_id, record.shares)
                client.share(wire.roster_from_wire(record.roster), before)
        except Refused as error:
            raise self._egress.refuse_secure(item, str(error)) from error
        write_private(path, record.model_dump_json())
        return SecureRound(self._client, self._egress, self._states, item, context, client, path, record)

    def unfinished(self) -> list[UUID]:
        """Return the runs whose newest round has not ended here."""
        records = {path: _read(path) for path in sorted(self._root.glob("*.json"))}
        return [UUID(path.stem) for path, record in records.items() if record is not None and record.seed is not None]

    def end(self, run_id: UUID) -> None:
        """Delete the secrets of the run's newest round, which is never answered again."""
        path = self._path(run_id)
        if (record := _read(path)) is not None:
            write_private(path, record.ended().model_dump_json())

    def _path(self, run_id: UUID) -> Path:
        return self._root / f"{run_id}.json"

    def _record_for(self, path: Path, number: int, context: RoundContext) -> Record:
        try:
            known = Record.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            known = None
        except ValidationError as error:
            raise CannotTrain(f"the file {path.name} of secure rounds is damaged: this run cannot continue") from error
        if known is None or known.round < number:
            return Record(
                protocol=SECURE_PROTOCOL, round=number, context=context.digest.hex(), seed=secrets.token_hex(32)
            )
        if known.round > number or known.seed is None:
            raise Refused(f"this worker has taken part in round {known.round} already, and is asked for round {number}")
        if known.context != context.digest.hex():
            raise Refused(f"another cohort, broadcast, plan or spec was shown to this worker for round {number} before")
        return known


class SecureRound:
    """One round. `agreeing` sends keys and shares while the training runs, and `finish` does the rest."""

    def __init__(
        self,
        client: WorkerClient,
        egress: Egress,
        states: ClientStates,
        item: WorkItem,
        context: RoundContext,
        secure: SecureClient,
        path: Path,
        record: Record,
    ) -> None:
        self._client, self._egress, self._states, self._item = client, egress, states, item
        self._context, self._secure, self._path, self._record = context, secure, path, record

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Send keys and shares during the block. Raises what `finish` raises at its end."""
        stop = threading.Event()
        with ThreadPoolExecutor(1, "secure-round") as pool:
            future = pool.submit(contextvars.copy_context().run, self._agree, stop)
            try:
                yield
            finally:
                stop.set()
        future.result()

    def _agree(self, stop: threading.Event) -> None:
        self._answer_phases(None, lambda: None, stop)

    def finish(self, finished: Finished, words: Words, report: Callable[[], None]) -> None:
        """Send the masked vector, and answer until the round needs nothing more from this worker.

        `report` is called from time to time, and may raise Cancelled. Raises NotPermitted, LedgerError, ClientError,
        and Cancelled, which also means that the round has ended without a sum.
        """
        digest, masked = hashlib.sha256(words.tobytes()).hexdigest(), finished.update.with_name(_MASKED)
        record = self._record
        if record.words not in (None, digest):
            raise self._refused("the update was trained again with other bits than the one that was masked")
        if record.inbox is not None:
            inbox = wire.inbox_from_wire(record.inbox)
            self._guarded(lambda: self._secure.mask(inbox, words))
        if record.survivors is not None:
            survivors = wire.survivors_from_wire(record.survivors)
            self._guarded(lambda: self._secure.confirm(survivors))
        try:
            ended_in = self._answer_phases(_Trained(finished, words, digest, masked), report, threading.Event())
        finally:
            masked.unlink(missing_ok=True)
        has_masked = self._record.words is not None
        self._end()
        if ended_in == "failed":
            raise Cancelled("the secure round has no sum: the coordinator's events have the reason")
        if not has_masked:
            raise Cancelled("the secure round has ended without this worker's update")

    def _answer_phases(
        self, trained: _Trained | None, report: Callable[[], None], stop: threading.Event
    ) -> SecurePhase:
        """Answer each phase once, until the round has ended, `stop` is set, or a trained update is needed.

        Returns the last phase.
        """
        delay, answered = _FIRST_PAUSE_SECONDS, ""
        while True:
            status = self._client.secure_status(self._item.assignment_id)
            if status.phase in ("done", "failed") or (trained is None and status.phase not in ("keys", "shares")):
                return status.phase
            if not status.is_member:
                raise Cancelled(
                    f"the round continues without this worker: its message came too late for {status.phase}"
                )
            if not status.received:
                self._answer(status, trained)
            if status.phase != answered:
                delay, answered = _FIRST_PAUSE_SECONDS, status.phase
            elif stop.wait(delay):
                return status.phase
            else:
                delay = min(_LONGEST_PAUSE_SECONDS, 1.5 * delay)
            self._report(report)

    def _report(self, report: Callable[[], None]) -> None:
        try:
            report()
        except Cancelled:
            # Once the sum is complete, the lease has ended as well.
            if self._client.secure_status(self._item.assignment_id).phase not in ("done", "failed"):
                raise

    def _answer(self, status: SecureStatus, trained: _Trained | None) -> None:
        try:
            match status.phase:
                case "keys":
                    self._egress.send_secure(self._item, wire.keys_to_wire(self._secure.announcement))
                case "shares":
                    self._share(status)
                case "vectors":
                    assert trained is not None, "checked by the caller"
                    self._send_vector(status, trained)
                case "confirmations":
                    confirmation = self._confirm(status)
                    self._egress.send_secure(self._item, wire.confirmation_to_wire(confirmation))
                case "reveals":
                    self._reveal(status)
        except Gone as error:
            if not error.slug:
                raise
            log.warning("secure_message.late", phase=status.phase, reason=str(error))

    def _share(self, status: SecureStatus) -> None:
        roster = wire.roster_from_wire(status.roster or {})
        shares = wire.shares_to_wire(self._guarded(lambda: self._secure.share(roster)))
        self._store(roster=status.roster, shares=shares)
        self._egress.send_secure(self._item, shares)

    def _send_vector(self, status: SecureStatus, trained: _Trained) -> None:
        inbox = status.inbox or SecureInbox(sharers=(), deliveries=())
        vector = self._guarded(lambda: self._secure.mask(wire.inbox_from_wire(inbox), trained.words))
        self._store(inbox=inbox, words=trained.digest)
        masked = {VECTOR_NAME: torch.from_numpy(vector.words.view(np.int64))}
        if apart := self._item.spec.sent_apart(self._item.plan):
            update = read_tensors(trained.finished.update, trained.finished.digest)
            masked |= {each.name: update[each.name] for each in apart}
        save_tensors(masked, trained.masked)
        message = SecureVector(update=digest_of(trained.masked), signature=vector.signature.hex())
        self._states.set_masked(trained.finished, message.update)
        self._egress.send_masked(self._item, trained.finished, trained.masked, message, self._sum_of())

    def _confirm(self, status: SecureStatus) -> Confirmation:
        confirmation = self._guarded(lambda: self._secure.confirm(wire.survivors_from_wire(status.survivors or {})))
        self._store(survivors=status.survivors)
        return confirmation

    def _reveal(self, status: SecureStatus) -> None:
        self._confirm(status)
        confirmations = wire.confirmations_from_wire(status.confirmations or {})
        reveals = self._guarded(lambda: self._secure.reveal(confirmations))
        self._egress.send_secure(self._item, wire.reveals_to_wire(reveals), self._sum_of())

    def _sum_of(self) -> dict[str, Any]:
        """Return the fields of a ledger entry that name the clients in the sum."""
        limits, roster = self._context.thresholds, self._secure.roster_digest
        return {
            "cohort": [member.client for member in self._context.cohort],
            "min_survivors": limits.min_survivors,
            "roster": "" if roster is None else roster.hex(),
            "threshold": limits.threshold,
        }

    def _guarded(self, step: Callable[[], M]) -> M:
        """Take a step of the protocol. Raises NotPermitted if it refuses what the coordinator asked."""
        try:
            return step()
        except Refused as error:
            raise self._refused(str(error)) from error

    def _refused(self, reason: str) -> Exception:
        self._end()
        return self._egress.refuse_secure(self._item, reason)

    def _store(self, **values: Any) -> None:
        self._record = self._record.model_copy(update=values)
        write_private(self._path, self._record.model_dump_json())

    def _end(self) -> None:
        """Delete the secrets of the round. It is never answered again."""
        self._record = self._record.ended()
        write_private(self._path, self._record.model_dump_json())
