"""`/v1/methods`: the methods that a run can use, from their configs only, without torch."""

from fastapi import APIRouter

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.views import MethodView, Page
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.identity.authentication import Viewer

router = APIRouter(prefix="/v1/methods", tags=["methods"])


def _view(name: str, config: type[MethodConfig]) -> MethodView:
    return MethodView(
        name=name,
        description=(config.__doc__ or "").strip(),
        config_schema=config.model_json_schema(),
        **config.info.model_dump(),
    )


@router.get("")
def list_methods(caller: Viewer) -> Page[MethodView]:
    """List all methods by name."""
    return Page(items=[_view(name, config) for name, config in sorted(METHOD_CONFIGS.items())])


@router.get("/{name}")
def show_method(name: str, caller: Viewer) -> MethodView:
    """Show one method: its paper, its parameters, and what leaves a client."""
    config = METHOD_CONFIGS.get(name)
    if config is None:
        raise ProblemError("not-found", f"no method {name[:64]!r}; choose one of: {', '.join(sorted(METHOD_CONFIGS))}")
    return _view(name, config)
