"""The data owner's policy: a TOML file that says what may leave this machine, whatever a coordinator asks for."""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import structlog
from pydantic import Field, StringConstraints, ValidationError, model_validator

from fedssl.artifacts.permission import permits_metric, refusal
from fedssl.errors import FedSSLError
from fedssl.protocol.base import ClientId, StrictModel
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.policy import AllowRule, Pattern, PolicyNotice
from fedssl.protocol.work import Metrics, Progress, WorkItem
from fedssl_worker.settings import SettingsError
from fedssl_worker.validation import describe_problems

log = structlog.get_logger()

NO_POLICY = "none"
"""What stands for the digest where there is no policy."""

_MAX_BYTES = 1 << 20
_PORTS = {"http": 80, "https": 443}
_MESSAGES = {"extra_forbidden": "there is no such key: correct its spelling", "missing": "is missing"}
_PLAIN_NAME = re.compile(r"[a-z0-9_-]+")

Fingerprint = Annotated[str, StringConstraints(pattern=r"^ed25519:[0-9a-f]{64}$")]


Store = Annotated[str, StringConstraints(pattern=r"^https?://([^\[\]/?#@:\s]+|\[[0-9a-f:.]+\])(:\d{1,5})?/?$")]
"""An object store's server, https://HOST or https://HOST:PORT."""


class PolicyError(SettingsError):
    """The policy cannot be read, or is not for this worker. Nothing leaves until it is."""


class NotPermitted(FedSSLError):
    """The policy keeps this work's update back; the message is the reason that the coordinator is given."""


class SecureAggregation(StrictModel):
    """`[secagg]`: what a secure aggregation must be like for rules with `secure = "required"`."""

    min_cohort: int = Field(default=3, ge=3)
    collusion: int = Field(default=0, ge=0)
    pins: dict[ClientId, Fingerprint] = {}


class Privacy(StrictModel):
    """`[dp]`: whether the training must be differentially private."""

    require: Literal["none", "example"] = "none"
    epsilon_max: Annotated[str, StringConstraints(pattern=r"^\d{1,6}(\.\d{1,6})?$")] | None = None


class MetricRules(StrictModel):
    """`[metrics]`: names of the numbers that may leave in runs of any method; `*` stands for any characters."""

    allow: tuple[Pattern, ...] = Field(default=(), max_length=256)


class LedgerRules(StrictModel):
    """`[ledger]`: how what leaves is written down."""

    sign: bool = True
    segment_entries: int = Field(default=1000, ge=2, le=1_000_000)


class Policy(StrictModel):
    """The file. Everything that is not allowed is denied, and a key that is not known is an error."""

    version: Literal[1] = Field(alias="schema")
    client: ClientId = Field(description="Whose policy it is: the client that the worker's token is for.")
    coordinator: str = Field(description="The only address that the worker talks to, but for `stores`.")
    stores: tuple[Store, ...] = Field(
        default=(), max_length=16, description="Object stores at which its artifacts may be fetched and sent directly."
    )
    allow: tuple[AllowRule, ...] = Field(default=(), max_length=255)
    secagg: SecureAggregation = SecureAggregation()
    dp: Privacy = Privacy()
    metrics: MetricRules = MetricRules()
    ledger: LedgerRules = LedgerRules()

    @model_validator(mode="after")
    def _methods_exist(self) -> "Policy":
        for rule in self.allow:
            for name in rule.methods:
                if _PLAIN_NAME.fullmatch(name) and name not in METHOD_CONFIGS:
                    raise ValueError(f"there is no method {name}: `fedssl method ls` lists them")
        return self

    def notice(self, digest: str) -> PolicyNotice:
        """What the coordinator is told of it."""
        allow = self.allow
        if names := self.metrics.allow:
            allow += (AllowRule(artifact="metrics", methods=("*",), tensors=names),)
        return PolicyNotice(digest=digest, allow=allow, privacy=self.dp.require)

    def without_effect(self) -> list[str]:
        """Settings that are understood but that nothing in this version acts on."""
        idle = []
        if "secagg" in self.model_fields_set and all(rule.secure == "allowed" for rule in self.allow):
            idle.append('[secagg]: no rule has secure = "required", so updates leave as they are')
        if self.dp.epsilon_max is not None and self.dp.require == "none":
            idle.append('[dp] epsilon_max: require is "none", so nothing is counted')
        return idle


