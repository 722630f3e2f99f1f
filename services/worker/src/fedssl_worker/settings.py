"""The settings of a worker: options of `fedssl-worker run`, or environment variables that begin with FEDSSL_WORKER_."""

import shlex
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from fedssl.errors import FedSSLError
from fedssl.protocol.data import MAX_UNREADABLE, ShareLost
from fedssl.protocol.model import EncoderConfig, read_encoder
from fedssl_worker.options import WhenUnset, describe_mistakes


class SettingsError(FedSSLError):
    """The worker cannot start with these settings."""


class Settings(BaseSettings):
    """Every setting of a worker. Each is an option as well, except secrets: a command line is visible to others."""

    # An empty variable counts as unset: a compose file can pass on an unset option only as an empty one.
    model_config = SettingsConfigDict(env_prefix="FEDSSL_WORKER_", env_ignore_empty=True, frozen=True, extra="forbid")

    coordinator: str = Field(description="Address of the coordinator, for example https://HOST.")
    data: str = Field(
        description="The images: a folder (with one sub-folder per class, or without), an .npz file, or the name of a "
        "known data set."
    )
    labels: Annotated[str | None, WhenUnset("none, and work that needs labels is declined")] = Field(
        default=None,
        description="The labels of the images, for evaluations at the sites and the methods ridge-probe and "
        "classifier: a CSV file (path,label[,group]), or own for those of the folders or of the file. They stay here. "
        "Only what is computed from them leaves, as the policy allows: counts per class, and in some runs sums over "
        "images or a classifier.",
    )
    label_names: Path | None = Field(
        default=None, description="CSV file (own,federation) with a run's names for the classes of --labels."
    )
    state: Path = Field(description="Folder for this worker's own files. Keep it between starts.")
    enrolment_token: SecretStr | None = None
    enrolment_token_file: Path | None = Field(
        default=None, description="File with an enrolment token for the first start; only its owner may read it."
    )
    token: SecretStr | None = None
    token_file: Annotated[Path | None, WhenUnset("the token that the worker enrolled with")] = Field(
        default=None, description="File with a token; only its owner may read it."
    )
    ca_file: Annotated[Path | None, WhenUnset("the machine's")] = Field(
        default=None, description="Certificates (PEM) of the only authorities that are trusted over https."
    )
    client_cert: Path | None = Field(
        default=None, description="Certificate (PEM) for a coordinator that requires one (mutual TLS)."
    )
    client_key: Annotated[Path | None, WhenUnset("in the certificate's file")] = Field(
        default=None, description="Private key (PEM) of that certificate."
    )
    insecure_http: bool = Field(
        default=False, description="Send the token to another machine over plain http; only for a private network."
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = Field(
        default="auto", description="Device to train on: auto, cpu, cuda or cuda:N."
    )
    gpus: int = Field(
        default=1,
        ge=1,
        le=64,
        description="GPUs of this machine that train each round together. More than 1 needs --device auto or cuda.",
    )
    threads: int = Field(
        default=1, ge=1, le=1024, description="CPU threads. With 1, the results are the same on every machine."
    )
    image_size: Annotated[int | None, WhenUnset("512, and the images' own are registered")] = Field(
        default=None,
        ge=8,
        le=512,
        description="Largest height and width in pixels that a run may ask for. Photographs above 512 need it.",
    )
    channels: Annotated[int | None, WhenUnset("whatever a run asks for")] = Field(
        default=None,
        ge=1,
        le=16,
        description="Most channels that a run may ask for: 1 for grey, 3 for grey or RGB. Another number is for images "
        "with exactly that number; TIFF files with a page per channel need it.",
    )
    max_unreadable: ShareLost = Field(
        default=MAX_UNREADABLE,
        description="Share of the image files that may be unreadable: they are left out. With more, the worker does "
        "not start. A run may allow less (data.max_unreadable).",
    )
    no_image_cache: bool = Field(
        default=False,
        description="Keep no decoded images on this machine's disk: decline runs that ask for it (data.cache_size).",
    )
    rescan: bool = Field(
        default=False,
        description="Read the images again before a round or an evaluation if files were added, removed or changed, "
        "and register their new number. Without it, a run that needs them in another shape is declined after such a "
        "change.",
    )
    public_data: Path | None = Field(
        default=None,
        description="Folder of public images that a run may name (FLESD, FedCA). What is computed from them leaves "
        "this machine.",
    )
    max_public_bytes: int = Field(
        default=20 * 10**9,
        ge=0,
        description="Disk space for public images that the worker fetches from the coordinator; 0 fetches none.",
    )
    max_artifact_bytes: Annotated[int | None, WhenUnset("a quarter of the memory")] = Field(
        default=None,
        ge=1,
        description="Largest broadcast that the worker accepts, and largest update that it makes; work with larger "
        "ones is declined.",
    )
    encoder: Annotated[
        EncoderConfig | None, NoDecode, BeforeValidator(read_encoder), WhenUnset("whatever a run asks for")
    ] = Field(
        default=None,
        description="Encoder that this client can train, for runs whose clients may have different ones (FLESD): a "
        "name such as resnet18, or a table in TOML or JSON such as { name = 'convnet', widths = [32, 64] }.",
    )
    policy: Annotated[Path | None, WhenUnset("whatever the run's method declares may leave")] = Field(
        default=None,
        description="The data owner's policy, a TOML file that limits what may leave, whatever a coordinator asks for.",
    )
    claim_seconds: float = Field(default=25, ge=0, le=60, description="How long one request waits for work.")
    retry_seconds: float = Field(default=30, ge=0, description="How long one request is retried.")
    keep_ended_seconds: float = Field(
        default=7 * 86_400, ge=0, description="How long to keep the client states of a run after it has ended."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages that are logged: debug, info, warning or error."
    )
    metrics_port: Annotated[int | None, WhenUnset("no metrics")] = Field(
        default=None, ge=1, le=65535, description="Port on which the worker serves Prometheus metrics."
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address on which --metrics-port listens.")

    def read_token(self) -> str | None:
        """Return the token, or None if none was given.

        Raises SettingsError if its file cannot be read, or if other users could read it.
        """
        if token := _secret(self.token):
            return token
        return None if self.token_file is None else _read_private(self.token_file)

    def read_enrolment_token(self) -> str | None:
        """Return the enrolment token, or None if none was given or its file was removed after use.

        Raises SettingsError if the file cannot be read, or if other users could read it.
        """
        if token := _secret(self.enrolment_token):
            return token
        if self.enrolment_token_file is None or not self.enrolment_token_file.exists():
            return None
        return _read_private(self.enrolment_token_file)


def read_settings(options: dict[str, Any]) -> Settings:
    """Return the settings of the options that were given, and of the environment. Raises SettingsError."""
    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        raise SettingsError(describe_mistakes(error, Settings)) from None


def _secret(given: SecretStr | None) -> str:
    """Return a variable's value. An empty one counts as unset: some deployments keep the name and remove the value."""
    return "" if given is None else given.get_secret_value().strip()


def _read_private(path: Path) -> str:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise SettingsError(f"other users may read the token in {path}: run chmod 600 {shlex.quote(str(path))}")
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"cannot read the token in {path}: {getattr(error, 'strerror', 'not a text file')}"
        ) from None
    if not token:
        raise SettingsError(f"{path} is empty: put the worker's token into it")
    return token
