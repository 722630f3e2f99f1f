"""What a worker is told at its start: by options, else by environment variables that begin with FEDSSL_WORKER_."""

import stat
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from fedssl.errors import FedSSLError
from fedssl.protocol.model import EncoderConfig, read_encoder


class SettingsError(FedSSLError):
    """The worker cannot start with these settings."""


def _number(value: object) -> object:
    """A variable's text as the number that a Literal wants."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


class Settings(BaseSettings):
    """Every setting of a worker. The token comes from the environment or a file, never from the command line."""

    model_config = SettingsConfigDict(env_prefix="FEDSSL_WORKER_", frozen=True, extra="forbid")

    coordinator: str = Field(description="Address of the coordinator, http://HOST:PORT or https://HOST.")
    data: str = Field(description="The images: a folder, an .npz file, or a data set's name.")
    state: Path = Field(description="Folder of this worker's own files. Keep it: client states live there.")
    token: SecretStr | None = None
    token_file: Path | None = Field(default=None, description="A file with the token, readable by its owner alone.")
    enrolment_token: SecretStr | None = None
    enrolment_token_file: Path | None = Field(
        default=None, description="A file with a one-time token for the first start, readable by its owner alone."
    )
    ca_file: Path | None = Field(
        default=None, description="Certificates (PEM) of the only authorities trusted over https; None: the machine's."
    )
    client_cert: Path | None = Field(
        default=None, description="The certificate (PEM) shown to a coordinator that asks for one: mutual TLS."
    )
    client_key: Path | None = Field(default=None, description="Its private key; None: it is in the certificate's file.")
    insecure_http: bool = Field(default=False, description="Send the token to another machine over plain http.")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads. With one, every machine gets equal bits.")
    image_size: int | None = Field(default=None, ge=8, le=512, description="Bring the images to this size; None: keep.")
    channels: Annotated[Literal[1, 3] | None, BeforeValidator(_number)] = Field(
        default=None, description="Bring the images to grey or RGB; None: keep."
    )
    public_data: Path | None = Field(
        default=None, description="Folder of public images that runs may name beside known data sets (FLESD, FedCA)."
    )
    max_public_bytes: int = Field(
        default=20 * 10**9,
        ge=0,
        description="Disk for public images that are registered with the coordinator and fetched from it; 0: none are.",
    )
    encoder: Annotated[EncoderConfig | None, NoDecode, BeforeValidator(read_encoder)] = Field(
        default=None,
        description="The encoder that this client can train, for runs in which clients may differ (FLESD): a name, or "
        "a table in TOML or JSON. None: whatever a run asks for.",
    )
    policy: Path | None = Field(
        default=None, description="The data owner's policy; None: what the method declares may leave."
    )
    claim_seconds: float = Field(default=25, ge=0, le=60, description="How long one request waits for work.")
    retry_seconds: float = Field(default=30, ge=0, description="How long one request is tried again.")
    keep_ended_seconds: float = Field(
        default=7 * 86_400, ge=0, description="How long the client states of a run stay after it has ended."
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_host: str = Field(default="127.0.0.1", description="Where the worker answers Prometheus.")
    metrics_port: int | None = Field(default=None, ge=1, le=65535, description="At which port; None: it does not.")

    def read_token(self) -> str | None:
        """The token that was given; None: none was. Raises SettingsError where it cannot be read, or others could."""
        if token := _secret(self.token):
            return token
        return None if self.token_file is None else _read_private(self.token_file)

    def read_enrolment_token(self) -> str | None:
        """The enrolment token; None: none was given, or its file was removed once it had been used.

        Raises SettingsError where it cannot be read, or others could.
        """
        if token := _secret(self.enrolment_token):
            return token
        if self.enrolment_token_file is None or not self.enrolment_token_file.exists():
            return None
        return _read_private(self.enrolment_token_file)


def _secret(given: SecretStr | None) -> str:
    """A variable's; an empty one is not set, as a deployment leaves it that keeps the name and removes the value."""
    return "" if given is None else given.get_secret_value().strip()


def _read_private(path: Path) -> str:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise SettingsError(f"others than its owner may read the token in {path}: run chmod 600 {path}")
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"cannot read the token in {path}: {getattr(error, 'strerror', 'not a text file')}"
        ) from None
    if not token:
        raise SettingsError(f"{path} is empty: put the worker's token into it")
    return token
