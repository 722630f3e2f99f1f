"""`/runs/new`: a form made from the method's schema and checked during typing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

from fastapi import APIRouter, Query
from sqlalchemy.orm import Session
from starlette.responses import Response

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.views import RunCreate
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.models import EvaluationDataset, PublicDataset
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard.layout.page import PageRoute, render, see_other
from fedssl_coordinator.dashboard.new_run import spec_form, templates
from fedssl_coordinator.dashboard.new_run.fields import PREFIX, split
from fedssl_coordinator.dashboard.new_run.spec_form import CheckedForm, SettingError
from fedssl_coordinator.dashboard.run import view as run_view
from fedssl_coordinator.dashboard.runs import queries as overview_queries
from fedssl_coordinator.dashboard.session import Form, MaySteer, Signed, Steering, Viewing
from fedssl_coordinator.federation.estimates import service as estimates
from fedssl_coordinator.federation.runs import service
from fedssl_coordinator.identity.projects import service as projects
from fedssl_coordinator.storage.datasets import repository as datasets

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_DEFAULT = "ssd"
_OFFERED = 200
_RECENT = 20

Method = Annotated[str, Query(max_length=64)]
Template = Annotated[Literal["", "quick", "ssd"], Query()]
From = Annotated[UUID | None, Query(alias="from")]


@router.get("/runs/new")
def show_form(
    visitor: MaySteer, session: DB, method: Method = "", template: Template = "", copied: From = None
) -> Response:
    """Show the form: empty, with the settings of a template, or with those of another run."""
    spec: Mapping[str, Any] = {}
    project = {}
    if copied is not None:
        run = run_view.get(session, copied)
        spec, project = run.spec, {"project": run.project}
    elif template:
        spec = templates.spec_of(session, template)
    method = _known(method or spec.get("method", {}).get("name", _DEFAULT))
    shown = _FormPage(method, {**spec_form.values_of(spec, method), **project}, template, copied)
    return _page(visitor, session, shown, None)


@router.post("/runs/new/settings")
def change_method(visitor: Steering, form: Form, session: DB) -> Response:
    """Show the settings of another method. What was typed stays, except for the method's own settings."""
    values = {name: value for name, value in form.items() if not name.startswith(f"{PREFIX}method.")}
    return _page(visitor, session, _FormPage(_known(form.get("method", "")), values), None)


@router.post("/runs/new/check")
def check(visitor: Signed, form: Form, session: DB) -> Response:
    """Show the form's spec, its estimate or its errors, without creating anything."""
    checked = spec_form.check(_known(form.get("method", "")), form)
    return render(
        "new_run_check.html", visitor, **_verdict(session, _project(visitor, session, form), checked, visitor)
    )


@router.post("/runs/new")
def create(visitor: Steering, form: Form, session: DB) -> Response:
    """Create the run, only once even if the form is sent several times."""
    method = _known(form.get("method", ""))
    checked = spec_form.check(method, form)
    if checked.spec is None:
        return _page(visitor, session, _FormPage(method, form), checked)
    return _made(visitor, method, form, checked, session)


@dataclass(frozen=True, slots=True)
class _FormPage:
    """The values that fill the form, and where they come from."""

    method: str
    values: Mapping[str, str]
    template: str = ""
    copied: UUID | None = None


def _made(visitor: Steering, method: str, form: Form, checked: CheckedForm, session: Session) -> Response:
    assert checked.spec is not None
    key = form.get("key", "")[:100]
    request = RunCreate(spec=checked.spec, start=form.get("start") != "later", project=_project(visitor, session, form))
    try:
        run = service.create(session, request, f"page-{key}" if key.isalnum() else None)
    except ProblemError as error:
        return _page(visitor, session, _FormPage(method, form), _refused(checked, error))
    return see_other(f"/runs/{run.id}")


def _page(visitor: Viewing, session: Session, page: _FormPage, checked: CheckedForm | None) -> Response:
    titles = {name: config.info.title for name, config in sorted(METHOD_CONFIGS.items())}
    shown = checked or spec_form.check(page.method, page.values)
    clients = templates.registered(session)
    names = {row.client.id for row in clients}
    wanted = split(page.values.get(spec_form.CLIENTS, ""))
    picked = {name for name in names if name in wanted or f"{spec_form.CLIENT}{name}" in page.values}
    values = {**page.values, spec_form.CLIENTS: ", ".join(name for name in wanted if name not in names)}
    offered = {
        "evaluation.dataset": [row.name for row in datasets.by_name(session, EvaluationDataset, _OFFERED, None)],
        "public_data.dataset": [row.name for row in datasets.by_name(session, PublicDataset, _OFFERED, None)],
    }
    return render(
        "new_run.html", visitor, status=200 if checked is None else 422, page=page, methods=titles,
        info=METHOD_CONFIGS[page.method].info, sections=spec_form.sections(page.method), values=values,
        clients=clients, picked=picked, offered=offered, templates=templates.TEMPLATES,
        recent=overview_queries.page(session, _RECENT, None, "all", ""), key=uuid4().hex,
        wrong={one.key: one.text for one in shown.errors} if checked else {},
        projects=projects.by_name(session, _OFFERED, None),
        **_verdict(session, _project(visitor, session, page.values), shown, visitor),
    )  # fmt: skip


def _verdict(session: Session, project: str, checked: CheckedForm, visitor: Viewing) -> dict[str, Any]:
    estimate = None
    if checked.spec is not None and visitor.may_steer:
        try:
            estimate = estimates.estimate(session, project, checked.spec)
        except ProblemError as error:
            checked = _refused(checked, error)
    return {"checked": checked, "given": json.dumps(checked.given, indent=2), "estimate": estimate}


def _refused(checked: CheckedForm, error: ProblemError) -> CheckedForm:
    """Return the form with the coordinator's reasons next to the settings that they are about."""
    reasons: dict[str, list[str]] = {}
    for entry in error.errors:
        reasons.setdefault(".".join(str(part) for part in entry["loc"] if part != "spec"), []).append(entry["msg"])
    found = [SettingError(key, "; ".join(texts)) for key, texts in reasons.items()]
    return CheckedForm(None, found or [SettingError("", error.detail)], checked.given)


def _project(visitor: Viewing, session: Session, values: Mapping[str, str]) -> str:
    """Return the project that the form names: only people with several are asked for it.

    Raises ProblemError if the person has switched to another project since the form was opened.
    """
    wanted, current = values.get("project") or None, visitor.caller.project
    if wanted != current and wanted in visitor.memberships:
        detail = f"this form is for the project {wanted}, and you work in {current} now: switch back, and send it again"
        raise ProblemError("conflict", detail)
    return projects.chosen(session, wanted)


def _known(method: str) -> str:
    if method not in METHOD_CONFIGS:
        raise ProblemError(
            "not-found", f"There is no method {method[:64]!r}: choose one of {', '.join(sorted(METHOD_CONFIGS))}."
        )
    return method
