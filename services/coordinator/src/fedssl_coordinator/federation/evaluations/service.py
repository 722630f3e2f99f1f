"""Evaluations, as far as they differ from other jobs. Everything here is quick: the aggregator evaluates.

An evaluation's state changes under the lock of its own row, never its run's: no round ever waits for an evaluation.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.chance import Chance
from fedssl.protocol.evaluation import JudgingConfig, Measure
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import JobState
from fedssl.protocol.views import EvaluationCreate, EvaluationView, Results
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Evaluation, EvaluationDataset, Run
from fedssl_coordinator.core.problems import ProblemError, printable
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation import evaluable, retries, run_rows
from fedssl_coordinator.federation.evaluations import repository
from fedssl_coordinator.federation.jobs import repository as job_rows
from fedssl_coordinator.federation.jobs import service as jobs
from fedssl_coordinator.federation.jobs.service import StartedJob
from fedssl_coordinator.federation.site_evaluations import service as site_evaluations
from fedssl_coordinator.federation.transitions import about, transition
from fedssl_coordinator.storage.datasets import service as datasets

_PERCENTAGES = ("probe", "knn")  # the results that are shown in percent


def queue_due(session: Session, run: Run, round_number: int) -> None:
    """Queue what the run's spec asks for after this round, whose weights are the newest.

    The caller holds the run's lock.
    """
    spec = spec_of(run)
    config = spec.evaluation
    if config is None or not config.is_due(round_number, run.num_rounds):
        return
    if (why := evaluable.why_impossible(run)) is None:
        if spec.central_evaluation is not None:
            _queue(session, run, round_number, _own_config(spec))
        if spec.site_evaluation is not None and round_number > 0:
            site_evaluations.offer(session, run, round_number, spec)
    elif round_number == 0 or not config.every:  # one event is enough
        record(session, "evaluation.impossible", why, run_id=run.id, round_number=round_number)


def ask_sites_before_training(session: Session, run: Run, spec: RunSpec) -> None:
    """Offer the evaluation of the first weights to the sites, if the spec asks for it. The caller holds the run's lock.

    This happens when the first round opens: when the weights are created, no client may have registered yet.
    """
    config = spec.site_evaluation
    if config is not None and config.is_due(0, run.num_rounds) and evaluable.why_impossible(run) is None:
        site_evaluations.offer(session, run, 0, spec)


def request(session: Session, run_id: UUID, asked: EvaluationCreate) -> tuple[EvaluationView, bool]:
    """Queue the evaluation of a round's encoder, or queue one again that failed or was cancelled.

    Returns False with the evaluation if it was queued before. Raises ProblemError if the run, the round or the data set
    does not exist, or if there is nothing to evaluate.
    """
    run = run_rows.require(session, run_id)
    number = evaluable.require_closed(run, asked.round_number)
    if spec_of(run).model.batch_norm == "local":
        detail = (
            f"each site of run {run_id} keeps its own BatchNorm, and the coordinator's encoder has the initial one: "
            "only the sites can evaluate it"
        )
        raise ProblemError("conflict", detail)
    row, is_new = _queue(session, run, number, _in_order(asked.config))
    if not is_new and row.state in (JobState.FAILED, JobState.CANCELLED):
        is_new = _queue_again(session, row)
    return show(session, row.id), is_new


def begin(session: Session, evaluation_id: UUID) -> StartedJob[Evaluation] | None:
    """Count an attempt at an evaluation whose lock the caller holds. Returns None if there is nothing to do now."""
    row = job_rows.locked(session, Evaluation, evaluation_id)
    if row is not None and row.state in job_rows.UNFINISHED and retries.is_quarantined(row):
        reason = f"{retries.quarantine_reason(row, 'the evaluation')}, and request it again"
        jobs.end(session, row, JobState.FAILED, f"{_where(row)}: {reason}", reason=reason)
        return None
    started = None if row is None else jobs.begin(session, row, f"{_where(row)}: the evaluation begins")
    if started is None:
        return None
    if started.is_resumed and started.is_reported:
        done = ", ".join(_formatted(results_so_far(started.job)))
        message = f"continues after {done}" if done else "starts again"
        record(session, "evaluation.resumed", message, **about(started.job))
    enqueue.wake_watchers(session)
    return started


def map_before(session: Session, row: Evaluation) -> dict[str, Any] | None:
    """Return the map of an earlier round that this evaluation's map is aligned with, if there is one."""
    return repository.map_before(session, row) if row.config.get("embedding_map") else None


def results_so_far(row: Evaluation) -> Results:
    """Return the results of the measures that are done, from all attempts."""
    return dict((row.progress or {}).get("results", {}))


