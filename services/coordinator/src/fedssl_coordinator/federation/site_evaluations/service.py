"""Offers evaluations to the sites and keeps their answers.

There is no lease, because no round waits for a site: an evaluation stays offered until its client answers. Counts stay;
a refusal stays until an operator requests the evaluation again.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.evaluation.site_results import unusable_counts
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.methods.site_labels import SiteLabelsConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts, SiteHead
from fedssl.protocol.site_work import SiteAnswer, SiteAnswered, SiteEvaluationItem
from fedssl.protocol.states import SiteEvaluationState
from fedssl.wording import plural
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Client, Run, SiteEvaluation
from fedssl_coordinator.core.problems import AuditEvent, ProblemError, printable
from fedssl_coordinator.core.run_documents import NewerSpecError, plan_of, spec_of
from fedssl_coordinator.federation import evaluable, run_rows
from fedssl_coordinator.federation.site_evaluations import repository
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.identity import clients
from fedssl_coordinator.storage.artifacts import repository as artifacts


def offer(session: Session, run: Run, round_number: int, spec: RunSpec) -> None:
    """Offer the evaluation of a round to every client of the run, whether or not it took part in the round."""
    eligible = clients.eligible(session, run.project, spec.cohort.clients)
    if eligible:
        _offer(session, run, round_number, run_rows.weights_after(session, run, round_number), eligible)


def request(session: Session, run_id: UUID, asked: int | None) -> tuple[int, bool]:
    """Offer the evaluation of a closed round, by default the newest, to every client of the run that has no counts yet.

    A client that refused it before, or missed it, is asked again. Returns the round, and False if every client has
    answered or was asked before. Raises ProblemError if there is nothing to evaluate, or no client to ask.
    """
    run = run_rows.require(session, run_id)
    spec = spec_of(run)
    if spec.site_evaluation is None:
        detail = (
            f'run {run_id} has no evaluation at the sites: that needs evaluation.at = "sites" or "both", and the names '
            "of the classes (evaluation.sites.classes), in the spec of a run before it is submitted"
        )
        raise ProblemError("conflict", detail)
    number = evaluable.require_closed(run, asked)
    eligible = clients.eligible(session, run.project, spec.cohort.clients)
    if not eligible:
        raise ProblemError("conflict", f"no client of run {run_id} has registered: there is no site to ask")
    model = run_rows.weights_after(session, run, number)
    evaluable.require_kept(session, model, number)
    is_new = _offer(session, run, number, model, eligible)
    return number, _offer_again(session, run, number, eligible) or is_new


def _offer(session: Session, run: Run, round_number: int, model: str, client_ids: Sequence[str]) -> bool:
    """Offer an evaluation to clients. Returns whether one of them was not asked before."""
    offered = repository.offer(session, run.id, round_number, model, client_ids)
    if not offered:
        return False
    message = f"{_when(round_number)}: offered to {plural(len(offered), 'site')}"
    data = {"clients": list(offered)}
    record(session, "site_evaluations.offered", message, run_id=run.id, round_number=round_number, data=data)
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)
    return True


def _offer_again(session: Session, run: Run, round_number: int, client_ids: Sequence[str]) -> bool:
    rows = repository.locked_without_counts(session, run.id, round_number, client_ids)
    for row in rows:
        text = f"{row.client_id}, {_when(round_number)}: asked again"
        values: dict[str, Any] = {"reason": None, "ended_at": None, "created_at": func.now()}
        won = transition(session, row, SiteEvaluationState.OFFERED, text, **values)
        assert won, "the row is locked"
    if rows:
        enqueue.wake_workers(session)
        enqueue.wake_watchers(session)
    return bool(rows)


def claim(session: Session, client_id: str) -> SiteEvaluationItem | None:
    """Return the client's oldest evaluation that it has not answered, or None. Repeated calls return the same one."""
    while (found := repository.oldest_offered(session, client_id)) is not None:
        row, run = found
        if not artifacts.hold(session, row.model):
            _expire(session, row, "the weights were removed before this site answered")
            continue
        try:
            return _item(session, row, run)
        except NewerSpecError as error:
            _expire(session, row, error.detail)
    return None


def answer(session: Session, client_id: str, given: SiteAnswer) -> SiteAnswered:
    """Store a site's counts or its refusal. The same answer again gets the same reply. Raises ProblemError."""
    row, run, client = _locked_own(session, client_id, given)
    if row.state != SiteEvaluationState.OFFERED:
        return _answered_before(row, given)
    config = spec_of(run).site_evaluation
    assert config is not None, "only such runs have evaluations at the sites"
    if given.counts is None:
        reason = printable(given.refusal or "")
        _end(session, row, SiteEvaluationState.REFUSED, reason, reason=reason)
    else:
        _require_usable(row, client, given.counts, config)
        counts, head = given.counts, _usable_head(row, given, config)
        message = f"{plural(counts.num_test, 'test image')} of {plural(len(counts.classes), 'class', 'classes')}"
        values = {"counts": counts.model_dump(mode="json"), "head": head, "reason": _why_no_head(given)}
        _end(session, row, SiteEvaluationState.COMPLETED, message, **values)
        if row.head_of is None and config.site_config.cross_site is not None:
            _pair(session, row, run.project, has_head=head is not None)
    return SiteAnswered(evaluation_id=given.evaluation_id, state=SiteEvaluationState(row.state))


def _pair(session: Session, row: SiteEvaluation, project: str, *, has_head: bool) -> None:
    """Offer this site's classifier to the sites that have counts of the round, and theirs to this site."""
    repository.lock_round(session, row.run_id, row.round_number)
    others = repository.completed(session, row.run_id, row.round_number)
    others.pop(row.client_id)
    given = [(owner, [row.client_id]) for owner, has_sent in others.items() if has_sent]
    if has_head and (judges := clients.eligible(session, project, list(others))):  # without revoked ones
        given.append((row.client_id, judges))
    for owner, judges in given:
        repository.offer(session, row.run_id, row.round_number, row.model, judges, owner)
    if given:
        enqueue.wake_workers(session)


