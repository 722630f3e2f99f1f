"""The operations that the API documents, with a value in every place that a request needs."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

ROOT = Path(__file__).parents[2]
OPEN = {"/healthz", "/readyz"}
WORKERS_ONLY = "/v1/work/"

_PATH_VALUES = {
    "run_id": str(UUID(int=7)),
    "job_id": str(UUID(int=7)),
    "evaluation_id": str(UUID(int=7)),
    "destination_id": str(UUID(int=7)),
    "token_id": str(UUID(int=7)),
    "upload_id": str(UUID(int=7)),
    "client_id": "nobody",
    "digest": "0" * 64,
    "name": "fedsimclr",
    "number": "1",
}


@dataclass(frozen=True)
class Operation:
    """One method on one path; `path` has its parameters filled in."""

    method: str
    template: str
    path: str
    query: dict[str, str]
    document: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.method} {self.template}"

    @property
    def roles(self) -> set[str]:
        """The allowed roles, one of which a token needs. Empty if the operation is open or does not declare them."""
        return {role for requirement in self.document.get("security", []) for role in requirement["HTTPBearer"]}


@functools.cache
def api_document() -> dict[str, Any]:
    """Return the committed OpenAPI document. A test compares it with the code's, which takes seconds to generate."""
    document: dict[str, Any] = json.loads((ROOT / "openapi.json").read_text(encoding="utf-8"))
    return document


def operations(document: dict[str, Any]) -> list[Operation]:
    """Return every documented operation, in the document's order."""
    return [
        _operation(method.upper(), template, operation)
        for template, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def _operation(method: str, template: str, operation: dict[str, Any]) -> Operation:
    parameters = operation.get("parameters", [])
    names = [p["name"] for p in parameters if p["in"] == "path"]
    query = {p["name"]: str(UUID(int=7)) for p in parameters if p["in"] == "query" and p["required"]}
    return Operation(
        method, template, template.format(**{name: _PATH_VALUES[name] for name in names}), query, operation
    )
