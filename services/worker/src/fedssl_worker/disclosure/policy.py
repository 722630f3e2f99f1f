"""The data owner's policy: a TOML file that limits what may leave this machine, whatever a coordinator asks for."""

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, ValidationError, model_validator

from fedssl.artifacts.permission import evaluation_rule, fewest_images, permits_metric, refusal
from fedssl.errors import FedSSLError
from fedssl.protocol.base import ClientId, StrictModel
from fedssl.protocol.evaluation import DEFAULT_MIN_COUNT
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.policy import ABOUT_IMAGES, SITE_ARTIFACTS, AllowRule, Pattern, PolicyNotice, SiteArtifact
from fedssl.protocol.site_work import SiteEvaluationItem
from fedssl.protocol.validation import describe_problems
from fedssl.protocol.work import CheckNumbers, Metrics, Progress, Resources, WorkItem
from fedssl_worker.settings import SettingsError

NO_POLICY = "none"
"""Takes the place of the policy's digest if there is no policy."""

PROGRESS_METRICS = ("loss", "images_per_second")
REPORTED = (*PROGRESS_METRICS, *Resources.model_fields)
"""The numbers of heartbeats that leave only if the policy allows metrics of these names."""

_MAX_BYTES = 1 << 20
_PORTS = {"http": 80, "https": 443}
_PLAIN_NAME = re.compile(r"[a-z0-9_-]+")
_MESSAGES = {"extra_forbidden": "there is no such key: correct its spelling", "missing": "is missing"}
NOT_ENFORCED = {
    "dp.epsilon_max": (
        "this version has no differential privacy and does not enforce this limit: remove epsilon_max. To refuse all "
        'work until there is differential privacy, set require = "example" in [dp]'
    ),
}
"""Planned keys. A policy that has one is refused, because its owner would rely on a limit that does not hold."""

Store = Annotated[str, StringConstraints(pattern=r"^https?://([^\[\]/?#@:\s]+|\[[0-9a-f:.]+\])(:\d{1,5})?/?$")]
"""An object store's server, https://HOST or https://HOST:PORT."""


class PolicyError(SettingsError):
    """The policy cannot be read, or is not for this worker. Nothing leaves until that is corrected."""


class NotPermitted(FedSSLError):
    """The policy does not permit this work's update to leave. The coordinator receives the message as the reason."""


class Privacy(StrictModel):
    """`[dp]`: whether training must be differentially private.

    No training is so yet, and `example` refuses all work.
    """

    require: Literal["none", "example"] = "none"


Pin = Annotated[str, StringConstraints(pattern=r"^ed25519:[0-9a-f]{64}$")]
"""A worker's identity key, as `fedssl client show` has it."""


class SecureRules(StrictModel):
    """`[secagg]`: what a secure round must have before this worker takes part in it."""

    min_cohort: int = Field(default=3, ge=3, le=10_000, description="The smallest number of updates in a sum.")
    collusion: int = Field(default=0, ge=0, le=9_998, description="How many clients may collude with the coordinator.")
    pins: dict[ClientId, Pin] | None = Field(
        default=None,
        max_length=10_000,
        description="The identity key of each other client that may take part. Without pins, the coordinator decides "
        "who the clients are, and could invent them.",
    )


class MetricRules(StrictModel):
    """`[metrics]`: names of the metrics that may leave in runs of any method; `*` stands for any characters."""

    allow: tuple[Pattern, ...] = Field(default=(), max_length=256)


class LedgerRules(StrictModel):
    """`[ledger]`: how the ledger is written."""

    sign: bool = True
    segment_entries: int = Field(default=1000, ge=2, le=1_000_000)


@dataclass(frozen=True, slots=True)
class TotalLimits:
    """A policy's digest, and its limits on what leaves in all runs together."""

    policy: str
    max_rounds: int | None
    max_bytes: int | None


