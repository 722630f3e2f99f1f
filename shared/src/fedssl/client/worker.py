"""The worker's client: the requests of a data owner's process to the coordinator."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from pydantic import BaseModel, ValidationError

from fedssl.client.base import BaseClient
from fedssl.client.connection import MALFORMED, parse, retry_after, summary
from fedssl.client.downloads import OnBytes, OnSize, download
from fedssl.client.errors import BadAnswer, Rejected, UnknownEvaluation, UnknownWork
from fedssl.client.retry import Retry
from fedssl.client.uploads import Delivery, deliver, upload
from fedssl.protocol.data_card import DataReport, DataReported
from fedssl.protocol.ledger import LedgerAnchor
from fedssl.protocol.secure_work import (
    SECURE_ANSWER_BYTES,
    SECURE_PROTOCOL,
    SecureMessage,
    SecureQuery,
    SecureStatus,
    SecureSubmission,
)
from fedssl.protocol.site_work import EVALUATIONS_HEADER, SiteAnswer, SiteAnswered, SiteEvaluationItem
from fedssl.protocol.states import Cause
from fedssl.protocol.work import (
    BROADCAST_HEADER,
    DELIVERY_BYTES,
    LONGEST_PAUSE_SECONDS,
    OFFER_HEADER,
    PAUSE_HEADER,
    RESOURCES_HEADER,
    SHORT_TEXT_CHARACTERS,
    Claim,
    Decline,
    EndedQuery,
    EndedRuns,
    Enrol,
    Enrolled,
    Heartbeat,
    HeartbeatReply,
    Progress,
    Register,
    Registered,
    Resources,
    StateLost,
    Submit,
    Submitted,
    WorkItem,
)

M = TypeVar("M", bound=BaseModel)
P = TypeVar("P", bound=BaseModel)

_ANSWER_BYTES = 1 << 16
_WORK_BYTES = 16 << 20  # a spec may name 100,000 clients
_OFFER = re.compile(r"[0-9]{1,18}")


class _Claimed(BaseModel):
    """The part of a work item that is needed to decline it, if this version does not understand the rest."""

    assignment_id: UUID


class _Offered(BaseModel):
    """The part of an evaluation that is needed to refuse it, if this version does not understand the rest."""

    evaluation_id: UUID
    round_number: int


def _understood(
    model: type[M], content: bytes, request: str, what: str, part: type[P], unknown: Callable[[P, str], Exception]
) -> M:
    """Parse a response, or raise `unknown` of its part if only the rest is of another version. Raises BadAnswer."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        try:
            known = part.model_validate_json(content)
        except ValidationError:
            return parse(model, content, request)  # raises BadAnswer
        raise unknown(
            known, f"this worker does not understand the {what}: {summary(error)}. A newer worker may."
        ) from None
    except MALFORMED:
        return parse(model, content, request)


