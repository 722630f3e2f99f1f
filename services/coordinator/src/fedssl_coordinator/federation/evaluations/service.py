"""Evaluations, from the queue to their end. Everything here is quick; what judges is in `compute`.

Whoever changes an evaluation's state holds its row's lock, and none of its run's: no round ever waits for one. How far
a running one has come is written by the one process that works on it, which holds the evaluation's own lock meanwhile.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, get_args
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.evaluation import JudgingConfig, Measure
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import JobState
from fedssl.protocol.views import EvaluationCreate, EvaluationView, Results
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Evaluation, EvaluationDataset, Run
from fedssl_coordinator.core.problems import ProblemError, printable
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.federation import retries
from fedssl_coordinator.federation.evaluations import repository
from fedssl_coordinator.federation.evaluations.repository import UNFINISHED
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.runs import repository as runs
from fedssl_coordinator.federation.transitions import about, transition
from fedssl_coordinator.storage.artifacts import repository as artifacts
from fedssl_coordinator.storage.datasets import repository as datasets

_ENCODER = "encoder."
_SHARES = ("probe", "knn")  # results that people read in percent


class Begun(NamedTuple):
    """An evaluation to work on."""

    run: Run
    evaluation: Evaluation
    map_before: dict[str, Any] | None


def lock_name(evaluation_id: UUID) -> str:
    """The lock that whoever works on an evaluation holds."""
    return f"{repository.LOCK}{evaluation_id}"


def queue_due(session: Session, run: Run, round_number: int) -> None:
    """What the run's spec asks for after this round, whose weights are the newest. The caller holds the run's lock."""
    spec = RunSpec.model_validate(run.spec)
    config = spec.evaluation
    if config is None or not config.is_due(round_number, run.num_rounds):
        return
    if (why := _not_judgeable(run)) is None:
        _queue(session, run, round_number, _own_config(spec))
    elif round_number == 0 or not config.every:  # once is enough
        record(session, "evaluation.impossible", why, run_id=run.id, round_number=round_number)


def request(session: Session, run_id: UUID, asked: EvaluationCreate) -> tuple[EvaluationView, bool]:
    """Have a round's encoder judged; False: that is done, or under way. One that failed is tried anew.

    Raises ProblemError where there is no such run, round or data set, or nothing to judge.
    """
    run = runs.get(session, run_id)
    if run is None:
        raise ProblemError("not-found", f"no run {run_id}: `GET /v1/runs` lists those that there are")
    number = run.rounds_closed if asked.round_number is None else asked.round_number
    if run.broadcast is None or number > run.rounds_closed:
        detail = f"round {number} of run {run_id} is not closed yet: wait for it, or take an earlier one"
        raise ProblemError("conflict", detail)
    if (why := _not_judgeable(run)) is not None:
        raise ProblemError("conflict", why)
    row, is_new = _queue(session, run, number, _in_order(asked.config))
    if not is_new and row.state in (JobState.FAILED, JobState.CANCELLED):
        is_new = _queue_again(session, row)
    return show(session, row.id), is_new


def begin(session: Session, evaluation_id: UUID) -> Begun | None:
    """Count a try of an evaluation whose lock the caller holds. None: there is nothing to do for it, now or ever."""
    row = repository.locked(session, evaluation_id)
    if row is None or row.state not in UNFINISHED or not retries.may_begin(session, row):
        return None
    is_resumed, is_told = row.state == JobState.RUNNING, retries.is_told(row.num_tries)
    retries.begin(session, row)
    row.sent_at = None
    session.flush()
    if not is_resumed:
        transition(session, row, JobState.RUNNING, f"{_where(row)}: the judging begins", started_at=func.now())
        session.refresh(row)
    elif is_told:
        done = ", ".join(_in_words(results_so_far(row)))
        record(session, "evaluation.resumed", f"goes on after {done}" if done else "begins again", **about(row))
    enqueue.wake_watchers(session)
    before = repository.map_before(session, row) if row.config.get("embedding_map") else None
    return Begun(runs.get_one(session, row.run_id), row, before)


def results_so_far(row: Evaluation) -> Results:
    """Of the measures that are done, whoever did them."""
    return dict((row.progress or {}).get("results", {}))


def note_failure(session: Session, evaluation_id: UUID, why: str) -> None:
    """A try has failed for a reason that may pass: pause, try again."""
    row = repository.locked(session, evaluation_id)
    if row is not None and row.state in UNFINISHED:
        retries.note_failure(session, row, why)


def note_departure(session: Session, evaluation_id: UUID) -> None:
    """The process that worked on it leaves: another may go on at once."""
    row = repository.locked(session, evaluation_id)
    if row is not None and row.state == JobState.RUNNING:
        retries.start_anew(session, row)


def complete(
    session: Session, evaluation_id: UUID, results: Results, embedding_map: Mapping[str, Any] | None = None
) -> None:
    """Everything is measured, unless it was called off: keep it, and as numbers of the round too.

    A round has one number of a name: that which the run's own spec asks for, else the first that somebody asked for.
    """
    row = repository.locked(session, evaluation_id)
    if row is None or row.state != JobState.RUNNING:
        return
    message, data = f"{_where(row)}: {_said(results)}", {"dataset": row.dataset, "results": results}
    kept = {} if embedding_map is None else {"embedding_map": dict(embedding_map)}
    _end(session, row, JobState.COMPLETED, message, data, results=results, reason=None, **kept)
    spec = RunSpec.model_validate(runs.get_one(session, row.run_id).spec)
    is_own = spec.evaluation is not None and row.config == _dumped(_own_config(spec))
    known = {f"evaluation/{name}": value for name, value in results.items() if value is not None}
    repository.add_metrics(session, row.run_id, row.round_number, known, replace=is_own)


def fail(session: Session, evaluation_id: UUID, reason: str) -> None:
    """It can never succeed."""
    row = repository.locked(session, evaluation_id)
    if row is not None and row.state == JobState.RUNNING:
        _end(session, row, JobState.FAILED, f"{_where(row)}: {reason}", reason=printable(reason))


def cancel(session: Session, evaluation_id: UUID) -> EvaluationView:
    """Call an evaluation off. A second time it is no error."""
    row = repository.locked(session, evaluation_id)
    if row is None:
        raise _no_evaluation(evaluation_id)
    if row.state == JobState.CANCELLED:
        return view(row)
    if row.state not in UNFINISHED:
        detail = f"evaluation {evaluation_id} is {row.state}: only one that waits or runs can be cancelled"
        raise ProblemError("conflict", detail)
    reason = "cancelled by an operator"
    _end(session, row, JobState.CANCELLED, f"{_where(row)}: {reason}", reason=reason)
    return show(session, evaluation_id)


def show(session: Session, evaluation_id: UUID) -> EvaluationView:
    """Raises ProblemError where there is no such evaluation."""
    row = repository.get(session, evaluation_id)
    if row is None:
        raise _no_evaluation(evaluation_id)
    return view(row)


def of_run(
    session: Session, run_id: UUID, limit: int, after: tuple[int, datetime, UUID] | None
) -> Sequence[Evaluation]:
    """A run's evaluations, by round."""
    return repository.in_order(session, run_id, limit, after)


