"""The list of methods. Its schemas are built once per process."""

import pytest
from pydantic import BaseModel

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl_coordinator.federation import methods_endpoints


def test_a_second_request_builds_no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building all schemas takes seconds, so a viewer could keep the process busy."""
    caller = object()
    first = methods_endpoints.list_methods(caller)  # type: ignore[arg-type]
    assert [view.name for view in first.items] == sorted(METHOD_CONFIGS)

    def refuse(*_: object, **__: object) -> dict[str, object]:
        raise AssertionError("a schema was made again")

    monkeypatch.setattr(BaseModel, "model_json_schema", classmethod(refuse))
    assert methods_endpoints.list_methods(caller) == first  # type: ignore[arg-type]
    assert methods_endpoints.show_method("ssd", caller) in first.items  # type: ignore[arg-type]