def complete(
    session: Session,
    evaluation_id: UUID,
    results: Results,
    chance: Chance | None = None,
    embedding_map: Mapping[str, Any] | None = None,
) -> None:
    """End an evaluation with its results, unless it was cancelled, and add them to the metrics of the round.

    A round has one metric of each name: that of the run's own spec, or else that of the first evaluation on request.
    """
    row = jobs.running(session, Evaluation, evaluation_id)
    if row is None:
        return
    message, data = f"{_where(row)}: {_summary(results)}", {"dataset": row.dataset, "results": results}
    kept: dict[str, Any] = {} if embedding_map is None else {"embedding_map": dict(embedding_map)}
    kept["chance"] = None if chance is None else asdict(chance)
    jobs.end(session, row, JobState.COMPLETED, message, data, results=results, reason=None, **kept)
    spec = spec_of(run_rows.get_one(session, row.run_id))
    is_own = spec.central_evaluation is not None and row.config == _dumped(_own_config(spec))
    known = {f"evaluation/{name}": value for name, value in results.items() if value is not None}
    repository.add_metrics(session, row.run_id, row.round_number, known, replace=is_own)


def fail(session: Session, evaluation_id: UUID, reason: str) -> None:
    """End an evaluation that can never succeed, unless it was cancelled."""
    if (row := jobs.running(session, Evaluation, evaluation_id)) is not None:
        jobs.end(session, row, JobState.FAILED, f"{_where(row)}: {reason}", reason=printable(reason))


def cancel(session: Session, evaluation_id: UUID) -> EvaluationView:
    """Cancel an evaluation. Does nothing if it was cancelled before. Raises ProblemError."""
    row = jobs.locked(session, Evaluation, evaluation_id)
    if jobs.is_cancelled(row):
        return view(row)
    reason = "cancelled by an operator"
    jobs.end(session, row, JobState.CANCELLED, f"{_where(row)}: {reason}", reason=reason)
    return show(session, evaluation_id)


def show(session: Session, evaluation_id: UUID) -> EvaluationView:
    """Return the view of an evaluation. Raises ProblemError if it does not exist."""
    return view(jobs.get(session, Evaluation, evaluation_id))


def view(row: Evaluation) -> EvaluationView:
    """Return what the API shows of an evaluation."""
    return EvaluationView.model_validate(row, from_attributes=True)


def _queue(session: Session, run: Run, number: int, config: JudgingConfig) -> tuple[Evaluation, bool]:
    found = datasets.of_project(session, EvaluationDataset, run.project, config.dataset)
    if found is None:
        raise _invalid(
            f"no evaluation data set {config.dataset} is registered: register it "
            "(`fedssl evaluation-dataset add NAME SOURCE`) and give its name"
        )
    if (why := datasets.why_unfit(found.name, spec_of(run).data)) is not None:
        raise _invalid(f"{why}; or use `fedssl evaluate` where the files are")
    model = run_rows.weights_after(session, run, number)
    evaluable.require_kept(session, model, number)
    row, is_new = repository.add(
        session,
        run_id=run.id,
        round_number=number,
        model=model,
        dataset=found.name,
        dataset_digest=found.digest,
        config=_dumped(config),
    )
    if is_new:
        record(session, "evaluation.queued", f"{_where(row)}: {', '.join(config.measures)}", **about(row))
        enqueue.evaluate(session, row.id)
        enqueue.wake_watchers(session)
    return row, is_new


def _invalid(message: str) -> ProblemError:
    detail = f"nothing was changed; correct this and send it again: config.dataset: {message}"
    return ProblemError("invalid-request", detail, errors=[{"loc": ["config", "dataset"], "msg": message}])


def _queue_again(session: Session, row: Evaluation) -> bool:
    values: dict[str, Any] = {
        "reason": None,
        "finished_at": None,
        "num_tries": 0,
        "num_deaths": 0,
        "sent_at": func.now(),
    }
    won = transition(session, row, JobState.QUEUED, f"{_where(row)}: queued again", **values)
    enqueue.evaluate(session, row.id)
    enqueue.wake_watchers(session)
    return won


def _own_config(spec: RunSpec) -> JudgingConfig:
    """Return the evaluation that the run's own spec asks for."""
    assert spec.central_evaluation is not None
    values = spec.central_evaluation.model_dump(exclude={"every", "at", "sites"})
    return _in_order(JudgingConfig.model_validate(values))


def _in_order(config: JudgingConfig) -> JudgingConfig:
    """Return the config with its measures in a fixed order, so that equal evaluations are found."""
    return config.model_copy(update={"measures": tuple(m for m in get_args(Measure) if m in config.measures)})


def _dumped(config: JudgingConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _where(row: Evaluation) -> str:
    when = f"round {row.round_number}" if row.round_number else "before training"
    return f"{when}, on {row.dataset}"


def _summary(results: Results) -> str:
    if all(value is None for value in results.values()):  # a single test image has no uniformity
        return "the encoder's outputs are not all finite numbers, so its training has diverged"
    return ", ".join(f"{name} {shown}" for name, shown in _formatted(results).items())


def _formatted(results: Results) -> dict[str, str]:
    """Return the finite results as text, accuracies first: Postgres does not keep the order of JSON's keys."""
    names = [name for name in _PERCENTAGES if name in results] + sorted(results.keys() - set(_PERCENTAGES))
    known = {name: value for name in names if (value := results[name]) is not None}
    return {name: f"{100 * v:.2f} %" if name in _PERCENTAGES else f"{v:.4g}" for name, v in known.items()}