class WorkerClient(BaseClient):
    """A worker's side of the API. The arguments are those of `Client`, with a worker's token."""

    _delivery_bytes = 0
    _takes_resources = False
    _pause_seconds = 0.0
    _site_evaluations: str | None = None  # the header of the last claim's response

    def enrol(self, token_hash: str) -> Enrolled:
        """Activate the token whose secret has this sha256, with an enrolment token.

        A repeated request gets the same response. Raises NotAuthenticated if the enrolment was revoked, or has expired
        unused, and Conflict if another worker has used it.
        """
        return self._call("/v1/enrolments", Enrolled, Enrol(token_hash=token_hash))

    def register(self, introduction: Register) -> Registered:
        """Describe this worker to the coordinator, and return which client it works for."""
        return self._call("/v1/work/register", Registered, introduction)

    def report_data(self, report: DataReport) -> None:
        """Send what the data owner discloses about its images. Raises NotFound if the coordinator is too old."""
        self._call("/v1/work/data-report", DataReported, report)

    def claim(self, wait_seconds: float = 25.0) -> WorkItem | None:
        """Lease an assignment, waiting up to `wait_seconds` for one, or return None if there was nothing to do.

        A worker that reconnects gets the assignment that it still holds. Raises UnknownWork, with the assignment to
        decline, if this version does not understand the item.
        """
        claim = Claim(wait_seconds=wait_seconds, site_evaluations=self._site_evaluations is not None)
        try:
            content = self._send_claim(claim)
        except Rejected:
            if not claim.site_evaluations:
                raise
            # Another process of the coordinator answered the last claim, and an older one answered this claim.
            self._site_evaluations = None
            content = self._send_claim(Claim(wait_seconds=wait_seconds))
        if not content:  # 204
            return None
        return _understood(
            WorkItem, content, "POST /v1/work/claim", "work", _Claimed,
            lambda claimed, message: UnknownWork(claimed.assignment_id, message),
        )  # fmt: skip

    def _send_claim(self, claim: Claim) -> bytes:
        return self._connection.send(
            "POST",
            "/v1/work/claim",
            body=claim,
            headers={PAUSE_HEADER: "1"},
            timeout=self._connection.timeout + claim.wait_seconds,
            max_bytes=_WORK_BYTES,
            on_headers=self._read_offers,
        )

    @property
    def pause_seconds(self) -> float:
        """Return how long to wait before the next claim if the last one brought no work, at most 60 s.

        It is 0 if the coordinator has waited for work, as older ones always do.
        """
        return self._pause_seconds

    @property
    def has_site_evaluations(self) -> bool:
        """Return whether there was an evaluation for this site, and no other work, at the last claim."""
        return self._site_evaluations == "1"

    def claim_site_evaluation(self) -> SiteEvaluationItem | None:
        """Return the oldest evaluation that this site has not answered, or None if there is none.

        Raises UnknownEvaluation if this version does not understand it.
        """
        path = "/v1/work/site-evaluations/claim"
        content = self._connection.send("POST", path, max_bytes=_WORK_BYTES)
        if not content:  # 204
            return None
        return _understood(
            SiteEvaluationItem, content, f"POST {path}", "evaluation", _Offered,
            lambda offered, message: UnknownEvaluation(offered.evaluation_id, offered.round_number, message),
        )  # fmt: skip

    def answer_site_evaluation(self, answer: SiteAnswer) -> SiteAnswered:
        """Send a site's counts, or why it has none. A repeated request gets the same response. Raises Conflict."""
        answered = self._call("/v1/work/site-evaluations/submit", SiteAnswered, answer)
        if answered.evaluation_id != answer.evaluation_id:
            raise BadAnswer(
                f"the coordinator answered about {answered.evaluation_id}, but was asked for {answer.evaluation_id}"
            )
        return answered

    def heartbeat(
        self,
        assignment_id: UUID | None = None,
        progress: Progress | None = None,
        anchor: LedgerAnchor | None = None,
        *,
        resources: Resources | None = None,
        state_lost: StateLost | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> HeartbeatReply:
        """Renew a lease, or only report that the worker is alive.

        If `timeout` (in seconds) or `retry` is None, the client's is used. `resources` are left out unless the
        coordinator of the last claim reads them. The reply decides about `state_lost` before the training begins.
        """
        body = Heartbeat(
            assignment_id=assignment_id,
            progress=progress,
            anchor=anchor,
            resources=resources if self._takes_resources else None,
            state_lost=state_lost,
        )
        try:
            return self._call("/v1/work/heartbeat", HeartbeatReply, body, timeout=timeout, retry=retry)
        except Rejected:
            if body.resources is None:
                raise
            # Another process of the coordinator answered the claim, and an older one answered this heartbeat.
            self._takes_resources = False
            older = body.model_copy(update={"resources": None})
            return self._call("/v1/work/heartbeat", HeartbeatReply, older, timeout=timeout, retry=retry)

    @property
    def takes_resources(self) -> bool:
        """Return whether the coordinator of the last claim reads reports about the worker's memory."""
        return self._takes_resources

    def submit(self, submission: Submit) -> Submitted:
        """Submit an uploaded update. A repeated request gets the same response.

        Raises LeaseLost, DuplicateUpdate, Gone.
        """
        headers = {BROADCAST_HEADER: "1"}
        answer = self._connection.call(
            "POST", "/v1/work/submit", Submitted, body=submission, headers=headers, max_bytes=_ANSWER_BYTES
        )
        return self._about(submission.assignment_id, answer)

    @property
    def delivery_bytes(self) -> int:
        """Return the largest size of a delivery to the coordinator of the last claim, or 0 if it is too old for any."""
        return self._delivery_bytes

    def deliver(self, submission: Submit, source: Path, on_bytes: OnBytes = lambda count: None) -> Delivery:
        """Send an update of at most `delivery_bytes` from disk and submit it, in one request.

        A repeated request gets the same response. Raises what `upload` and `submit` raise.
        """
        delivery = deliver(self._connection, submission, source, on_bytes)
        if delivery.submitted is not None:
            self._about(submission.assignment_id, delivery.submitted)
        return delivery

    def send_secure(self, assignment_id: UUID, message: SecureMessage) -> SecureStatus:
        """Send one message of secure aggregation, and return the phase. A repeated one changes nothing.

        Raises Conflict if another message of this phase has arrived, and Gone if the phase is over.
        """
        body = SecureSubmission(assignment_id=assignment_id, protocol=SECURE_PROTOCOL, message=message)
        return self._call_secure("send", body)

    def secure_status(self, assignment_id: UUID) -> SecureStatus:
        """Return the phase of a secure round, and what is needed for the next message. Raises LeaseLost."""
        return self._call_secure("status", SecureQuery(assignment_id=assignment_id))

    def _call_secure(self, verb: str, body: BaseModel) -> SecureStatus:
        path = f"/v1/work/secure/{verb}"
        return self._connection.call("POST", path, SecureStatus, body=body, max_bytes=SECURE_ANSWER_BYTES)

    def decline(self, assignment_id: UUID, reason: str, cause: Cause | None = None) -> Submitted:
        """Decline an assignment, with the reason (cut to 500 characters) and whose problem it is."""
        body = Decline(assignment_id=assignment_id, reason=reason[:SHORT_TEXT_CHARACTERS], cause=cause)
        return self._about(assignment_id, self._call("/v1/work/decline", Submitted, body))

    def ended_runs(self, run_ids: Collection[UUID]) -> set[UUID]:
        """Return those of the runs whose client states will not be needed again.

        Raises NotFound if the coordinator is too old for this request.
        """
        query = EndedQuery(run_ids=tuple(run_ids))
        return set(self._call("/v1/work/ended-runs", EndedRuns, query).run_ids) & set(query.run_ids)

    def download(
        self,
        digest: str,
        destination: Path,
        max_bytes: int | None = None,
        on_bytes: OnBytes = lambda count: None,
        on_size: OnSize = lambda size: None,
    ) -> None:
        """Download an artifact to a file that appears only when complete. Bytes from an earlier process are kept.

        `on_size` receives its size before its bytes arrive, and `on_bytes` how much has arrived. An exception that they
        raise ends the download. Raises ArtifactTooLarge, DigestMismatch, NotFound.
        """
        path = f"/v1/artifacts/{digest}"
        download(
            self._connection,
            path,
            destination,
            digest=digest,
            max_bytes=max_bytes,
            on_bytes=on_bytes,
            on_size=on_size,
        )

    def upload(self, digest: str, source: Path, assignment_id: UUID, on_bytes: OnBytes = lambda count: None) -> int:
        """Upload an artifact from disk, and return how many bytes were sent, including those sent again.

        It is not an error if the coordinator already has it. `on_bytes` receives how much was sent; an exception that
        it raises ends the upload, which may be continued. Raises Rejected, LeaseLost.
        """
        return upload(self._connection, digest, source, assignment_id=assignment_id, on_bytes=on_bytes)

    def _read_offers(self, headers: Mapping[str, str]) -> None:
        self._pause_seconds = min(retry_after(headers) or 0.0, LONGEST_PAUSE_SECONDS)
        self._takes_resources = RESOURCES_HEADER in headers
        self._site_evaluations = headers.get(EVALUATIONS_HEADER)
        offer = headers.get(OFFER_HEADER, "")
        self._delivery_bytes = min(int(offer), DELIVERY_BYTES) if _OFFER.fullmatch(offer) else 0

    def _call(
        self,
        path: str,
        answer: type[M],
        body: BaseModel,
        *,
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> M:
        return self._connection.call(
            "POST", path, answer, body=body, timeout=timeout, retry=retry, max_bytes=_ANSWER_BYTES
        )

    def _about(self, assignment_id: UUID, answer: Submitted) -> Submitted:
        if answer.assignment_id != assignment_id:
            raise BadAnswer(f"the coordinator answered about {answer.assignment_id}, but was asked for {assignment_id}")
        return answer
