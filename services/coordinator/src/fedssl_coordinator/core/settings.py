"""Settings, from the environment (`FEDSSL_DATABASE_URL`, ...), or from files of these names in FEDSSL_SECRETS_DIR."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fedssl.artifacts.s3.address import S3Address
from fedssl.errors import SpecError


class Settings(BaseSettings):
    """Where the coordinator's servers and files are, and how patient it is."""

    model_config = SettingsConfigDict(env_prefix="FEDSSL_", frozen=True)

    database_url: SecretStr = Field(description="postgresql+psycopg://user:password@host:port/database")
    database_direct_url: SecretStr | None = Field(
        default=None,
        description="Postgres itself, where database_url leads to a pooler in transaction mode (PgBouncer): migrations "
        "and locks that outlive a transaction need it.",
    )
    database_connections: int = Field(
        default=30, ge=15, description="Connections to Postgres that one process opens at most; 10 of them stay open."
    )
    database_wait_seconds: float = Field(
        default=30.0, gt=0, description="Longest that a request waits for one of them; then it is told to come back."
    )
    redis_url: SecretStr = Field(description="redis://:password@host:port/0")
    store_path: Path | None = Field(default=None, description="Folder of the artifact store.")
    store_url: str | None = Field(
        default=None,
        description="The artifact store in an object store instead: s3://BUCKET/PREFIX?endpoint=https://HOST&region=R",
    )
    store_cache_path: Path | None = Field(
        default=None, description="With FEDSSL_STORE_URL: folder of local copies, and of files that are being checked."
    )
    store_cache_bytes: int = Field(
        default=20 * 10**9, ge=0, description="Copies in that folder take this at most; what is in use stays."
    )
    store_direct: bool = Field(
        default=False, description="Clients send and fetch artifacts at the object store itself, at signed addresses."
    )
    s3_access_key_id: SecretStr | None = Field(
        default=None, description="Key of the object store; None: AWS's own variables, files and roles."
    )
    s3_secret_access_key: SecretStr | None = Field(default=None, description="Its secret.")
    sweep_seconds: float = Field(default=2.0, gt=0, description="How often beat looks for leases and rounds past due.")
    claim_wait_seconds: float = Field(default=25.0, ge=0, description="Longest that a claim is held open.")
    checkpoint_seconds: float = Field(
        default=30.0,
        ge=0,
        description="A training on the coordinator is saved at the end of an epoch, but no more often than this.",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|auto|cuda(:\d{1,3})?)$",
        description="What distillation and evaluation run on: cpu, cuda, cuda:N, or auto (a GPU where there is one).",
    )
    aggregator_threads: int = Field(default=1, ge=1, description="torch threads; 1 gives the same bits everywhere.")
    public_data: Path | None = Field(
        default=None, description="Folder of public images that runs may name, beside the known data sets (FLESD)."
    )
    max_dataset_bytes: int = Field(
        default=20 * 10**9, ge=1, description="Largest file of a public or evaluation data set that operators may send."
    )
    collect_seconds: float = Field(
        default=600.0, gt=0, description="How often what is no longer needed is removed from the store."
    )
    keep_updates_seconds: float = Field(
        default=0.0, ge=0, description="How long single clients' updates stay after their round was closed."
    )
    keep_broadcasts_seconds: float = Field(
        default=30 * 86_400.0,
        ge=0,
        description="How long a round's broadcast stays after the round was closed; a run's first, newest and "
        "best-judged ones always do.",
    )
    keep_unreferenced_seconds: float = Field(
        default=86_400.0,
        ge=60,
        description="How long artifacts stay that nothing refers to (data sets that were never registered), files "
        "that no row knows of, and uploads that broke off.",
    )
    upload_seconds: float = Field(
        default=86400.0, gt=0, description="How long an upload that has stopped may still be continued."
    )
    stall_seconds: float = Field(
        default=30.0, gt=0, description="A transfer may take hours, but one that stands still for so long is cut off."
    )
    stall_bytes: int = Field(
        default=4096, ge=1, description="A body of which less than this comes in stall_seconds stands still."
    )
    metrics_host: str = Field(default="127.0.0.1", description="Where Celery's processes answer Prometheus.")
    metrics_port: int | None = Field(
        default=None, ge=1, le=65535, description="At which port; None: they do not. The API has /metrics."
    )
    max_body_bytes: int = Field(default=1 << 20, description="Largest JSON body that is read.")
    max_bodies_bytes: int = Field(
        default=64 << 20, description="Bodies that one API process holds in all; strangers' get half of it."
    )
    max_head_bytes: int = Field(default=1 << 16, ge=1 << 12, description="Longest head of a request: path and headers.")
    head_seconds: float = Field(default=10.0, gt=0, description="How long a connection may take to send that head.")
    max_connections: int = Field(default=1000, ge=1, description="Connections of one API process; more get a 503.")
    token_requests_per_minute: int = Field(default=6000, ge=0, description="Requests of one token; 0: any number.")
    address_requests_per_minute: int = Field(
        default=3000, ge=0, description="Requests of one address that show no token known to be valid; 0: any number."
    )
    failed_sign_ins_per_minute: int = Field(
        default=60, ge=0, description="Requests of one address whose token was not valid; 0: any number."
    )
    recorded_refusals_per_minute: int = Field(
        default=20, ge=0, description="Refused requests of one client that become events each; 0: any number."
    )
    max_waiting_per_token: int = Field(
        default=32, ge=1, description="Claims and event streams of one token that one API process holds open."
    )
    statement_seconds: float = Field(default=30.0, gt=0, description="Longest that Postgres works for one statement.")
    lock_seconds: float = Field(default=10.0, gt=0, description="Longest that a request waits for a lock in Postgres.")
    idle_transaction_seconds: float = Field(
        default=60.0, gt=0, description="Postgres ends a request's transaction that says nothing for this long."
    )

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
    def _bodies_fit(self) -> Self:
        if self.max_bodies_bytes < 2 * self.max_body_bytes:
            raise ValueError("FEDSSL_MAX_BODIES_BYTES must be twice FEDSSL_MAX_BODY_BYTES at least")
        return self


@lru_cache
def settings() -> Settings:
    """The process's settings. Raises pydantic's ValidationError, naming what the environment lacks."""
    return Settings(_secrets_dir=os.environ.get("FEDSSL_SECRETS_DIR"))
