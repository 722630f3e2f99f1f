"""Settings, from the environment (`FEDSSL_DATABASE_URL`, ...), or from files of these names in FEDSSL_SECRETS_DIR."""

import os
from functools import lru_cache
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where the coordinator's servers and files are, and how patient it is."""

    model_config = SettingsConfigDict(env_prefix="FEDSSL_", frozen=True)

    database_url: SecretStr = Field(description="postgresql+psycopg://user:password@host:port/database")
    redis_url: SecretStr = Field(description="redis://:password@host:port/0")
    store_path: Path = Field(description="Folder of the artifact store.")
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
    max_waiting_per_token: int = Field(
        default=32, ge=1, description="Claims and event streams of one token that one API process holds open."
    )
    statement_seconds: float = Field(default=30.0, gt=0, description="Longest that Postgres works for one statement.")
    lock_seconds: float = Field(default=10.0, gt=0, description="Longest that a request waits for a lock in Postgres.")
    idle_transaction_seconds: float = Field(
        default=60.0, gt=0, description="Postgres ends a request's transaction that says nothing for this long."
    )


@lru_cache
def settings() -> Settings:
    """The process's settings. Raises pydantic's ValidationError, naming what the environment lacks."""
    return Settings(_secrets_dir=os.environ.get("FEDSSL_SECRETS_DIR"))
