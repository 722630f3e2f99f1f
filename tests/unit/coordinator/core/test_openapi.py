"""Errors in the OpenAPI document: their media type, their schema, and which statuses each operation lists."""

from typing import Any

import pytest

from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE, Problem
from fedssl_coordinator.core.problems import PREFIX, PROBLEMS
from support.openapi import Operation, api_document, operations

DOCUMENT = api_document()
OPERATIONS = operations(DOCUMENT)


def _resolved(response: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in response:
        return response
    found: dict[str, Any] = DOCUMENT["components"]["responses"][response["$ref"].rsplit("/", 1)[1]]
    return found


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_every_error_is_a_problem_with_its_media_type(operation: Operation) -> None:
    responses = operation.document["responses"]
    assert "default" in responses
    for status, response in responses.items():
        content = _resolved(response).get("content", {})
        if status == "default" or int(status) >= 400:
            assert content[PROBLEM_MEDIA_TYPE] == {"schema": {"$ref": "#/components/schemas/Problem"}}
        else:
            assert PROBLEM_MEDIA_TYPE not in content
        if (operation.template, status) != ("/readyz", "503"):
            assert PROBLEM_MEDIA_TYPE not in content or len(content) == 1


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_an_operation_lists_the_errors_that_follow_from_its_definition(operation: Operation) -> None:
    statuses = set(operation.document["responses"])
    assert ({"401", "403"} <= statuses) == bool(operation.roles)
    assert ({"429"} <= statuses) == (operation.template not in ("/healthz", "/readyz"))
    assert {"404"} <= statuses or "{" not in operation.template
    if operation.document.get("requestBody"):
        assert {"408", "413", "422"} <= statuses


def test_the_problem_schema_is_that_of_the_client() -> None:
    assert DOCUMENT["components"]["schemas"]["Problem"] == Problem.model_json_schema()
    assert "HTTPValidationError" not in DOCUMENT["components"]["schemas"]


def test_each_response_lists_the_problem_types_of_its_status() -> None:
    for name, response in DOCUMENT["components"]["responses"].items():
        for slug, (status, _) in PROBLEMS.items():
            assert (f"`{PREFIX}{slug}`" in response["description"]) == (name == f"Problem{status}")
