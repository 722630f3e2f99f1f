"""`/compare`: the curves of several runs in one chart, and a table of their differences."""

from collections.abc import Sequence
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import BeforeValidator
from starlette.responses import Response

from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard.compare import comparison
from fedssl_coordinator.dashboard.layout.client_labels import SLOTS
from fedssl_coordinator.dashboard.layout.page import PageRoute, render
from fedssl_coordinator.dashboard.runs import overview
from fedssl_coordinator.dashboard.session import Viewing

router = APIRouter(route_class=PageRoute, include_in_schema=False)

RunIds = Annotated[Sequence[str], Query(max_length=SLOTS)]
Shown = Literal["differences", "all"]
Axis = Literal["round", "bytes", "time"]
Curve = Literal["probe", "knn", "effective_rank", "loss"]
Scale = Literal["linear", "log", "log-x", "log-log"]
Smoothing = Literal[1, 5, 20]


def _ids(runs: Sequence[str]) -> list[UUID]:
    """Return the ids, given as repeated parameters or separated by commas, without duplicates."""
    try:
        found = [UUID(one) for text in runs for one in text.split(",") if one]
    except ValueError:
        raise ProblemError("not-found", "One of these is not a run: select runs in the list to compare them.") from None
    if len(found) > SLOTS:
        raise ProblemError("invalid-request", f"At most {SLOTS} runs can be compared at once.")
    return list(dict.fromkeys(found))


@router.get("/compare")
def compare(
    visitor: Viewing,
    session: DB,
    runs: RunIds = (),
    x: Axis = "round",
    y: Curve = "probe",
    scale: Scale = "linear",
    smooth: Annotated[Smoothing, BeforeValidator(int)] = 1,
    show: Shown = "differences",
) -> Response:
    """Compare the runs with the first one, the baseline."""
    ids = _ids(runs)
    compared = comparison.compare(session, ids, y)
    others = [row for row in overview.overview(session, None, "all", "").rows if row.run.id not in ids]
    return render(
        "compare.html", visitor, compared=compared, others=others, ids=[str(one) for one in ids],
        view={"x": x, "y": y, "scale": scale, "smooth": smooth, "show": show}, curves=comparison.CURVES,
        means=tuple(f"#{name}" for name in comparison.MEANS),
        tables=(comparison.numbers_of(compared.curves, y), comparison.path_of(compared.curves)),
    )  # fmt: skip
