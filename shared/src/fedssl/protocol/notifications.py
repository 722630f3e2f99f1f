"""Notifications: what they are about, how they are delivered, and the body of a webhook."""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field


class Topic(StrEnum):
    """A reason to notify a destination."""

    FAILED = "failed"
    """A run, a distillation or an evaluation has failed."""
    STALLED = "stalled"
    """A run makes no progress, and needs attention."""
    DECLINED = "declined"
    """A client has declined work; once per round."""
    ALARM = "alarm"
    """A collapse alert, an unusual update, a damaged file, or a client's ledger that contradicts itself."""
    FINISHED = "finished"
    """A run is completed, or was stopped."""


class DestinationKind(StrEnum):
    """How a destination is notified."""

    WEBHOOK = "webhook"
    EMAIL = "email"


class DeliveryState(StrEnum):
    """pending -> delivered | failed, after the last of several attempts."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class NotificationData(BaseModel):
    """The event that has happened, without tensors, labels and metrics: `message` is the text of the event log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    event: int | None = Field(default=None, description="The event's id; a test has none.")
    kind: str = Field(description="The event's type, such as `run.finished`.")
    run: UUID | None = None
    run_name: str | None = None
    round: int | None = None
    client: str | None = None
    outcome: str | None = Field(default=None, description="How a run ended: completed, failed or stopped.")
    message: str


class Notification(BaseModel):
    """The body of a webhook, in the form that the Standard Webhooks specification recommends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str = Field(description="The topic, or `test`.")
    timestamp: datetime = Field(description="When it happened, by the database's clock.")
    data: NotificationData