def view(row: Evaluation) -> EvaluationView:
    """As the API shows it."""
    return EvaluationView.model_validate(row, from_attributes=True)


def storable(results: Mapping[str, float]) -> Results:
    """JSON knows no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in results.items()}


def _queue(session: Session, run: Run, number: int, config: JudgingConfig) -> tuple[Evaluation, bool]:
    found = datasets.get(session, EvaluationDataset, config.dataset)
    if found is None:
        message = (
            f"no evaluation data set {config.dataset} is registered: register it "
            "(`fedssl evaluation-dataset add NAME SOURCE`) and give its name"
        )
        detail = f"nothing was changed; correct this and send it again: config.dataset: {message}"
        raise ProblemError("invalid-request", detail, errors=[{"loc": ["config", "dataset"], "msg": message}])
    model = _model(session, run, number)
    _require_kept(session, model, number)
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


def _queue_again(session: Session, row: Evaluation) -> bool:
    values: dict[str, Any] = {"reason": None, "finished_at": None, "num_tries": 0, "sent_at": func.now()}
    won = transition(session, row, JobState.QUEUED, f"{_where(row)}: asked for again", **values)
    enqueue.evaluate(session, row.id)
    enqueue.wake_watchers(session)
    return won


def _model(session: Session, run: Run, number: int) -> str:
    """The weights after a closed round: what the next one was sent, or will be."""
    if number == run.rounds_closed:
        assert run.broadcast is not None, "a prepared run has a broadcast"
        return run.broadcast
    return rounds.get(session, run.id, number + 1).broadcast


def _require_kept(session: Session, model: str, number: int) -> None:
    """Raise ProblemError where a round's weights were removed; otherwise they stay until the transaction ends."""
    if artifacts.hold(session, model):
        return
    detail = (
        f"the weights of round {number} were removed: it was closed more than FEDSSL_KEEP_BROADCASTS_SECONDS "
        f"({settings().keep_broadcasts_seconds:g}) ago; take a newer round, or leave the round out for the newest"
    )
    raise ProblemError("conflict", detail)


