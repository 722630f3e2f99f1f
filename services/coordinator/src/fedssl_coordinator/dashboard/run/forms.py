"""Forms on a run's pages: a request for an evaluation, and the run's name, tags and notes."""

from typing import Any, Literal
from uuid import UUID

from fastapi import APIRouter
from pydantic import ValidationError
from sqlalchemy.orm import Session
from starlette.responses import Response

from fedssl.protocol.validation import first_problem
from fedssl.protocol.views import EvaluationCreate, RunEdit, SiteEvaluationsCreate
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.models import EvaluationDataset
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard.layout.mistakes import NO_MISTAKE, Mistake, mistake_of
from fedssl_coordinator.dashboard.layout.page import PageRoute, render, see_other
from fedssl_coordinator.dashboard.run import view as run_view
from fedssl_coordinator.dashboard.session import Form, MaySteer, Steering, Viewing
from fedssl_coordinator.federation.evaluations import service as evaluations
from fedssl_coordinator.federation.runs import service
from fedssl_coordinator.federation.site_evaluations import service as site_evaluations
from fedssl_coordinator.storage.datasets import repository as datasets

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_MOST_SETS = 500
_MEASURES = ("probe", "knn", "geometry")
_WORDS = {
    "round_number": "After round: write the number of a round, such as 5, or nothing for the newest",
    "config.measures": "Measures: choose at least one",
    "tags": "tags: a run has at most 20",
}


@router.get("/runs/{run_id}/evaluate")
def ask_for_evaluation(run_id: UUID, visitor: MaySteer, session: DB, draw: Literal["", "pca", "tsne"] = "") -> Response:
    """Show the form that requests an evaluation, and if `draw` names a method, a map of the embeddings."""
    values = {**dict.fromkeys(_MEASURES, "on"), "embedding_map": draw}
    return _evaluation_form(visitor, session, run_id, values, NO_MISTAKE)


@router.post("/runs/{run_id}/evaluate")
def request_evaluation(run_id: UUID, visitor: Steering, form: Form, session: DB) -> Response:
    """Request the evaluation of a round's encoder, by the coordinator or at the sites."""
    number = form.get("round_number", "").strip() or None
    if form.get("at") == "sites":
        return _request_at_sites(visitor, session, run_id, form, number)
    config: dict[str, Any] = {
        "dataset": form.get("dataset", ""),
        "measures": [name for name in _MEASURES if form.get(name)],
        "embedding_map": form.get("embedding_map") or None,
    }
    try:
        request = EvaluationCreate.model_validate({"config": config, "round_number": number})
        evaluations.request(session, run_id, request)
    except (ValidationError, ProblemError) as error:
        return _evaluation_form(visitor, session, run_id, form, _mistake(error, number))
    return see_other(f"/runs/{run_id}/jobs")


def _request_at_sites(visitor: Steering, session: Session, run_id: UUID, form: Form, number: str | None) -> Response:
    try:
        request = SiteEvaluationsCreate.model_validate({"round_number": number})
        site_evaluations.request(session, run_id, request.round_number)
    except (ValidationError, ProblemError) as error:
        values = {**dict.fromkeys(_MEASURES, "on"), **form}
        return _evaluation_form(visitor, session, run_id, values, _mistake(error, number))
    return see_other(f"/runs/{run_id}")


@router.get("/runs/{run_id}/edit")
def show_words(run_id: UUID, visitor: MaySteer, session: DB) -> Response:
    """Show the form that changes the run's name, tags and notes."""
    run = run_view.get(session, run_id)
    values = {"name": run.name, "tags": ", ".join(run.tags), "notes": run.notes}
    return render("edit_run.html", visitor, page=run_view.run_page(session, run_id), values=values, wrong=NO_MISTAKE)


@router.post("/runs/{run_id}/edit")
def edit(run_id: UUID, visitor: Steering, form: Form, session: DB) -> Response:
    """Change the run's name, tags and notes."""
    tags = [word for word in form.get("tags", "").replace(",", " ").split() if word]
    words = {"name": form.get("name", "").strip(), "tags": tags, "notes": form.get("notes", "").strip()}
    try:
        service.edit(session, run_id, RunEdit.model_validate(words))
    except ValidationError as error:
        page = run_view.run_page(session, run_id)
        values = {name: form.get(name, "") for name in words}
        wrong = mistake_of(error, _WORDS)
        match first_problem(error).location:
            case ("tags", int(index)):
                wrong = Mistake("tags", wrong.text.replace("tags:", f"tags: {tags[index]}:", 1))
        return render("edit_run.html", visitor, status=422, page=page, values=values, wrong=wrong)
    return see_other(f"/runs/{run_id}")


def _evaluation_form(visitor: Viewing, session: Session, run_id: UUID, values: Any, wrong: Mistake) -> Response:
    page = run_view.run_page(session, run_id)
    known = datasets.by_name(session, EvaluationDataset, _MOST_SETS, None)
    return render(
        "evaluate_run.html", visitor, status=422 if wrong.text else 200, page=page, sets=[row.name for row in known],
        values=values, wrong=wrong, measures=_MEASURES,
    )  # fmt: skip


def _mistake(error: ValidationError | ProblemError, number: str | None) -> Mistake:
    return mistake_of(error, _WORDS, "round_number" if number else "")
