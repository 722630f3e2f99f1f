"""Clients and the anchors of their ledgers, as the API shows them."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from fedssl.protocol.base import ClientId, Digest
from fedssl.protocol.data import ServedShapes
from fedssl.protocol.ledger import PublicKey
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.projects import DEFAULT_PROJECT, ProjectName
from fedssl.protocol.views.base import View
from fedssl.protocol.work import CheckNumbers


class ClientEdit(BaseModel):
    """A new display name of a client. The client keeps its id, from which its seeds derive."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    display_name: Annotated[str, StringConstraints(strip_whitespace=True, max_length=100)]

    @field_validator("display_name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("a display name is one line of printable characters")
        return name


class ClientView(View):
    """A data owner, as the coordinator knows it."""

    id: ClientId
    project: ProjectName = DEFAULT_PROJECT
    display_name: str = Field(default="", description="The operators' name for the client. Empty: its id.")
    registered_at: datetime | None
    last_seen_at: datetime | None
    revoked_at: datetime | None
    device: str | None
    num_images: int | None
    channels: int | None
    image_size: int | None
    serves: ServedShapes | None = Field(
        default=None, description="The shapes of images that the worker can prepare. Null: only the one above."
    )
    worker_version: str | None
    encoder: EncoderConfig | None = Field(default=None, description="The encoder that the worker declared, if any.")
    policy: PolicyNotice | None = Field(
        default=None, description="What the data owner's policy allows to be sent. Null if there is no policy."
    )
    check: CheckNumbers | None = Field(
        default=None, description="What `fedssl-worker check --report` has measured there. Null if it reports nothing."
    )


class LedgerAnchorView(View):
    """The length and head of a client's ledger. `is_consistent` is false if it contradicted an earlier anchor."""

    key: PublicKey
    seq: int
    head: Digest
    is_consistent: bool
    at: datetime
