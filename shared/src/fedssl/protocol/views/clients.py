"""Clients and the anchors of their ledgers, as the API shows them."""

from datetime import datetime

from pydantic import Field

from fedssl.protocol.base import ClientId, Digest
from fedssl.protocol.data import ServedShapes
from fedssl.protocol.ledger import PublicKey
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.projects import DEFAULT_PROJECT, ProjectName
from fedssl.protocol.views.base import View


class ClientView(View):
    """A data owner, as the coordinator knows it."""

    id: ClientId
    project: ProjectName = DEFAULT_PROJECT
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


class LedgerAnchorView(View):
    """The length and head of a client's ledger. `is_consistent` is false if it contradicted an earlier anchor."""

    key: PublicKey
    seq: int
    head: Digest
    is_consistent: bool
    at: datetime