class Policy(StrictModel):
    """The file. Everything that is not allowed is denied, and an unknown key is an error."""

    version: Literal[1] = Field(alias="schema")
    client: ClientId = Field(description="The client whose policy this is. The worker's token must be for it.")
    coordinator: str = Field(description="The only address that the worker connects to, except for `stores`.")
    stores: tuple[Store, ...] = Field(
        default=(), max_length=16, description="Object stores that artifacts may be sent to and fetched from directly."
    )
    max_rounds_total: int | None = Field(
        default=None,
        ge=1,
        lt=2**53,
        description="Number of rounds, over all runs, whose updates may leave.",
    )
    max_bytes_total: int | None = Field(
        default=None, ge=1, lt=2**53, description="Size of all updates that may leave, of all runs together."
    )
    max_evaluations_total: int | None = Field(
        default=None,
        ge=1,
        lt=2**53,
        description="Number of evaluations on this site's labels, over all runs, whose counts may leave.",
    )
    allow: tuple[AllowRule, ...] = Field(default=(), max_length=255)
    dp: Privacy = Privacy()
    secagg: SecureRules = SecureRules()
    metrics: MetricRules = MetricRules()
    ledger: LedgerRules = LedgerRules()

    @model_validator(mode="after")
    def _methods_exist(self) -> "Policy":
        for rule in self.allow:
            for name in rule.methods:
                if _PLAIN_NAME.fullmatch(name) and name not in METHOD_CONFIGS:
                    raise ValueError(f"there is no method {name}: `fedssl method ls` lists them")
        return self

    def described(self, digest: str) -> PolicyNotice:
        """Return all that the policy allows."""
        allow = self.allow
        if names := self.metrics.allow:
            allow += (AllowRule(artifact="metrics", methods=("*",), tensors=names),)
        return PolicyNotice(digest=digest, allow=allow, privacy=self.dp.require)

    def notice(self, digest: str) -> PolicyNotice:
        """Return what the worker reports of the policy to the coordinator.

        Rules for evaluations, site heads and the images as a whole are left out: older coordinators would refuse the
        registration, and no round depends on them.
        """
        whole, apart = self.described(digest), (*SITE_ARTIFACTS, *ABOUT_IMAGES)
        return whole.model_copy(update={"allow": tuple(r for r in whole.allow if r.artifact not in apart)})


