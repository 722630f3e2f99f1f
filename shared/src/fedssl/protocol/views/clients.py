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


class IdentityConfirmation(BaseModel):
    """The identity key that a client's worker has announced, as its owner has confirmed it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


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
    identity: str | None = Field(
        default=None, description="The Ed25519 key, in hexadecimal, by which other workers know it in secure rounds."
    )
    announced_identity: str | None = Field(
        default=None,
        description="The key that the worker announced last. If it differs, the client takes part in no secure round "
        "until an administrator has confirmed it.",
    )


class LedgerAnchorView(View):
    """The length and head of a client's ledger. `is_consistent` is false if it contradicted an earlier anchor."""

    key: PublicKey
    seq: int
    head: Digest
    is_consistent: bool
    at: datetime
