"""`/runs/new`: a form made from the method's schema and checked during typing."""

import json
from typing import Annotated
from uuid import UUID, uuid4

from fastapi import APIRouter, Query
from sqlalchemy.orm import Session
from starlette.responses import Response

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.views import RunCreate
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard.layout.page import PageRoute, render, see_other
from fedssl_coordinator.dashboard.new_run import spec_form
from fedssl_coordinator.dashboard.new_run.spec_form import CheckedForm, SettingError
from fedssl_coordinator.dashboard.run import view as run_view
from fedssl_coordinator.dashboard.session import Form, Signed, Steering, Viewing
from fedssl_coordinator.federation.runs import service

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_DEFAULT = "ssd"

Method = Annotated[str, Query(max_length=64)]
From = Annotated[UUID | None, Query(alias="from")]


@router.get("/runs/new")
def show_form(visitor: Viewing, session: DB, method: Method = "", template: From = None) -> Response:
    """Show the form, empty or filled with the settings of another run."""
    if not visitor.may_steer:
        raise ProblemError("forbidden", "this needs an operator's or an admin's token; you are signed in as a viewer")
    values: dict[str, str] = {}
    if template is not None:
        spec = run_view.get(session, template).spec
        method = method or spec["method"]["name"]
        values = spec_form.values_of(spec, method) if method == spec["method"]["name"] else {}
    return _page(visitor, _known(method or _DEFAULT), values, None)


@router.post("/runs/new/check")
def check(visitor: Signed, form: Form) -> Response:
    """Show the form's spec or its errors, without creating anything."""
    checked = spec_form.check(_known(form.get("method", "")), form)
    return render("new_run_check.html", visitor, checked=checked, given=_shown(checked))


@router.post("/runs/new")
def create(visitor: Steering, form: Form, session: DB) -> Response:
    """Create the run, only once even if the form is sent several times."""
    method = _known(form.get("method", ""))
    checked = spec_form.check(method, form)
    if checked.spec is None:
        return _page(visitor, method, dict(form), checked)
    return _made(visitor, method, form, checked, session)


def _made(visitor: Steering, method: str, form: Form, checked: CheckedForm, session: Session) -> Response:
    assert checked.spec is not None
    key = form.get("key", "")[:100]
    request = RunCreate(spec=checked.spec, start=form.get("start") != "later")
    try:
        run = service.create(session, request, f"page-{key}" if key.isalnum() else None)
    except ProblemError as error:
        where = [".".join(str(part) for part in entry["loc"]) for entry in error.errors]
        errors = [SettingError(key.removeprefix("spec."), error.detail) for key in where or [""]]
        return _page(visitor, method, dict(form), CheckedForm(None, errors, checked.given))
    return see_other(f"/runs/{run.id}")


def _page(visitor: Viewing, method: str, values: dict[str, str], checked: CheckedForm | None) -> Response:
    info = METHOD_CONFIGS[method].info
    titles = {name: config.info.title for name, config in sorted(METHOD_CONFIGS.items())}
    shown = checked or spec_form.check(method, values)
    return render(
        "new_run.html", visitor, status=200 if checked is None else 422, method=method, methods=titles, info=info,
        sections=spec_form.sections(method), values=values, key=uuid4().hex, checked=shown, given=_shown(shown),
        wrong={one.key: one.text for one in shown.errors} if checked else {},
    )  # fmt: skip


def _shown(checked: CheckedForm) -> str:
    return json.dumps(checked.given, indent=2)


def _known(method: str) -> str:
    if method not in METHOD_CONFIGS:
        raise ProblemError(
            "not-found", f"There is no method {method[:64]!r}: choose one of {', '.join(sorted(METHOD_CONFIGS))}."
        )
    return method