def _usable_head(row: SiteEvaluation, given: SiteAnswer, config: EvaluationConfig) -> dict[str, Any] | None:
    """Return a site's own classifier, if it sends one. Raises ProblemError if the run does not ask for this one."""
    if given.head is None:
        return None
    assert given.counts is not None, "validated by the answer"
    if config.site_config.cross_site is None or row.head_of is not None:
        raise _refusal(row, "invalid-request", f"{row.client_id}: this evaluation asks for no classifier: leave it out")
    if given.head.classes != given.counts.classes:
        detail = f"{row.client_id}: its classifier is of the classes {given.head.classes}, and its counts of others"
        raise _refusal(row, "invalid-request", detail)
    return given.head.model_dump(mode="json")


def _why_no_head(given: SiteAnswer) -> str | None:
    return None if given.no_head is None else f"no classifier for the other sites: {printable(given.no_head)}"


def expire_of_client(session: Session, client_id: str, reason: str) -> None:
    """End what is offered to a client that will never answer."""
    for row in repository.locked_offered(session, client_id):
        _expire(session, row, reason)


def _item(session: Session, row: SiteEvaluation, run: Run) -> SiteEvaluationItem:
    say_about(run=str(run.id), round=row.round_number)
    spec, newest = spec_of(run), None
    has_head = isinstance(spec.method, SiteLabelsConfig) and spec.method.has_personal_heads and row.head_of is None
    if has_head or spec.model.batch_norm == "local":
        newest = run_rows.newest_accepted(session, run, row.client_id, row.round_number)
    head = None if row.head_of is None else SiteHead.model_validate(repository.head(session, row))
    return SiteEvaluationItem(
        evaluation_id=row.id,
        run_id=run.id,
        round_number=row.round_number,
        client_id=row.client_id,
        spec=spec,
        method_version=run.method_version,
        plan=plan_of(run),
        broadcast=row.model,
        last_accepted=newest,
        head=head,
        head_of=row.head_of,
    )


def _locked_own(session: Session, client_id: str, given: SiteAnswer) -> tuple[SiteEvaluation, Run, Client]:
    """Return what the answer is about, locked. Raises ProblemError if it is not this client's, or of another round."""
    found = repository.locked(session, given.evaluation_id, client_id)
    if found is None:
        detail = f"{client_id} has no evaluation {given.evaluation_id}: claim one and use the id that it carries"
        event = AuditEvent("site_evaluation.foreign", detail, client_id=client_id)
        raise ProblemError("not-found", detail, audit_event=event)
    row = found[0]
    say_about(run=str(row.run_id), round=row.round_number)
    if row.round_number != given.round_number:
        detail = (
            f"evaluation {row.id} is of round {row.round_number}, and this answer of round {given.round_number}: "
            "answer the evaluation that was claimed"
        )
        raise _refusal(row, "invalid-request", detail)
    return found


def _answered_before(row: SiteEvaluation, given: SiteAnswer) -> SiteAnswered:
    """Return the reply to an answer that was given before. Raises ProblemError if this is another one."""
    counts = None if given.counts is None else given.counts.model_dump(mode="json")
    head = None if given.head is None else given.head.model_dump(mode="json")
    reason = _why_no_head(given) if given.refusal is None else printable(given.refusal)
    if row.state != SiteEvaluationState.EXPIRED and (row.counts, row.head, row.reason) == (counts, head, reason):
        return SiteAnswered(evaluation_id=row.id, state=SiteEvaluationState(row.state))
    why = f" ({row.reason})" if row.reason else ""
    detail = f"{_when(row.round_number)}: the evaluation is already {row.state}{why} and stays so: claim the next one"
    raise _refusal(row, "conflict", detail)


def _require_usable(row: SiteEvaluation, client: Client, counts: SiteCounts, config: EvaluationConfig) -> None:
    """Raise ProblemError if these cannot be the counts of this site's images."""
    cross_site = config.site_config.cross_site
    measures = config.site_measures if row.head_of is None or cross_site is None else [cross_site]
    if (why := unusable_counts(counts, config.site_config, measures)) is not None:
        raise _refusal(row, "invalid-request", f"{row.client_id}: {why}")
    num_images = counts.num_train + counts.num_test
    if client.num_images is None or num_images > client.num_images:
        registered = "keeps their number" if client.num_images is None else f"registered {client.num_images}"
        detail = (
            f"{row.client_id} counts {num_images} images, and {registered}: register again, with the number of images"
        )
        raise _refusal(row, "invalid-request", detail)


def _refusal(row: SiteEvaluation, slug: str, detail: str) -> ProblemError:
    data = {"site_evaluation": str(row.id)}
    event = AuditEvent("site_evaluation.answer_refused", detail, row.run_id, row.round_number, row.client_id, data)
    return ProblemError(slug, detail, audit_event=event)


def _expire(session: Session, row: SiteEvaluation, reason: str) -> None:
    _end(session, row, SiteEvaluationState.EXPIRED, reason, reason=reason)


def _end(session: Session, row: SiteEvaluation, state: SiteEvaluationState, message: str, **values: Any) -> None:
    text = f"{row.client_id}, {_when(row.round_number)}: {message}"
    won = transition(session, row, state, text, ended_at=func.now(), **values)
    assert won, "the row is locked"
    enqueue.wake_watchers(session)


def _when(round_number: int) -> str:
    return f"round {round_number}" if round_number else "before training"
