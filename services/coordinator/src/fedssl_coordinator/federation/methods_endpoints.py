"""`/v1/methods`: the methods that a run can use, from their configs only, without torch."""

from functools import cache

from fastapi import APIRouter

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.views import MethodView, Page
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.identity.authentication import Viewer

router = APIRouter(prefix="/v1/methods", tags=["methods"])


@cache  # the schema of a method takes 40 ms
def _view(name: str) -> MethodView:
    config = METHOD_CONFIGS[name]
    return MethodView(
        name=name,
        description=(config.__doc__ or "").strip(),
        config_schema=config.model_json_schema(),
        **config.info.model_dump(),
    )


@router.get("")
def list_methods(caller: Viewer) -> Page[MethodView]:
    """List all methods by name."""
    return Page(items=[_view(name) for name in sorted(METHOD_CONFIGS)])


@router.get("/{name}")
def show_method(name: str, caller: Viewer) -> MethodView:
    """Show one method: its paper, its parameters, and what leaves a client."""
    if name not in METHOD_CONFIGS:
        raise ProblemError("not-found", f"no method {name[:64]!r}; choose one of: {', '.join(sorted(METHOD_CONFIGS))}")
    return _view(name)
