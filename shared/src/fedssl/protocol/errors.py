"""Problem details (RFC 9457), the form of every error that the API returns."""

from typing import Any

from pydantic import BaseModel, ConfigDict

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """An error: `type` is stable and meant for programs; `detail` is meant for people and explains what to do."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, Any]] = []
