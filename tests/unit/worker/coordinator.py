"""A small coordinator over real HTTP that follows the contract wherever a worker can notice it."""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from fedssl.protocol.data_card import DataReport, DataReported
from fedssl.protocol.ledger import AnchorReceipt, LedgerAnchor, SentBroadcast, receipt_message
from fedssl.protocol.site_work import EVALUATIONS_HEADER, SiteAnswer, SiteAnswered, SiteEvaluationItem
from fedssl.protocol.states import AssignmentState, SiteEvaluationState
from fedssl.protocol.work import (
    BROADCAST_HEADER,
    DELIVERY_HEADER,
    OFFER_HEADER,
    PAUSE_HEADER,
    RESOURCES_HEADER,
    AcceptedUpdate,
    Claim,
    Decline,
    Heartbeat,
    HeartbeatReply,
    Register,
    Registered,
    Submit,
    Submitted,
    WorkItem,
)
from support.listening import LoopbackServer, QuietHandler

TOKEN = "worker-token-that-nobody-may-see"


@dataclass
class Refusal(Exception):
    """Makes the coordinator answer with a problem or, if the slug is empty, with a web page as a proxy does."""

    slug: str
    status: int
    detail: str = "Do something else."


class FakeCoordinator(LoopbackServer):
    """Leases the work items given to `offer`, in order. `before` may raise Refusal, or wait, before any answer."""

    def __init__(self, client_id: str) -> None:
        super().__init__(_Handler)
        self.client_id = client_id
        self.artifacts: dict[str, bytes] = {}
        self.queue: deque[WorkItem] = deque()
        self.leased: WorkItem | None = None
        self.last_accepted: AcceptedUpdate | None = None
        self.introductions: list[Register] = []
        self.reports: list[DataReport] = []
        self.heartbeats: list[Heartbeat] = []
        self.submissions: list[Submit] = []
        self.declined: list[Decline] = []
        self.calls: list[str] = []
        self.reply = HeartbeatReply()
        self.before: Callable[[str], None] = lambda call: None
        self.drop_answer_of: str | None = None
        self.rejects = False
        self.rename = (b"", b"")
        self.raw: Callable[[str], Iterable[bytes] | None] = lambda call: None
        """A function that may return all bytes of the response to a call, including the status line and the headers."""
        self.anchors: list[LedgerAnchor] = []
        self.gives_receipts = True
        self.delivery_bytes = 0
        """The largest update that it accepts together with its submission. With 0 it is like an older coordinator."""
        self.takes_resources = False
        """If false, it refuses `resources` in heartbeats, like an older coordinator."""
        self.evaluations: deque[SiteEvaluationItem] | None = None
        """The evaluations for this site. With None it refuses claims that ask for them, like an older coordinator."""
        self.pause_seconds: str | None = None
        """The `Retry-After` of claims without work, for workers that obey it."""
        self.asks_for_evaluations = False
        """An event that each claim sets."""
        self.site_answers: list[SiteAnswer] = []
        self._key = Ed25519PrivateKey.from_private_bytes(bytes(32))
        self._answers: dict[tuple[UUID, str], Submitted] = {}
        self._lock = threading.Condition()

    def put(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        self.artifacts[digest] = content
        return digest

    def offer(self, item: WorkItem) -> None:
        with self._lock:
            self.queue.append(item)
            self._lock.notify_all()

    def claim(self, claim: Claim) -> WorkItem | None:
        with self._lock:
            self._lock.wait_for(lambda: self.leased or self.queue, timeout=claim.wait_seconds)
            if self.leased is None and self.queue:
                self.leased = self.queue.popleft().model_copy(update={"last_accepted": self.last_accepted})
            return self.leased

    def answer_evaluation(self, answer: SiteAnswer) -> SiteAnswered:
        assert self.evaluations is not None
        if not self.evaluations or self.evaluations[0].evaluation_id != answer.evaluation_id:
            raise Refusal("conflict", 409, "It is answered already.")
        self.evaluations.popleft()
        self.site_answers.append(answer)
        state = SiteEvaluationState.REFUSED if answer.counts is None else SiteEvaluationState.COMPLETED
        return SiteAnswered(evaluation_id=answer.evaluation_id, state=state)

    def submit(self, submit: Submit) -> Submitted:
        key = (submit.assignment_id, submit.update)
        with self._lock:
            if key not in self._answers:
                item = self._held(submit.assignment_id)
                if submit.update not in self.artifacts:
                    raise Refusal("not-found", 404, "Upload it first.")
                self.submissions.append(submit)
                self.leased = None
                state = AssignmentState.REJECTED if self.rejects else AssignmentState.ACCEPTED
                if not self.rejects:
                    self.last_accepted = AcceptedUpdate(round_number=item.round_number, update=submit.update)
                self._answers[key] = Submitted(assignment_id=submit.assignment_id, state=state)
            return self._answers[key]

    def decline(self, decline: Decline) -> Submitted:
        with self._lock:
            self.declined.append(decline)
            if self.leased is not None and self.leased.assignment_id == decline.assignment_id:
                self.leased = None
            return Submitted(assignment_id=decline.assignment_id, state=AssignmentState.DECLINED)

    def upload(self, digest: str, assignment_id: str, body: bytes) -> int:
        with self._lock:
            if (UUID(assignment_id), digest) not in self._answers:
                self._held(UUID(assignment_id))
            known = digest in self.artifacts
            if self.put(body) != digest:
                raise Refusal("artifact-rejected", 422, "The bytes are not those of the digest.")
            return 200 if known else 201

    def anchor(self, anchor: LedgerAnchor | None, sent: SentBroadcast | None = None) -> AnchorReceipt | None:
        """Store an anchor, and sign its receipt."""
        if anchor is None:
            return None
        self.anchors.append(anchor)
        if not self.gives_receipts:
            return None
        at = "2026-11-20T12:00:00.000000+00:00"
        return AnchorReceipt(
            client_id=self.client_id,
            seq=anchor.seq,
            head=anchor.head,
            at=at,
            coordinator=self._key.public_key().public_bytes_raw().hex(),
            signature=self._key.sign(receipt_message(self.client_id, anchor, at, sent)).hex(),
            sent=sent,
        )

    def sent(self, submit: Submit) -> SentBroadcast | None:
        """Return the broadcast of an assignment, as this coordinator signs it."""
        item = self.leased
        if item is None or item.assignment_id != submit.assignment_id:
            return None
        return SentBroadcast(run=item.run_id, round=item.round_number, broadcast=item.broadcast)

    def _held(self, assignment_id: UUID) -> WorkItem:
        if self.leased is None or self.leased.assignment_id != assignment_id:
            raise Refusal("lease-lost", 409, "Claim again.")
        return self.leased


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    server: FakeCoordinator

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        call = parts.path.split("/")[3] if parts.path.startswith("/v1/work/") else f"{self.command} artifact"
        self.server.calls.append(call)
        if (parts_sent := self.server.raw(call)) is not None:
            self.close_connection = True
            with suppress(ConnectionError):  # the worker closed the connection
                for part in parts_sent:
                    self.wfile.write(part)
            return
        try:
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                raise Refusal("unauthenticated", 401, "Ask the operator for a new token.")
            self.server.before(call)
            status, content = self._dispatch(call, parts.path.rpartition("/")[2], parts.query, body)
        except Refusal as refusal:
            status = refusal.status
            document = {"type": f"urn:fedssl:problem:{refusal.slug}", "title": refusal.slug, "status": status}
            content = json.dumps(document | {"detail": refusal.detail}).encode() if refusal.slug else b"<html>default"
        if self.server.drop_answer_of == call:
            self.server.drop_answer_of = None
            self.close_connection = True
            return
        with suppress(ConnectionError):  # the worker was killed while it waited
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if call == "claim" and self.server.delivery_bytes:
                self.send_header(OFFER_HEADER, str(self.server.delivery_bytes))
            if call == "claim" and self.server.takes_resources:
                self.send_header(RESOURCES_HEADER, "1")
            if call == "claim" and self.server.evaluations is not None:
                self.send_header(
                    EVALUATIONS_HEADER, str(int(bool(self.server.evaluations) and self.server.asks_for_evaluations))
                )
            if status == 204 and self.server.pause_seconds is not None and self.headers[PAUSE_HEADER] == "1":
                self.send_header("Retry-After", self.server.pause_seconds)
            self.end_headers()
            self.wfile.write(content)

    def _dispatch(self, call: str, last: str, query: str, body: bytes) -> tuple[int, bytes]:
        coordinator = self.server
        answer: BaseModel | None
        match call:
            case "register":
                introduction = Register.model_validate_json(body)
                coordinator.introductions.append(introduction)
                receipt = coordinator.anchor(introduction.anchor)
                answer = Registered(client_id=coordinator.client_id, receipt=receipt)
            case "data-report":
                coordinator.reports.append(DataReport.model_validate_json(body))
                answer = DataReported()
            case "claim":
                claim = Claim.model_validate_json(body)
                if claim.site_evaluations and coordinator.evaluations is None:
                    raise Refusal("invalid-request", 422, "site_evaluations: there is no such key.")
                coordinator.asks_for_evaluations = claim.site_evaluations
                answer = coordinator.claim(claim)
            case "site-evaluations" if last == "claim":
                answer = coordinator.evaluations[0] if coordinator.evaluations else None
            case "site-evaluations":
                site_answer = SiteAnswer.model_validate_json(body)
                answered = coordinator.answer_evaluation(site_answer)
                answer = answered.model_copy(update={"receipt": coordinator.anchor(site_answer.anchor)})
            case "heartbeat":
                beat = Heartbeat.model_validate_json(body)
                coordinator.heartbeats.append(beat)
                answer = coordinator.reply.model_copy(update={"receipt": coordinator.anchor(beat.anchor)})
            case "submit":
                submit = Submit.model_validate_json(body)
                sent = coordinator.sent(submit) if BROADCAST_HEADER in self.headers else None
                submitted = coordinator.submit(submit)
                answer = submitted.model_copy(update={"receipt": coordinator.anchor(submit.anchor, sent)})
            case "deliver":
                submit = Submit.model_validate_json(self.headers[DELIVERY_HEADER])
                coordinator.upload(submit.update, str(submit.assignment_id), body)
                sent = coordinator.sent(submit) if BROADCAST_HEADER in self.headers else None
                submitted = coordinator.submit(submit)
                answer = submitted.model_copy(update={"receipt": coordinator.anchor(submit.anchor, sent)})
            case "decline":
                answer = coordinator.decline(Decline.model_validate_json(body))
            case "GET artifact":
                if last not in coordinator.artifacts:
                    raise Refusal("not-found", 404, "Nothing is stored under this digest.")
                return 200, coordinator.artifacts[last]
            case _:
                return coordinator.upload(last, parse_qs(query)["assignment"][0], body), b""
        return (204, b"") if answer is None else (200, answer.model_dump_json().encode().replace(*coordinator.rename))

    do_GET = do_POST = do_PUT = _answer  # noqa: N815 - http.server requires these names