def read_policy(path: Path) -> tuple[Policy, str]:
    """The policy in a file, and the sha256 of its bytes. Raises PolicyError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"cannot read the policy {path}: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise PolicyError(f"the policy {path} has more than {_MAX_BYTES} bytes: is it the right file?")
    try:
        document = tomllib.loads(content.decode("utf-8"))
        return Policy.model_validate(document), hashlib.sha256(content).hexdigest()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(f"the policy {path} is not TOML: {error}") from None
    except ValidationError as error:
        problems = describe_problems(error, lambda place: ".".join(map(str, place)), _MESSAGES)
        raise PolicyError(f"the policy {path} cannot be used: {problems}") from None


class PolicyEnforcer:
    """The policy in force. Without a file there is none: what leaves is then the method's plan, and all its numbers."""

    def __init__(self, path: Path | None, coordinator: str) -> None:
        """Raises PolicyError where the file cannot be used or names another coordinator."""
        self._path = path
        self._coordinator = coordinator
        self._client_id: str | None = None
        self._policy: Policy | None = None
        self.digest = NO_POLICY
        self.ledger = LedgerRules()
        self.notice: PolicyNotice | None = None
        self.reload()

    def reload(self) -> bool:
        """Read the file again; whether it is another policy than before. Raises PolicyError."""
        if self._path is None:
            return False
        policy, digest = read_policy(self._path)
        self._require_ours(policy)
        if digest == self.digest:
            return False
        self._policy, self.digest = policy, digest
        self.notice, self.ledger = policy.notice(digest), policy.ledger
        for setting in policy.without_effect():
            log.warning("the policy holds a setting without effect", setting=setting)
        return True

    def require_client(self, client_id: str) -> None:
        """From now on the policy must be this client's. Raises PolicyError where it is not."""
        self._client_id = client_id
        if self._policy is not None:
            self._require_ours(self._policy)

    def require_permitted(self, item: WorkItem) -> None:
        """Raises NotPermitted unless the whole update of this work may leave."""
        if self.notice is None:
            return
        if (why := refusal(self.notice, item.spec, item.plan, item.round_number)) is not None:
            raise NotPermitted(f"the data owner's policy ({self.digest[:8]}) does not permit this work: {why}")

    def permits_store(self, server: str) -> bool:
        """Whether artifacts may be fetched and sent at an object store, https://HOST:PORT, of the coordinator's."""
        return self._policy is None or _normalised_address(server) in map(_normalised_address, self._policy.stores)

    def permitted_metrics(self, item: WorkItem, metrics: Metrics) -> Metrics:
        """Those numbers that may leave."""
        return {name: value for name, value in metrics.items() if self._permits_number(item, name)}

    def permitted_progress(self, item: WorkItem, progress: Progress) -> Progress:
        """The progress without numbers that may not leave: its loss and its speed are metrics of those names."""
        kept = [name for name in ("loss", "images_per_second") if not self._permits_number(item, name)]
        return progress.model_copy(update=dict.fromkeys(kept)) if kept else progress

    def _permits_number(self, item: WorkItem, name: str) -> bool:
        return self.notice is None or permits_metric(self.notice, item.spec.method.name, name)

    def _require_ours(self, policy: Policy) -> None:
        if _normalised_address(policy.coordinator) != _normalised_address(self._coordinator):
            raise PolicyError(
                f"the policy {self._path} is for the coordinator {policy.coordinator}, and this worker was started for "
                f"{self._coordinator}: it talks to no other"
            )
        if self._client_id is not None and policy.client != self._client_id:
            raise PolicyError(
                f"the policy {self._path} is {policy.client}'s, and this worker's token {self._client_id}'s"
            )


def _normalised_address(url: str) -> tuple[str, str, int | None, str]:
    """An address in one form, so that `https://HOST` and `https://HOST:443/` are the same."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return url, "", None, ""
    return parts.scheme, parts.hostname or "", port or _PORTS.get(parts.scheme), parts.path.rstrip("/")
