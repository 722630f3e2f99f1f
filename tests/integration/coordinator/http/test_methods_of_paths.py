"""Responses with 405 and to OPTIONS name every method of a path."""

import httpx
import pytest

from support.coordinator import Coordinator
from support.openapi import api_document, operations

PATHS: dict[str, set[str]] = {}
for operation in operations(api_document()):
    PATHS.setdefault(operation.path, set()).add(operation.method)
PAGES = {"/sign-in": {"GET", "POST"}, "/runs/new": {"GET", "POST"}, "/static/x/frame.css": {"GET", "HEAD"}}
SEVERAL = {path for path, methods in PATHS.items() if len(methods) > 1}


def _ask(coordinator: Coordinator, method: str, path: str) -> httpx.Response:
    with coordinator.bare_http() as http:
        return http.request(method, path)


def _allowed(answer: httpx.Response) -> set[str]:
    return {method.strip() for method in answer.headers["allow"].split(",")}


@pytest.mark.parametrize("path", [*PATHS, *PAGES])
def test_a_path_names_all_its_methods(shared_coordinator: Coordinator, path: str) -> None:
    methods = (PATHS | PAGES)[path]
    answer = _ask(shared_coordinator, "TRACE", path)
    assert answer.status_code == 405
    assert answer.headers["content-type"] == "application/problem+json"
    assert _allowed(answer) - {"OPTIONS"} == methods
    answer = _ask(shared_coordinator, "OPTIONS", path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert _allowed(answer) - {"OPTIONS"} == methods


def test_some_paths_have_several_methods() -> None:
    assert len(SEVERAL) >= 8


def test_a_path_that_does_not_exist_has_no_methods(shared_coordinator: Coordinator) -> None:
    for method in ("OPTIONS", "TRACE", "GET"):
        answer = _ask(shared_coordinator, method, "/v1/nothing")
        assert answer.status_code == 404
        assert "allow" not in answer.headers