def _not_judgeable(run: Run) -> str | None:
    """Why no encoder of the run can be judged here; None: one can."""
    assert run.plan is not None, "a prepared run has a plan"
    if not run.plan["update"]:
        return (
            f"{run.method} sends nothing to the coordinator, whose encoder is the one before training: judge the "
            "clients' own where they are"
        )
    if not any(tensor["name"].startswith(_ENCODER) for tensor in run.plan["broadcast"]):
        return f"what {run.method} broadcasts holds no encoder: there is nothing to judge"
    return None


def _own_config(spec: RunSpec) -> JudgingConfig:
    """What the run's own spec asks to be judged."""
    assert spec.evaluation is not None
    return _in_order(JudgingConfig.model_validate(spec.evaluation.model_dump(exclude={"every"})))


def _in_order(config: JudgingConfig) -> JudgingConfig:
    """With its measures in one order: the same numbers are not taken twice."""
    return config.model_copy(update={"measures": tuple(m for m in get_args(Measure) if m in config.measures)})


def _dumped(config: JudgingConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _end(
    session: Session, row: Evaluation, state: JobState, message: str, data: dict[str, Any] | None = None, **values: Any
) -> None:
    won = transition(session, row, state, message, data=data, retry_at=None, finished_at=func.now(), **values)
    assert won, "the row is locked"
    session.refresh(row)
    enqueue.wake_watchers(session)


def _where(row: Evaluation) -> str:
    when = f"round {row.round_number}" if row.round_number else "before training"
    return f"{when}, on {row.dataset}"


def _said(results: Results) -> str:
    if None in results.values():
        return "the encoder's outputs are not all finite numbers, so its training has diverged"
    return ", ".join(f"{name} {shown}" for name, shown in _in_words(results).items())


def _in_words(results: Results) -> dict[str, str]:
    """Accuracies first: Postgres does not keep the order of JSON's keys."""
    names = [name for name in _SHARES if name in results] + sorted(results.keys() - set(_SHARES))
    known = {name: value for name in names if (value := results[name]) is not None}
    return {name: f"{100 * v:.2f} %" if name in _SHARES else f"{v:.4g}" for name, v in known.items()}


def _no_evaluation(evaluation_id: UUID) -> ProblemError:
    detail = f"no evaluation {evaluation_id}: `GET /v1/runs/{{run_id}}/evaluations` lists a run's"
    return ProblemError("not-found", detail)