def read_policy(path: Path) -> tuple[Policy, str]:
    """Return the policy in a file, and the sha256 of the file. Raises PolicyError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"cannot read the policy {path}: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise PolicyError(f"the policy {path} has more than {_MAX_BYTES} bytes: is it the right file?")
    try:
        # Editors on Windows begin a file with a byte order mark.
        document = tomllib.loads(content.decode("utf-8-sig"))
        return Policy.model_validate(document), hashlib.sha256(content).hexdigest()
    except ValidationError as error:
        raise PolicyError(f"the policy {path} cannot be used: {_describe(error)}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of too many digits, or too deep
        raise PolicyError(f"the policy {path} is not TOML: {error}") from None


class PolicyEnforcer:
    """Enforces the policy in force. Without a file there is none: the method's plan and all metrics may leave."""

    def __init__(self, path: Path | None, coordinator: str) -> None:
        """Read the policy. Raises PolicyError if the file cannot be used or is for another coordinator."""
        self._path = path
        self._coordinator = coordinator
        self._client_id: str | None = None
        self._policy: Policy | None = None
        self.digest = NO_POLICY
        self.ledger = LedgerRules()
        self.notice: PolicyNotice | None = None
        self.reload()

    def reload(self) -> bool:
        """Read the file again, and return whether the policy has changed. Raises PolicyError."""
        if self._path is None:
            return False
        policy, digest = read_policy(self._path)
        self._require_ours(policy)
        if digest == self.digest:
            return False
        self._policy, self.digest = policy, digest
        self.notice, self.ledger = policy.notice(digest), policy.ledger
        return True

    def require_client(self, client_id: str) -> None:
        """Require from now on that the policy is this client's. Raises PolicyError if it is not."""
        self._client_id = client_id
        if self._policy is not None:
            self._require_ours(self._policy)

    @property
    def kept_numbers(self) -> dict[str, None]:
        """The fields of a registration that the policy keeps here."""
        return {"num_images": None} if self.notice is not None and self.notice.keeps_num_images else {}

    def require_permitted(self, item: WorkItem) -> None:
        """Raise NotPermitted unless the whole update of this work may leave."""
        if self.notice is None:
            return
        if (why := refusal(self.notice, item.spec, item.plan, item.round_number)) is not None:
            raise NotPermitted(f"the data owner's policy ({self.digest[:8]}) does not permit this work: {why}")

    def require_enough_images(self, item: WorkItem, num_images: int) -> None:
        """Raise NotPermitted unless sums over this number of images may leave."""
        if self.notice is None:
            return
        least = fewest_images(self.notice, item.spec, item.plan, item.round_number)
        if least is not None and num_images < least:
            of = "fewer" if item.spec.secure_aggregation is not None else f"{num_images}"
            raise NotPermitted(
                f"the data owner's policy ({self.digest[:8]}) does not permit this update: its sums are of "
                f"{of} images, and min_images is {least}"
            )

    def require_enough_held_out(self, item: WorkItem, num_images: int) -> None:
        """Raise NotPermitted unless counts and cross-entropies of this number of held-out images may leave.

        The coordinator chooses the classifiers and the share that is held out, so sums over one image would disclose
        its representation.
        """
        if self.notice is None or num_images == 0:
            return
        least = fewest_images(self.notice, item.spec, item.plan, item.round_number)
        least = DEFAULT_MIN_COUNT if least is None else min(least, DEFAULT_MIN_COUNT)
        if num_images < least:
            of = "fewer" if item.spec.secure_aggregation is not None else f"{num_images}"
            raise NotPermitted(
                f"the data owner's policy ({self.digest[:8]}) does not permit this update: its counts are of "
                f"{of} held-out images, and {least} is the fewest; raise method.test_share"
            )

    def evaluation_min_count(self, item: SiteEvaluationItem, num_bytes: int = 0) -> int:
        """Return the fewest images that a class needs to be counted in an evaluation.

        Raises NotPermitted unless counts of this size, in bytes, may leave.
        """
        if self._policy is None:
            return 1
        artifact: SiteArtifact = "evaluation" if item.head is None else "cross-evaluation"
        rule = self._evaluation_rule(self._policy, item, artifact, num_bytes)
        return DEFAULT_MIN_COUNT if rule.min_count is None else rule.min_count

    def require_head(self, item: SiteEvaluationItem, num_bytes: int) -> None:
        """Raise NotPermitted unless a classifier of this site's own, of this size, may leave to the other sites."""
        if self._policy is not None:
            self._evaluation_rule(self._policy, item, "site-head", num_bytes)

    def _evaluation_rule(
        self, policy: Policy, item: SiteEvaluationItem, artifact: SiteArtifact, num_bytes: int
    ) -> AllowRule:
        rule, why = evaluation_rule(policy.described(self.digest), item.spec, item.round_number, artifact)
        if rule is not None and rule.max_bytes is not None and num_bytes > rule.max_bytes:
            why = f"it takes {num_bytes} bytes, max_bytes allows {rule.max_bytes}"
        if rule is None or why:
            raise NotPermitted(f"the data owner's policy ({self.digest[:8]}) does not permit this {artifact}: {why}")
        return rule

    def images_min_count(self, artifact: str) -> int | None:
        """Return the fewest images whose statistics may leave, or None if the policy does not allow this artifact.

        A policy must allow it explicitly: without a policy it does not leave.
        """
        if self._policy is None or self._policy.dp.require != "none":
            return None
        counts = (DEFAULT_MIN_COUNT if rule.min_count is None else rule.min_count
                  for rule in self._policy.allow if rule.artifact == artifact)  # fmt: skip
        return max(counts, default=None)

    def permits_number(self, name: str) -> bool:
        """Return whether a number about the images, which belongs to no run, may leave as a metric of this name."""
        return self.notice is None or permits_metric(self.notice, "*", name)

    @property
    def total_limits(self) -> TotalLimits | None:
        """The limits on what leaves in all runs together, or None if the policy has none."""
        policy = self._policy
        if policy is None or (policy.max_rounds_total is None and policy.max_bytes_total is None):
            return None
        return TotalLimits(self.digest, policy.max_rounds_total, policy.max_bytes_total)

    @property
    def max_evaluations(self) -> int | None:
        """The number of evaluations that may leave in all runs together, or None if the policy has no limit."""
        return None if self._policy is None else self._policy.max_evaluations_total

    @property
    def secure_rules(self) -> SecureRules:
        """The demands of the policy on a secure round."""
        return SecureRules() if self._policy is None else self._policy.secagg

    def permits_store(self, server: str) -> bool:
        """Return whether artifacts may go to and come from this object store, given as https://HOST:PORT."""
        return self._policy is None or _normalised_address(server) in map(_normalised_address, self._policy.stores)

    def permitted_metrics(self, item: WorkItem, metrics: Metrics) -> Metrics:
        """Return the metrics that may leave. In a secure round they only leave inside the sum."""
        return {name: value for name, value in metrics.items() if self._permits_metric(item, name)}

    def permitted_check(self, numbers: CheckNumbers) -> CheckNumbers | None:
        """Return the numbers of `fedssl-worker check` that may leave as metrics `check/NAME`, or None if none may."""
        method = numbers.method or ""
        found = {
            name: value
            for name, value in numbers
            if name != "method"
            and value is not None
            and (self.notice is None or permits_metric(self.notice, method, f"check/{name}"))
        }
        return CheckNumbers(method=numbers.method, **found) if found else None

    def permitted_progress(self, item: WorkItem, progress: Progress) -> Progress:
        """Return the progress without the loss and the speed, unless metrics of these names may leave.

        In a secure round it has only the percentage of complete epochs, because the number of steps discloses the
        number of images.
        """
        if item.spec.secure_aggregation is not None and progress.num_steps:
            share = 100 * max(0, progress.epoch - 1) // max(1, progress.num_epochs)
            progress = progress.model_copy(update={"step": share, "num_steps": 100})
        removed = [name for name in PROGRESS_METRICS if not self._permits_metric(item, name)]
        return progress.model_copy(update=dict.fromkeys(removed)) if removed else progress

    def permitted_resources(self, item: WorkItem, resources: Resources) -> Resources | None:
        """Return the numbers about this machine that may leave as metrics of these names, or None if none may."""
        held = {name: value for name, value in resources if value is not None and self._permits_metric(item, name)}
        return Resources(**held) if held else None

    def reportable(self, item: WorkItem) -> list[str]:
        """Return the names of the numbers that heartbeats may report during this work, sorted."""
        return sorted(name for name in REPORTED if self._permits_metric(item, name))

    def _permits_metric(self, item: WorkItem, name: str) -> bool:
        if item.spec.secure_aggregation is not None:
            return False
        return self.notice is None or permits_metric(self.notice, item.spec.method.name, name)

    def _require_ours(self, policy: Policy) -> None:
        if _normalised_address(policy.coordinator) != _normalised_address(self._coordinator):
            raise PolicyError(
                f"the policy {self._path} is for the coordinator {policy.coordinator}, but this worker was started for "
                f"{self._coordinator}: start it with the policy's --coordinator, or correct the policy"
            )
        if self._client_id is not None and policy.client != self._client_id:
            raise PolicyError(
                f"the policy {self._path} is for the client {policy.client}, but this worker's token is for "
                f"{self._client_id}: use that client's policy, or its token"
            )


def _normalised_address(url: str) -> tuple[str, str, int | None, str]:
    """Return an address in one form, so that `https://HOST` and `https://HOST:443/` are equal."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return url, "", None, ""
    return parts.scheme, parts.hostname or "", port or _PORTS.get(parts.scheme), parts.path.rstrip("/")


def _describe(error: ValidationError) -> str:
    """Return every mistake with its key: `allow.0.artefact: there is no such key: correct its spelling`."""
    return describe_problems(error, messages=_MESSAGES, unknown_keys=NOT_ENFORCED)
