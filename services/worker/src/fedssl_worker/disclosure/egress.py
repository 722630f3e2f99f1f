"""The one way out: every artifact and metric that leaves this machine is checked and recorded in the ledger here."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog

from fedssl.artifacts.finite import check_finite
from fedssl.artifacts.header import Header, check_header, file_bytes, read_header
from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import load_tensors
from fedssl.client import NotFound, WorkerClient
from fedssl.engine.secure_sums import context_of, tensors_sent
from fedssl.engine.summed_metrics import MEANS, WATCHED
from fedssl.engine.unusual_updates import NUM_EXAMPLES
from fedssl.errors import ArtifactError, DigestMismatch
from fedssl.evaluation.monitoring import CLIPPED, crossed_name
from fedssl.evaluation.site import SiteEvaluation
from fedssl.methods import METHODS
from fedssl.methods.objectives.ridge_probe import GRAM, HELD_OUT, MOMENT
from fedssl.methods.site_data import wants_site_labels
from fedssl.protocol.data_card import DataReport
from fedssl.protocol.ledger import AnchorReceipt, LedgerAnchor, SentBroadcast
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.secure_work import SecureMessage, SecureReveals, SecureVector
from fedssl.protocol.site_evaluation import SiteCounts
from fedssl.protocol.site_work import SiteAnswer, SiteAnswered, SiteEvaluationItem
from fedssl.protocol.work import (
    SHORT_TEXT_CHARACTERS,
    CheckNumbers,
    Metrics,
    Progress,
    Registered,
    Resources,
    Submit,
    Submitted,
    WorkItem,
)
from fedssl.secure_aggregation import OwnerLimits
from fedssl_worker.disclosure.anchoring import Anchoring
from fedssl_worker.disclosure.ledger import CROSS_EVALUATION, EVALUATION, SITE_HEAD, Ledger, LedgerEntry, LedgerError
from fedssl_worker.disclosure.policy import NotPermitted, PolicyEnforcer
from fedssl_worker.state import Finished

log = structlog.get_logger()

SUMMED = sorted((NUM_EXAMPLES, CLIPPED, *MEANS, *map(crossed_name, WATCHED)))
"""The names of the numbers that are words of a masked vector, in addition to those of the update."""

_RESTORED = "the worker's folder `secure` was deleted, or restored from a copy"


class Egress:
    """Sends only what the method's plan declares and the data owner's policy permits."""

    def __init__(self, client: WorkerClient, ledger: Ledger, enforcer: PolicyEnforcer | None = None) -> None:
        self._client = client
        self._ledger = ledger
        self._enforcer = enforcer or PolicyEnforcer(None, client.url)
        self.anchoring = Anchoring(ledger)
        self._delivers = True  # until a proxy or an older coordinator refuses a delivery

    def register(self, register: Callable[[dict[str, Any]], Registered], numbers: CheckNumbers | None = None) -> str:
        """Register with the policy and an anchor, and return the client whose worker this is.

        Args:
            register: sends a registration that has these fields of `Register`.
            numbers: what `fedssl-worker check` has measured. It leaves as far as the policy permits it.

        Raises PolicyError if the policy is another client's.
        """
        with self.anchoring.exchange(always=True) as exchange:
            check = None if numbers is None else self._enforcer.permitted_check(numbers)
            news = {"policy": self._enforcer.notice, "anchor": exchange.anchor, "check": check}
            registered = register(news | self._enforcer.kept_numbers)
            exchange.receipt = registered.receipt
        self._enforcer.require_client(registered.client_id)
        return registered.client_id

    def reload(self) -> bool:
        """Read the policy again, between two assignments, and return whether it has changed. Raises PolicyError."""
        if not self._enforcer.reload():
            return False
        try:
            self._ledger.change_policy(self._enforcer.digest, self._enforcer.ledger)
        except LedgerError as error:  # recorded before the next entry, without which nothing leaves
            log.error("ledger.policy_not_recorded", reason=str(error))
        return True

    def require_permitted(self, item: WorkItem) -> None:
        """Raise NotPermitted if the update could not leave. Called before anything is fetched or trained.

        Raises LedgerError if the ledger's last write failed, and it still cannot be used.
        """
        self._ledger.require_open()
        with self._refusals(_work_fields(item)):
            self._enforcer.require_permitted(item)
            if self._enforcer.total_limits is not None:
                self._require_within_totals(item, file_bytes(_tensors_sent(item)))

    def permitted_progress(self, item: WorkItem, progress: Progress) -> Progress:
        """Return the progress without the metrics that may not leave."""
        return self._enforcer.permitted_progress(item, progress)

    def permitted_resources(self, item: WorkItem, resources: Resources) -> Resources | None:
        """Return the numbers about this machine that may leave, or None if none may or the coordinator reads none."""
        return self._enforcer.permitted_resources(item, resources) if self._client.takes_resources else None

    def permitted_metrics(self, item: WorkItem, metrics: Metrics) -> Metrics:
        """Return the metrics that may leave."""
        return self._enforcer.permitted_metrics(item, metrics)

    def send(
        self,
        item: WorkItem,
        update: Path,
        digest: str,
        numbers: Mapping[str, float] | None = None,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Check an update, record it in the ledger, then send it, without submitting it.

        The ledger's entry `intent` is written before the first byte leaves, and `sent`, with the number of bytes
        including repeated ones, once the update has arrived. An update with an `intent` and without a `sent` may have
        left in whole, in part or not at all. A later attempt continues the transfer and writes an `intent` of its own.

        Args:
            numbers: the metrics that will be submitted with the update; the entry contains them.
            on_bytes: receives the number of bytes sent so far, and may raise Cancelled.

        Raises PlanMismatch, NotFinite, DigestMismatch, ArtifactError, NotPermitted or LedgerError before the first byte
        has left, and ClientError.
        """
        intent, about = self._intend(item, update, digest, numbers or {})
        num_sent = self._client.upload(digest, update, item.assignment_id, on_bytes)
        self._ledger.append("sent", **about, intent=intent.seq, sent_bytes=num_sent)

    def deliver(
        self, item: WorkItem, finished: Finished, on_bytes: Callable[[int], None] = lambda count: None
    ) -> Submitted:
        """Send an update as `send` does, and submit it, with the metrics that may leave.

        A small update and its submission are one request, if the coordinator takes that. Raises what `send` raises.
        """
        numbers = self.permitted_metrics(item, finished.metrics)
        numbers["num_examples"] = finished.num_examples
        if self._delivers and finished.update.stat().st_size <= self._client.delivery_bytes:
            if (answer := self._deliver_at_once(item, finished, numbers, on_bytes)) is not None:
                return answer
            self._delivers = False
            log.warning("delivery.refused", todo="updates are uploaded and submitted in requests of their own")
        self.send(item, finished.update, finished.digest, numbers, on_bytes)
        return self.submit(item, finished)

    def _deliver_at_once(
        self, item: WorkItem, finished: Finished, numbers: Mapping[str, float], on_bytes: Callable[[int], None]
    ) -> Submitted | None:
        """Send and submit in one request. Returns None if a proxy or an older coordinator refused this request."""
        intent, about = self._intend(item, finished.update, finished.digest, numbers)
        with self.anchoring.exchange(always=True) as exchange:
            submission = self._submission(item, finished, exchange.anchor)
            delivery = self._client.deliver(submission, finished.update, on_bytes)
            if delivery.submitted is None:
                exchange.anchor = None  # there was no response
                return None
            self._note_delivered(**about, intent=intent.seq, sent_bytes=delivery.num_sent)
            exchange.receipt = _checked(item, delivery.submitted.receipt)
        return delivery.submitted

    def _note_delivered(self, **fields: Any) -> None:
        try:
            self._ledger.append("sent", **fields)
        except LedgerError as error:  # the update is accepted already; the next one does not leave without an entry
            log.error("ledger.delivery_not_recorded", reason=str(error))

    def _intend(
        self, item: WorkItem, update: Path, digest: str, numbers: Mapping[str, float]
    ) -> tuple[LedgerEntry, dict[str, Any]]:
        """Check an update, and write the entry `intent`. Return it, with the fields that it shares with `sent`."""
        if item.spec.secure_aggregation is not None:
            raise NotPermitted("the update of a secure round may only leave as a masked vector")
        with self._refusals({**_work_fields(item), "digest": digest}):
            header = self._require_may_leave(item, update, digest)
            self._require_within_totals(item, header.total_bytes, digest)
        about = {**_work_fields(item), "digest": digest, "bytes": header.total_bytes}
        fields = {**_update_fields(item, header, numbers), "reported": self._enforcer.reportable(item)}
        return self._ledger.append("intent", **about, **fields), about

    def _require_may_leave(self, item: WorkItem, update: Path, digest: str) -> Header:
        """Return the header of an update that the plan declares and the policy permits. Raises ArtifactError and
        NotPermitted for any other."""
        header = check_update(update, item.plan)
        if digest_of(update) != digest:
            raise DigestMismatch("the update's file changed after it was trained: it is not sent")
        self._enforcer.require_permitted(item)
        num_summed, num_held_out = _numbers_of_images(update, item)
        if num_summed is not None:
            self._enforcer.require_enough_images(item, num_summed)
        self._enforcer.require_enough_held_out(item, num_held_out)
        return header

    def send_masked(
        self, item: WorkItem, finished: Finished, masked: Path, message: SecureVector, sum_of: Mapping[str, Any]
    ) -> None:
        """Check an update, record it in the ledger, then send its masked vector instead of it.

        The tensors that the method sends separately per client (`RunSpec.sent_apart`) are in the same file, without
        masks, and the entry names them.

        Args:
            masked: the file of the masked vector, whose digest `message` has.
            sum_of: the clients in the sum, for the ledger.

        Raises what `send` raises.
        """
        with self._refusals({**_work_fields(item), "digest": message.update}):
            header = self._require_may_leave(item, finished.update, finished.digest)
            self._require_within_totals(item, masked.stat().st_size, message.update)
            if self._ledger.totals().has_other_update(item, message.update):
                raise NotPermitted(f"another masked vector of round {item.round_number} has left before: {_RESTORED}")
        about = {**_work_fields(item), "digest": message.update, "bytes": masked.stat().st_size}
        fields = {**_update_fields(item, header, {}), "reported": [], "summed": SUMMED, **sum_of}
        if apart := item.spec.sent_apart(item.plan):
            fields["without_masks"] = sorted(tensor.name for tensor in apart)
        intent = self._ledger.append("intent", **about, **fields)
        num_sent = self._client.upload(message.update, masked, item.assignment_id)
        self.send_secure(item, message)
        self._note_delivered(**about, intent=intent.seq, sent_bytes=num_sent)

    def send_secure(self, item: WorkItem, message: SecureMessage, sum_of: Mapping[str, Any] | None = None) -> None:
        """Send a message of secure aggregation. What it reveals is recorded in the ledger before. Raises ClientError,
        and LedgerError and NotPermitted before the first byte has left."""
        if isinstance(message, SecureReveals):
            revealed = {"own_masks": sorted(message.self_shares), "mask_keys": sorted(message.mask_shares)}
            if self._ledger.totals().has_other_shares(item, **revealed):
                raise self.refuse_secure(
                    item, f"other shares were revealed in round {item.round_number} before: {_RESTORED}"
                )
            self._ledger.append("revealed", **_work_fields(item), **revealed, **(sum_of or {}))
        self._client.send_secure(item.assignment_id, message)

    @property
    def secure_limits(self) -> OwnerLimits:
        """The demands of the data owner on a secure round."""
        rules = self._enforcer.secure_rules
        pins = None if rules.pins is None else {name: key.removeprefix("ed25519:") for name, key in rules.pins.items()}
        return OwnerLimits(rules.min_cohort, rules.collusion, pins)

    def refuse_secure(self, item: WorkItem, reason: str) -> NotPermitted:
        """Record why this worker refuses a request of a secure round, and return the error to raise."""
        self._ledger.append("refused", **_work_fields(item), reason=reason)
        return NotPermitted(f"secure aggregation: {reason}")

    def submit(self, item: WorkItem, finished: Finished) -> Submitted:
        """Submit an update that was sent, with the metrics that may leave. Raises ClientError."""
        with self.anchoring.exchange(always=True) as exchange:
            answer = self._client.submit(self._submission(item, finished, exchange.anchor))
            exchange.receipt = _checked(item, answer.receipt)
        return answer

    def _submission(self, item: WorkItem, finished: Finished, anchor: LedgerAnchor | None) -> Submit:
        return Submit(
            assignment_id=item.assignment_id,
            update=finished.digest,
            num_examples=finished.num_examples,
            metrics=self.permitted_metrics(item, finished.metrics),
            anchor=anchor,
        )

    def evaluation_min_count(self, item: SiteEvaluationItem) -> int:
        """Return the fewest images that a class needs to be counted in an evaluation.

        Raises NotPermitted if the counts could not leave. Called before anything is fetched or computed.
        """
        with self._refusals({**_work_fields(item), "artifact": [_artifact_of(item)]}):
            fewest = self._enforcer.evaluation_min_count(item)
            self._require_evaluation(item)
            return fewest

    def send_counts(self, item: SiteEvaluationItem, found: SiteEvaluation) -> SiteAnswered:
        """Record the counts of an evaluation in the ledger, then send them.

        The site's own classifier is sent with them if the policy permits it; otherwise the answer has the reason.
        Raises NotPermitted or LedgerError before the first byte has left, and ClientError.
        """
        counts, head, no_head = found
        body = counts.model_dump_json().encode()
        with self._refusals({**_content_fields(item, body), "artifact": [_artifact_of(item)]}):
            fewest = self._enforcer.evaluation_min_count(item, len(body))
            if counts.min_count < fewest:
                raise NotPermitted(f"the policy has changed: it counts classes with {fewest} images or more")
        answer = SiteAnswer(
            evaluation_id=item.evaluation_id, round_number=item.round_number, counts=counts, no_head=no_head
        )
        artifacts = [_artifact_of(item)]
        if head is not None:
            content = head.model_dump_json().encode()
            try:
                self._enforcer.require_head(item, len(content))
                answer, body = answer.model_copy(update={"head": head}), body + content
                artifacts.append(SITE_HEAD)
            except NotPermitted as refused:
                self._ledger.append("refused", **_work_fields(item), artifact=[SITE_HEAD], reason=str(refused))
                answer = answer.model_copy(update={"no_head": str(refused)[:SHORT_TEXT_CHARACTERS]})
        about = _content_fields(item, body)
        with self._refusals({**about, "artifact": [_artifact_of(item)]}):
            self._require_evaluation(item, about["digest"])
        shown = {**_shown_counts(counts), "tensors": [], "artifact": artifacts}
        intent = self._ledger.append("intent", **about, **shown, question=_question(item))
        answered = self._answer(answer)
        self._note_delivered(**about, intent=intent.seq, sent_bytes=len(body))
        return answered

    def send_report(self, report: DataReport) -> None:
        """Record the report about the images in the ledger, then send it. Older coordinators ignore it.

        An empty report, which makes the coordinator forget an earlier one, has no entry.
        Raises LedgerError before the first byte has left, and ClientError.
        """
        body = report.model_dump_json().encode()
        about = {"digest": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
        parts = {"statistics": report.card, "channel-sums": report.sums}
        numbers = [] if report.num_unreadable is None else [f"num_unreadable={report.num_unreadable}"]
        kinds = [kind for kind, part in parts.items() if part is not None]
        intent = None
        if kinds or numbers:
            intent = self._ledger.append("intent", **about, artifact=kinds, tensors=[], numbers=numbers)
        try:
            self._client.report_data(report)
        except NotFound:
            log.info("data_report.not_taken", reason="the coordinator is older")
            return
        if intent is not None:
            self._note_delivered(**about, intent=intent.seq, sent_bytes=len(body))

    def refuse_evaluation(self, evaluation_id: UUID, round_number: int, reason: str) -> SiteAnswered:
        """Report to the coordinator why this site does not evaluate a round. Raises ClientError."""
        refusal = reason[:SHORT_TEXT_CHARACTERS]
        return self._answer(SiteAnswer(evaluation_id=evaluation_id, round_number=round_number, refusal=refusal))

    def _answer(self, answer: SiteAnswer) -> SiteAnswered:
        with self.anchoring.exchange() as exchange:
            answered = self._client.answer_site_evaluation(answer.model_copy(update={"anchor": exchange.anchor}))
            exchange.receipt = answered.receipt
        return answered

    def _require_within_totals(self, item: WorkItem, num_bytes: int, digest: str | None = None) -> None:
        if (limits := self._enforcer.total_limits) is not None:
            self._ledger.totals().require_within(limits, item, num_bytes, digest)

    def _require_evaluation(self, item: SiteEvaluationItem, digest: str | None = None) -> None:
        if (most := self._enforcer.max_evaluations) is not None:
            self._ledger.totals().require_evaluation(self._enforcer.digest, most, _question(item), digest)

    @contextmanager
    def _refusals(self, about: Mapping[str, Any]) -> Iterator[None]:
        """Record why something may not leave. `about`: the fields of the entry that describe it."""
        try:
            yield
        except (ArtifactError, NotPermitted) as error:
            self._ledger.append("refused", **about, reason=str(error))
            raise


def _tensors_sent(item: WorkItem) -> tuple[TensorSpec, ...]:
    """Return the tensors in the file that leaves: those of the update, or in a secure round a masked vector."""
    if item.spec.secure_aggregation is None:
        return item.plan.update
    return tensors_sent(METHODS[item.spec.method.name], context_of(item))


def check_update(path: Path, plan: ArtifactPlan) -> Header:
    """Raise ArtifactError unless the file holds exactly the update that the plan declares, in finite numbers."""
    with path.open("rb") as file:
        header = read_header(file)
    check_header(header, plan.update, "update")
    if path.stat().st_size != header.total_bytes:
        raise ArtifactError("the update's file is longer or shorter than its tensors: it is not sent")
    check_finite(path, header)
    return header


def _checked(item: WorkItem, receipt: AnchorReceipt | None) -> AnchorReceipt | None:
    """Return the receipt, which is kept as evidence even if it names another broadcast than this client trained on."""
    expected = SentBroadcast(run=item.run_id, round=item.round_number, broadcast=item.broadcast)
    if receipt is None:
        return None
    if receipt.sent is None:
        reason = "the coordinator did not sign which weights it has sent: it is older, or hides them"
        log.warning("ledger.broadcast_unsigned", trained=expected.broadcast, reason=reason)
    elif receipt.sent != expected:
        log.error("ledger.broadcast_differs", trained=expected.broadcast, signed=receipt.sent.broadcast)
    return receipt


def _numbers_of_images(path: Path, item: WorkItem) -> tuple[int | None, int]:
    """Return the numbers of images in an update's sums of representations, and in its counts of right predictions.

    The first is None if it has no sums, or zeros; the second is 0 if it has no counts.
    """
    names = {tensor.name for tensor in item.plan.update if tensor.kind == "probe-sums"}
    has_sums, has_counts = names >= {GRAM, MOMENT}, HELD_OUT in names
    if not has_sums and not has_counts:
        return None, 0
    tensors = load_tensors(path)
    num_summed, num_held_out = None, 0
    if has_sums and bool(tensors[GRAM].any() | tensors[MOMENT].any()):
        num_summed = int(tensors[GRAM][-1, -1])
    if has_counts:
        config = wants_site_labels(item.spec)
        per_image = tensors[MOMENT].shape[1] if config is not None and config.multi_label else 1
        num_held_out = int(tensors[HELD_OUT]) // per_image
    return num_summed, num_held_out


def _work_fields(item: WorkItem | SiteEvaluationItem) -> dict[str, Any]:
    """Return the fields of an entry that describe the work. `initial`: the digest of the weights that the run started
    from, if these were not random."""
    fields: dict[str, Any] = {"run": str(item.run_id), "round": item.round_number, "method": item.spec.method.name}
    initial = item.spec.model.initial
    if initial is not None and initial.digest is not None:
        fields["initial"] = initial.digest
    return fields


def _artifact_of(item: SiteEvaluationItem) -> str:
    """Return the kind of the counts that answer an evaluation: of this site's own classifiers, or of another site's."""
    return EVALUATION if item.head is None else CROSS_EVALUATION


def _question(item: SiteEvaluationItem) -> str:
    """Return a digest of everything that an evaluation is about: the encoder, the spec, the classifier."""
    return hashlib.sha256(item.model_dump_json(exclude={"evaluation_id"}).encode()).hexdigest()


def _content_fields(item: SiteEvaluationItem, body: bytes) -> dict[str, Any]:
    """Return the fields of an entry that describe an answer. `head_of`: the site whose classifier was evaluated."""
    fields = {**_work_fields(item), "digest": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
    return fields if item.head_of is None else {**fields, "head_of": item.head_of}


def _shown_counts(counts: SiteCounts) -> dict[str, Any]:
    """Return the fields of an entry that describe an evaluation. The digest identifies the rest."""
    found = {
        "classes": len(counts.classes),
        "measures": "+".join(counts.measures),
        "min_count": counts.min_count,
        "num_test": counts.num_test,
        "num_train": counts.num_train,
    }
    return {"numbers": [f"{name}={value}" for name, value in found.items()]}


def _update_fields(item: WorkItem, header: Header, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of an entry that describe the update. Metrics are text: the canonical form has no fractions."""
    return {
        "artifact": sorted({tensor.kind for tensor in item.plan.update}),
        "tensors": sorted(entry.name for entry in header.entries),
        "numbers": [f"{name}={numbers[name]!r}" for name in sorted(numbers)],
    }
