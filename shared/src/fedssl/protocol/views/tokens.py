"""Tokens, as the API shows them."""

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import ClientId
from fedssl.protocol.projects import ProjectName, WantedProject
from fedssl.protocol.tokens import DAY_SECONDS, LastingRole, LifetimeSeconds, Role
from fedssl.protocol.views.base import View


class TokenCreate(BaseModel):
    """A request for a new token. `client_id` is required for workers and refused for other roles."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: LastingRole
    client_id: ClientId | None = None
    label: str = Field(default="", max_length=100)
    lifetime_seconds: LifetimeSeconds | None = Field(
        default=None, description="Null: the token is valid until it is revoked."
    )
    project: WantedProject = Field(
        default=None,
        description="The project to which the token is restricted, or that of a new client, for which null means "
        "`default`. Null for another role: that of the request's own token, or every project.",
    )


class EnrolmentCreate(BaseModel):
    """A request for a single-use token with which a worker enrols as this client."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client_id: ClientId
    label: str = Field(default="", max_length=100)
    lifetime_seconds: LifetimeSeconds = DAY_SECONDS
    project: WantedProject = Field(
        default=None, description="The project of a new client. Null: that of the token, or else `default`."
    )


class TokenView(View):
    """A token without its secret, which is returned only once, at creation."""

    id: UUID
    role: Role
    project: ProjectName | None = Field(
        default=None,
        description="The project to which the owner is restricted. Null: none. "
        "A worker is restricted to its client's project.",
    )
    client_id: ClientId | None
    label: str
    created_at: datetime
    expires_at: datetime | None = None
    used_at: datetime | None = Field(
        default=None, description="When an enrolment token was exchanged for a worker's token."
    )
    revoked_at: datetime | None
    subject: str | None = Field(
        default=None,
        description="The person whose sign-in at an OpenID Connect provider this is: the issuer, a space, and the "
        "person's identifier there. No one has the secret of such a token: it ends with the browser's session.",
    )


class TokenCreated(TokenView):
    """A new token with its secret. No other answer contains the secret."""

    secret: str = Field(repr=False)
