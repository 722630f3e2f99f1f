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
    max_body_bytes: int = Field(default=1 << 20, description="Largest JSON body that is read.")


@lru_cache
def settings() -> Settings:
    """The process's settings. Raises pydantic's ValidationError, naming what the environment lacks."""
    return Settings(_secrets_dir=os.environ.get("FEDSSL_SECRETS_DIR"))
