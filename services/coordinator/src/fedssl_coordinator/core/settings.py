"""Settings from the environment (`FEDSSL_DATABASE_URL`, ...), or from files with these names in FEDSSL_SECRETS_DIR."""

import ipaddress
import os
import re
import ssl
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlencode, urlsplit

from pydantic import Field, FilePath, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fedssl.artifacts.s3.address import S3Address
from fedssl.client.addresses import is_private
from fedssl.errors import SpecError
from fedssl.protocol.projects import Grant


class Settings(BaseSettings):
    """Addresses of the coordinator's servers and files, limits and time limits."""

    model_config = SettingsConfigDict(
        env_prefix="FEDSSL_", frozen=True, env_ignore_empty=True, hide_input_in_errors=True
    )

    database_url: SecretStr = Field(description="postgresql+psycopg://user:password@host:port/database")
    database_direct_url: SecretStr | None = Field(
        default=None,
        description="Postgres itself, if database_url is the address of a pooler in transaction mode (PgBouncer): "
        "migrations, and locks that outlive a transaction, need it.",
    )
    database_connections: int = Field(
        default=30, ge=15, description="Most connections to Postgres per process; 10 of them stay open."
    )
    database_wait_seconds: float = Field(
        default=30.0, gt=0, description="How long a request waits for one of them at most; then it receives a 503."
    )
    redis_url: SecretStr = Field(description="redis://:password@host:port/0, or rediss:// with TLS")
    redis_ca_file: FilePath | None = Field(
        default=None,
        description="Certificates of the authorities to trust for rediss://, in PEM, instead of the system's.",
    )
    store_path: Path | None = Field(default=None, description="Folder of the artifact store.")
    store_url: str | None = Field(
        default=None,
        description="Object store to use as the artifact store instead: s3://BUCKET/PREFIX?endpoint=https://HOST&region=R",
    )
    store_cache_path: Path | None = Field(
        default=None, description="With FEDSSL_STORE_URL: folder for local copies and for files that are being checked."
    )
    store_cache_bytes: int = Field(
        default=20 * 10**9,
        ge=0,
        description="Maximum size of the copies in that folder; copies in use are always kept.",
    )
    store_direct: bool = Field(
        default=False,
        description="Clients transfer artifacts directly to and from the object store, with signed addresses.",
    )
    s3_access_key_id: SecretStr | None = Field(
        default=None,
        description="Access key of the object store. If it is not set, AWS's own variables, files and roles are used.",
    )
    s3_secret_access_key: SecretStr | None = Field(default=None, description="Secret of the access key.")
    sweep_seconds: float = Field(default=2.0, gt=0, description="How often beat checks for overdue leases and rounds.")
    claim_wait_seconds: float = Field(default=25.0, ge=0, description="How long a claim is held open at most.")
    checkpoint_seconds: float = Field(
        default=30.0,
        ge=0,
        description="Training on the coordinator is saved at the end of an epoch, but at most once in this time.",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|auto|cuda(:\d{1,3})?)$",
        description="Device for distillation and evaluation: cpu, cuda, cuda:N, or auto (a GPU if there is one).",
    )
    aggregator_threads: int = Field(
        default=1, ge=1, description="Threads that torch uses; 1 gives the same bits on every machine."
    )
    public_data: Path | None = Field(
        default=None,
        description="Folder of public images that runs may name, in addition to the known data sets (FLESD).",
    )
    max_dataset_bytes: int = Field(
        default=20 * 10**9, ge=1, description="Largest file of a public or evaluation data set that operators may send."
    )
    collect_seconds: float = Field(
        default=600.0, gt=0, description="How often artifacts that are no longer needed are removed from the store."
    )
    keep_updates_seconds: float = Field(
        default=0.0, ge=0, description="How long the updates of single clients are kept after their round has closed."
    )
    keep_broadcasts_seconds: float = Field(
        default=30 * 86_400.0,
        ge=0,
        description="How long a round's broadcast is kept after the round has closed; a run's first, newest and "
        "best evaluated broadcasts are always kept.",
    )
    keep_unreferenced_seconds: float = Field(
        default=86_400.0,
        ge=60,
        description="How long artifacts without references (data sets that were never registered), files without a "
        "row, and interrupted uploads are kept.",
    )
    upload_seconds: float = Field(default=86400.0, gt=0, description="How long an interrupted upload can be resumed.")
    stall_seconds: float = Field(
        default=30.0, gt=0, description="A transfer may take hours, but one that stalls for this long is cut off."
    )
    stall_bytes: int = Field(
        default=4096, ge=1, description="A body has stalled if fewer bytes than this arrive within stall_seconds."
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="Address at which Celery's processes serve metrics for Prometheus."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port for these metrics. If it is not set, they are not served. The API has /metrics.",
    )
    health_host: str = Field(
        default="127.0.0.1",
        description="Address of the API's separate listener for /healthz, /readyz and /metrics, which has no TLS.",
    )
    health_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port of that listener, which no client should reach. If it is not set, there is none. The API's "
        "own address has these paths too.",
    )
    notify_seconds: float = Field(
        default=5.0, gt=0, description="How often notifications that are due for another attempt are delivered."
    )
    notify_allow_http: bool = Field(
        default=False, description="Webhooks may have http URLs, which any machine on the way can read."
    )
    notify_allow_networks: str = Field(
        default="",
        description="Private networks to which webhooks may be sent, separated by commas: 10.1.0.0/16, fd00::/8.",
    )
    notify_ca_file: Path | None = Field(
        default=None, description="Certificates (PEM) of further authorities, for webhooks and the SMTP server."
    )
    smtp_host: str | None = Field(
        default=None, description="The SMTP server for e-mail notifications. If it is not set, there are none."
    )
    smtp_port: int | None = Field(default=None, ge=1, le=65535, description="Its port: 587, or 465 for tls.")
    smtp_security: Literal["starttls", "tls", "none"] = Field(
        default="starttls", description="How the connection is encrypted; none only for a relay that needs no password."
    )
    smtp_user: str | None = Field(default=None, description="The user at the SMTP server, if it asks for one.")
    smtp_password: SecretStr | None = Field(default=None, description="The user's password.")
    smtp_password_file: Path | None = Field(default=None, description="A file with the user's password.")
    smtp_from: str | None = Field(default=None, max_length=254, description="The sender's address.")
    max_body_bytes: int = Field(default=1 << 20, description="Largest JSON body that is accepted.")
    max_bodies_bytes: int = Field(
        default=64 << 20,
        description="Total size of the bodies that one API process holds; unknown callers share one half.",
    )
    max_head_bytes: int = Field(default=1 << 16, ge=1 << 12, description="Largest head of a request: path and headers.")
    head_seconds: float = Field(
        default=10.0,
        gt=0,
        description="How long a connection may take to send the head of a request; less if there are many.",
    )
    max_connections: int = Field(
        default=1000,
        ge=1,
        description="Most connections of one API process. Half of them are kept for callers that have shown a valid "
        "token; a further connection closes one without.",
    )
    max_connections_per_address: int = Field(
        default=250,
        ge=1,
        description="An address with more connections without a valid token than this has 1 s to send a head. Does "
        "not apply to trusted proxies. If all places are taken, a token with more loses its oldest connection.",
    )
    token_requests_per_minute: int = Field(
        default=6000, ge=0, description="Limit of requests with one token; 0 means no limit."
    )
    address_requests_per_minute: int = Field(
        default=3000,
        ge=0,
        description="Limit of requests from one address without a token that is known to be valid; 0 means none.",
    )
    failed_sign_ins_per_minute: int = Field(
        default=60, ge=0, description="Limit of requests from one address whose token was invalid; 0 means no limit."
    )
    recorded_refusals_per_minute: int = Field(
        default=20,
        ge=0,
        description="Limit of refused requests of one client that are recorded as events; 0 means no limit.",
    )
    max_waiting_per_token: int = Field(
        default=32, ge=1, description="Most claims and event streams of one token that one API process holds open."
    )
    oidc_issuer: str | None = Field(
        default=None,
        description="https address of an OpenID Connect provider at which people may sign in to the web page.",
    )
    oidc_client_id: str | None = Field(default=None, description="Id of the coordinator at that provider.")
    oidc_client_secret: SecretStr | None = Field(
        default=None, description="Its secret there. Not set: a public client, which only PKCE protects."
    )
    oidc_scopes: str = Field(default="openid profile email", description="Scopes to ask the provider for.")
    oidc_roles_claim: str = Field(
        default="groups",
        min_length=1,
        description="Claim that decides a person's role: a text or a list; dots lead into nested objects.",
    )
    oidc_roles: dict[str, Grant] = Field(
        default_factory=dict,
        description='Which value of the claim gives which role, as JSON: {"ml-team": "operator"}; in one project: '
        '{"heart-team": "cardiology:operator"}.',
    )
    oidc_ca_file: Path | None = Field(
        default=None, description="Authorities to trust for the provider instead of the machine's, in PEM."
    )
    statement_seconds: float = Field(default=30.0, gt=0, description="How long one statement may take in Postgres.")
    lock_seconds: float = Field(
        default=10.0, gt=0, description="How long a request waits for a lock in Postgres at most."
    )
    idle_transaction_seconds: float = Field(
        default=60.0, gt=0, description="Postgres ends a request's transaction that is idle for this long."
    )

    @model_validator(mode="after")
    def _addresses_can_be_read(self) -> Self:
        for name in ("database_url", "database_direct_url", "redis_url"):
            if (address := getattr(self, name)) is not None:
                _require_address(f"FEDSSL_{name.upper()}", address.get_secret_value(), _SCHEMES[name])
        return self

    @model_validator(mode="after")
    def _one_store(self) -> Self:
        if self.store_url is None and self.store_path is None:
            raise ValueError("set FEDSSL_STORE_PATH, a folder, or FEDSSL_STORE_URL, an object store")
        if self.store_url is not None and self.store_cache_path is None:
            raise ValueError("FEDSSL_STORE_URL needs FEDSSL_STORE_CACHE_PATH, a folder for local copies")
        if self.store_url is not None:
            try:
                S3Address.parse(self.store_url)
            except SpecError as error:
                raise ValueError(f"FEDSSL_STORE_URL: {error}") from None
        if (self.s3_access_key_id is None) != (self.s3_secret_access_key is None):
            raise ValueError("FEDSSL_S3_ACCESS_KEY_ID and FEDSSL_S3_SECRET_ACCESS_KEY belong together")
        if self.store_direct and self.store_url is None:
            raise ValueError("FEDSSL_STORE_DIRECT needs FEDSSL_STORE_URL: a folder has no signed addresses")
        return self

    @model_validator(mode="after")
    def _redis_has_tls(self) -> Self:
        if self.redis_ca_file is not None and not self.redis_url.get_secret_value().startswith("rediss://"):
            raise ValueError("FEDSSL_REDIS_CA_FILE is for Redis with TLS: FEDSSL_REDIS_URL must begin with rediss://")
        return self

    @model_validator(mode="after")
    def _one_provider(self) -> Self:
        if self.oidc_issuer is None:
            if self.oidc_client_id is not None or self.oidc_roles:
                raise ValueError("FEDSSL_OIDC_CLIENT_ID and FEDSSL_OIDC_ROLES need FEDSSL_OIDC_ISSUER, the provider")
            return self
        if not is_private(self.oidc_issuer) or {"?", "#"} & set(self.oidc_issuer):
            raise ValueError(f"FEDSSL_OIDC_ISSUER must be an https:// address without a query: {self.oidc_issuer}")
        if not self.oidc_client_id:
            raise ValueError("FEDSSL_OIDC_ISSUER needs FEDSSL_OIDC_CLIENT_ID, the coordinator's id at the provider")
        if not self.oidc_roles:
            raise ValueError('FEDSSL_OIDC_ISSUER needs FEDSSL_OIDC_ROLES, such as {"ml-team": "operator"}')
        if "openid" not in self.oidc_scopes.split():
            raise ValueError("FEDSSL_OIDC_SCOPES must contain openid")
        return self

    @model_validator(mode="after")
    def _notifications_are_safe(self) -> Self:
        try:
            self.allowed_networks()
        except ValueError as error:
            raise ValueError(f"FEDSSL_NOTIFY_ALLOW_NETWORKS: {error}; write networks such as 10.1.0.0/16") from None
        if self.smtp_host is not None and not re.fullmatch(r"[^\s@<>]+@[^\s@<>]+", self.smtp_from or ""):
            raise ValueError("FEDSSL_SMTP_HOST needs FEDSSL_SMTP_FROM, the sender's address")
        has_given = bool(self.smtp_password and self.smtp_password.get_secret_value())  # compose sets it empty
        if has_given and self.smtp_password_file is not None:
            raise ValueError("set FEDSSL_SMTP_PASSWORD or FEDSSL_SMTP_PASSWORD_FILE, not both")
        has_password = has_given or self.smtp_password_file is not None
        if has_password != (self.smtp_user is not None):
            raise ValueError("FEDSSL_SMTP_USER and its password belong together")
        if has_password and self.smtp_security == "none":
            raise ValueError("FEDSSL_SMTP_SECURITY=none would send the password unencrypted: use starttls or tls")
        return self

    def allowed_networks(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        """Return the private networks to which webhooks may be sent. Raises ValueError."""
        parts = [part.strip() for part in self.notify_allow_networks.split(",") if part.strip()]
        return [ipaddress.ip_network(part) for part in parts]

    def outgoing_tls(self) -> ssl.SSLContext:
        """Return a context for connections to webhooks and the SMTP server, which checks their certificates."""
        context = ssl.create_default_context()
        if self.notify_ca_file is not None:
            context.load_verify_locations(self.notify_ca_file)
        return context

    def smtp_secret(self) -> str:
        """Return the password at the SMTP server. Raises OSError if its file cannot be read."""
        if self.smtp_password_file is not None:
            return self.smtp_password_file.read_text().strip()
        return "" if self.smtp_password is None else self.smtp_password.get_secret_value()

    @model_validator(mode="after")
    def _bodies_fit(self) -> Self:
        if self.max_bodies_bytes < 2 * self.max_body_bytes:
            raise ValueError("FEDSSL_MAX_BODIES_BYTES must be at least twice FEDSSL_MAX_BODY_BYTES")
        return self

    @property
    def redis_address(self) -> str:
        """The URL of Redis for its clients, with the authorities to trust. It contains the password."""
        url = self.redis_url.get_secret_value()
        if self.redis_ca_file is None:
            return url
        authorities = urlencode({"ssl_cert_reqs": "required", "ssl_ca_certs": self.redis_ca_file})
        return f"{url}{'&' if '?' in url else '?'}{authorities}"


_POSTGRES = ("postgresql+psycopg", "postgresql")
_SCHEMES = {"database_url": _POSTGRES, "database_direct_url": _POSTGRES, "redis_url": ("redis", "rediss")}


def _require_address(name: str, address: str, schemes: tuple[str, ...]) -> None:
    """Raise ValueError, without any part of the address, if clients could parse it differently than it was meant."""
    scheme, _, rest = address.partition("://")
    if scheme not in schemes or not rest:
        raise ValueError(f"{name} must begin with {' or '.join(f'{each}://' for each in schemes)}")
    try:
        parts = urlsplit(address)
        is_readable = parts.port != 0 and rest.count("@") <= 1 and "@" not in f"{parts.path}{parts.query}"
    except ValueError:  # the port is not a number
        is_readable = False
    if not is_readable or parts.fragment:
        raise ValueError(
            f"{name} cannot be read: it is {schemes[0]}://USER:PASSWORD@HOST:PORT/NAME, and each character of the user "
            "and password other than letters, digits, - . and _ must be percent-encoded (p@ss is p%40ss)"
        )


@lru_cache
def settings() -> Settings:
    """Return the process's settings. Raises pydantic's ValidationError, which names what is missing or invalid."""
    return Settings(_secrets_dir=os.environ.get("FEDSSL_SECRETS_DIR"))
