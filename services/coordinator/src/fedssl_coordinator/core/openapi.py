"""The OpenAPI document, with the errors of each operation: by status, as problem+json."""

from typing import Any

from fastapi import FastAPI

from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE, Problem
from fedssl_coordinator.core.problems import PREFIX, PROBLEMS

_SCHEMA = {"schema": {"$ref": "#/components/schemas/Problem"}}
_ANY = "Any other error, such as a method that the path does not have (405) or a failure of the coordinator (500)"
_UNCOUNTED = ("/healthz", "/readyz")  # by the rate limits


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what a route's `responses` declare for its own errors.

    Statuses that follow from the route itself are added to the document by `DocumentedAPI`.
    """
    return {status: {"$ref": _reference(status)} for status in statuses}


class DocumentedAPI(FastAPI):
    """An application whose document lists the statuses of the errors that each operation answers."""

    def openapi(self) -> dict[str, Any]:
        is_new = self.openapi_schema is None
        document = super().openapi()
        if is_new:
            _add_problems(document)
        return document


def _add_problems(document: dict[str, Any]) -> None:
    components = document["components"]
    schemas = components["schemas"]
    schemas["Problem"] = Problem.model_json_schema()
    del schemas["HTTPValidationError"], schemas["ValidationError"]
    used: set[int] = set()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = {key: value for key, value in operation["responses"].items() if not _is_fastapis(value)}
            declared = {int(status) for status, response in responses.items() if "$ref" in response}
            statuses = declared | _implied(path, operation)
            used |= statuses
            for status in statuses:
                if (others := responses.get(str(status), {})) and status not in declared:
                    others["content"][PROBLEM_MEDIA_TYPE] = _SCHEMA
                else:
                    responses[str(status)] = {"$ref": _reference(status)}
            responses["default"] = {"$ref": _reference(None)}
            operation["responses"] = dict(sorted(responses.items()))
    components["responses"] = {_name(status): _response(_described(status)) for status in sorted(used)}
    components["responses"][_name(None)] = _response(_ANY)


def _is_fastapis(response: dict[str, Any]) -> bool:
    """Return whether FastAPI added a response for invalid requests: ours is a problem."""
    return "HTTPValidationError" in str(response.get("content"))


def _implied(path: str, operation: dict[str, Any]) -> set[int]:
    """Return the errors that follow from an operation's path, parameters, body and security."""
    found = {503} if path in _UNCOUNTED else {429, 503}
    if "security" in operation:
        found |= {401, 403}
    if "{" in path:
        found |= {404}
    if "parameters" in operation:
        found |= {422}
    if "requestBody" in operation:
        found |= {408, 413, 422}
    return found


def _response(description: str) -> dict[str, Any]:
    return {"content": {PROBLEM_MEDIA_TYPE: _SCHEMA}, "description": description}


def _described(status: int) -> str:
    """Return the types of the problems that have a status.

    >>> _described(416)
    '`urn:fedssl:problem:range-not-satisfiable` (The range is outside the artifact)'
    """
    return ", ".join(f"`{PREFIX}{slug}` ({title})" for slug, (known, title) in PROBLEMS.items() if known == status)


def _name(status: int | None) -> str:
    return "Problem" if status is None else f"Problem{status}"


def _reference(status: int | None) -> str:
    return f"#/components/responses/{_name(status)}"
