"""Destinations of notifications and their deliveries, as the API shows them."""

import re
from datetime import datetime
from typing import Annotated, Self
from urllib.parse import urlsplit
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedssl.protocol.notifications import DeliveryState, DestinationKind, Topic
from fedssl.protocol.projects import ProjectName, WantedProject
from fedssl.protocol.views.base import View

_EMAIL = re.compile(r"[^\s@<>(),;:\\\"\[\]]{1,64}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")


class DestinationCreate(BaseModel):
    """A request for a new destination of notifications."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: DestinationKind
    target: Annotated[str, Field(max_length=1000, description="The URL of a webhook, or an e-mail address.")]
    topics: Annotated[
        list[Topic], Field(min_length=1, max_length=len(Topic), description="What it is notified of.")
    ] = list(Topic)
    label: str = Field(default="", max_length=100)
    project: WantedProject = Field(
        default=None,
        description="The project of whose events it is notified. Null: that of the token, or else every project.",
    )

    @field_validator("topics")
    @classmethod
    def _once_each(cls, topics: list[Topic]) -> list[Topic]:
        return [topic for topic in Topic if topic in topics]

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.kind is DestinationKind.WEBHOOK:
            _check_url(self.target)
        elif not self.target.isascii() or len(self.target) > 254 or not _EMAIL.fullmatch(self.target):
            raise ValueError("target is not an e-mail address such as alice@example.org")
        return self


def _check_url(target: str) -> None:
    example = "such as https://hooks.example.org/fedssl"
    if not target.isascii() or not target.isprintable() or " " in target:
        raise ValueError(f"target has spaces or other characters than ASCII: encode it, {example}")
    try:
        parts = urlsplit(target)
        is_url = parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"target is not the URL of a webhook, {example}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("target must not contain a user or a password: the signature authenticates notifications")
    if parts.fragment:
        raise ValueError("target must not contain a fragment (`#...`), which is never sent")


class DestinationView(View):
    """A destination. The path of a webhook's URL is not shown, because it is often a secret."""

    id: UUID
    project: ProjectName | None = Field(default=None, description="Null: every project.")
    kind: DestinationKind
    target: str
    topics: list[str]
    label: str
    created_at: datetime
    last_delivery: "DeliveryView | None" = Field(description="The newest one that was attempted.")
    num_pending: int = Field(description="Deliveries that wait for their first or next attempt.")


class DestinationCreated(DestinationView):
    """A new destination. No other answer contains the secret, which signs a webhook; null for e-mail."""

    secret: str | None = Field(repr=False)


class DeliveryView(View):
    """A notification to one destination. Its id is the header `webhook-id`, by which receivers ignore repeats."""

    id: UUID
    topic: str = Field(description="What it is about, or `test`.")
    message: str
    state: DeliveryState
    num_tries: int
    next_try_at: datetime | None = Field(description="Null if it has ended.")
    error: str | None = Field(description="Why the last attempt failed.")
    created_at: datetime
    ended_at: datetime | None
