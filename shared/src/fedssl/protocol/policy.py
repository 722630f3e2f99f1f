"""A data owner's policy, as its worker reports it, so that it is not offered work that it would refuse."""

from typing import Annotated, Literal, get_args

from pydantic import Field, StringConstraints, model_validator

from fedssl.protocol.base import Digest, StrictModel
from fedssl.protocol.plan import SENT_APART, Kind

Pattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./*?-]+$", max_length=256)]
"""A name in which `*` stands for any characters and `?` for one."""

DatasetPattern = Annotated[
    str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64}|[A-Za-z0-9_./*?-]+)$", max_length=256)
]
"""A public data set that every machine finds by name, or by its digest one that the coordinator supplies."""

MOST_PATTERN_BYTES = 1 << 14
"""The most bytes of a notice's patterns, as JSON. They are compiled whenever a round is offered."""

SiteArtifact = Literal["evaluation", "cross-evaluation", "site-head"]
"""The kinds of artifacts in a site's answer about an evaluation."""

SITE_ARTIFACTS = get_args(SiteArtifact)

_ABOUT_ARTIFACTS = ("datasets", "secure", "max_bytes", "max_rounds")


ABOUT_IMAGES = ("statistics", "channel-sums")
"""Artifacts of the images as a whole, which belong to no run."""


class AllowRule(StrictModel):
    """One thing that may leave. What no rule allows does not leave."""

    artifact: Literal[Kind, "metrics", "statistics", "channel-sums", SiteArtifact] = Field(
        description="What the tensors are; `metrics` for plain numbers; `evaluation` for counts per class of an "
        "evaluation on the site's own labelled images; `cross-evaluation` for those of another site's classifier; "
        "`site-head` for a classifier of the site's own, which other sites receive; `statistics` for the data card, "
        "and `channel-sums` for sums of its images' channels, from which the federation's mean and deviation are "
        "computed."
    )
    methods: tuple[Pattern, ...] = Field(
        min_length=1, max_length=64, fail_fast=True, description="In runs of these methods."
    )
    tensors: tuple[Pattern, ...] = Field(
        default=("*",),
        min_length=1,
        max_length=256,
        fail_fast=True,
        description="Names of tensors, or of metrics in a rule for metrics.",
    )
    datasets: tuple[DatasetPattern, ...] = Field(
        default=(),
        max_length=64,
        fail_fast=True,
        description="The public images that runs may use. List those that the coordinator supplies as `sha256:DIGEST`, "
        "because a name does not identify images.",
    )
    secure: Literal["required", "allowed"] = Field(
        default="allowed", description="`required`: only inside a secure aggregation."
    )
    max_bytes: int | None = Field(
        default=None, ge=1, lt=2**53, description="Largest total size of this rule's tensors in one update."
    )
    max_rounds: int | None = Field(
        default=None, ge=1, lt=2**53, description="Number of rounds of the longest permitted run."
    )

    min_count: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        exclude_if=lambda it: it is None,
        description="Only for `evaluation` and `cross-evaluation`: classes with fewer training or test images are left "
        "out. For `statistics` and `channel-sums`: numbers of fewer images or groups are suppressed. Default: 10.",
    )
    min_images: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        exclude_if=lambda it: it is None,
        description="Only for `probe-sums`: the fewest images whose sums leave. Default: twice the width of the "
        "representations. With fewer images than the width, the sums can determine the representations.",
    )

    @model_validator(mode="after")
    def _fields_fit_sums(self) -> "AllowRule":
        if self.artifact != "probe-sums" and self.min_images is not None:
            raise ValueError("only a rule for probe-sums has min_images")
        return self

    @model_validator(mode="after")
    def _fields_fit_evaluations(self) -> "AllowRule":
        if self.artifact not in ("evaluation", "cross-evaluation", *ABOUT_IMAGES) and self.min_count is not None:
            raise ValueError("only a rule for evaluation, cross-evaluation, statistics or channel-sums has min_count")
        if self.artifact in ABOUT_IMAGES:
            unlike = AllowRule.model_construct(artifact=self.artifact, methods=("*",), min_count=self.min_count)
            if self != unlike:
                raise ValueError(f'a rule for {self.artifact} has methods = ["*"] and min_count, and no other keys')
        if self.artifact in SITE_ARTIFACTS and (self.tensors != ("*",) or self.datasets):
            raise ValueError(f"a rule for {self.artifact} has no tensors and no datasets: leave them out")
        return self

    @model_validator(mode="after")
    def _metrics_have_names_alone(self) -> "AllowRule":
        # Compares values instead of the keys that were set: a notice is sent, stored and read with its defaults written
        # out.
        fields = type(self).model_fields
        given = [name for name in _ABOUT_ARTIFACTS if getattr(self, name) != fields[name].default]
        if self.artifact == "metrics" and given:
            raise ValueError(f"a rule for metrics has only methods and tensors (the metrics' names), not {given[0]}")
        return self


class PolicyNotice(StrictModel):
    """A policy's digest and what it allows. The worker's own check decides; the notice only avoids futile offers."""

    digest: Digest
    allow: tuple[AllowRule, ...] = Field(max_length=256, fail_fast=True)
    privacy: Literal["none", "example"] = Field(
        default="none", description="Whether training must be differentially private, and for what unit."
    )

    @property
    def too_long(self) -> str | None:
        """Return why the notice has too many patterns, or None if it does not."""
        texts = (text for rule in self.allow for text in (*rule.methods, *rule.tensors, *rule.datasets))
        size = sum(len(text) + 3 for text in texts)
        if size <= MOST_PATTERN_BYTES:
            return None
        return (
            f"the policy's names and patterns take {size} bytes in all, and at most {MOST_PATTERN_BYTES} are "
            "allowed: write fewer, with * for any characters"
        )

    @property
    def keeps_num_images(self) -> bool:
        """Return whether the client keeps its number of images.

        Its updates then leave only in secure rounds, whose sum contains it.
        """
        about_runs = [rule for rule in self.allow if rule.artifact not in ("metrics", *SENT_APART)]
        return bool(about_runs) and all(rule.secure == "required" for rule in about_runs)

    def __str__(self) -> str:
        """Return the kinds of artifacts, the methods, and the beginning of the digest, for people."""
        rules = [f"{rule.artifact} of {', '.join(rule.methods)}" for rule in self.allow]
        return f"{'; '.join(rules) or 'nothing may leave'} ({self.digest[:8]})"
