"""Decides whether a data owner's policy permits a run's update to leave.

The worker, which is bound by it, and the coordinator, which does not offer what the worker would refuse, share this.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import lru_cache

from fedssl.artifacts.header import num_bytes
from fedssl.protocol.data import PublicDataConfig
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.policy import SITE_ARTIFACTS, AllowRule, PolicyNotice, SiteArtifact
from fedssl.protocol.runs import RunSpec
from fedssl.wording import plural

_GROUPS_SHOWN = 5


def refusal(policy: PolicyNotice, spec: RunSpec, plan: ArtifactPlan, round_number: int = 1) -> str | None:
    """Return why the policy does not permit the update of this run and round to leave, or None if it does."""
    if (why := _privacy_obstacle(policy)) is not None:
        return why
    kept: dict[str, list[str]] = {}
    used: dict[int, int] = {}
    for tensor in plan.update:
        index, why = _rule_for(policy.allow, tensor, spec, round_number)
        if index is None:
            kept.setdefault(why, []).append(tensor.name)
        else:
            used[index] = used.get(index, 0) + num_bytes(tensor.dtype, tensor.shape)
    if kept:
        return "; ".join(f"{why} ({_some(names)})" for why, names in kept.items())
    for index, size in used.items():
        limit = policy.allow[index].max_bytes
        if limit is not None and size > limit:
            return f"one update holds {size} bytes of {policy.allow[index].artifact}, max_bytes allows {limit}"
    if policy.keeps_num_images and spec.secure_aggregation is None:  # even an update without tensors has the number
        return "the number of images may leave only inside a secure aggregation, and the run sends it without masks"
    return None


def fewest_images(policy: PolicyNotice, spec: RunSpec, plan: ArtifactPlan, round_number: int = 1) -> int | None:
    """Return the fewest images whose sums may leave, or None if the plan has no sums over images.

    `refusal` decides whether the update may leave at all.
    """
    sums = [tensor for tensor in plan.update if tensor.kind == "probe-sums"]
    width = max((tensor.shape[0] - 1 for tensor in sums if len(tensor.shape) == 2), default=0)
    indices = {_rule_for(policy.allow, tensor, spec, round_number)[0] for tensor in sums}
    given = [policy.allow[index].min_images for index in indices if index is not None]
    return max((2 * width if least is None else least for least in given), default=None)


def permits_metric(policy: PolicyNotice, method: str, name: str) -> bool:
    """Return whether a metric with this name may leave in a run of the method."""
    rules = (rule for rule in policy.allow if rule.artifact == "metrics")
    return any(_any(rule.methods, method) and _any(rule.tensors, name) for rule in rules)


def evaluation_rule(
    policy: PolicyNotice, spec: RunSpec, round_number: int, artifact: SiteArtifact = "evaluation"
) -> tuple[AllowRule | None, str]:
    """Return the first rule that allows an artifact of this site's evaluation of a round, or None and the reason."""
    if (why := _privacy_obstacle(policy)) is not None:
        return None, why
    nearest = f"no rule allows {artifact} of {spec.method.name}"
    for rule in policy.allow:
        if rule.artifact == artifact and _any(rule.methods, spec.method.name):
            if (obstacle := _limit_obstacle(rule, spec, round_number)) is None:
                return rule, ""
            nearest = obstacle
    return None, nearest


def _privacy_obstacle(policy: PolicyNotice) -> str | None:
    if policy.privacy == "none":
        return None
    return (
        f"it requires differential privacy ({policy.privacy}), which this version does not have: "
        'no work is accepted until [dp] require is "none"'
    )


def _rule_for(
    rules: Sequence[AllowRule], tensor: TensorSpec, spec: RunSpec, round_number: int
) -> tuple[int | None, str]:
    """Return the first rule that permits the tensor, or None and the reason that comes closest."""
    nearest = f"no rule allows {tensor.kind} of {spec.method.name}"
    for index, rule in enumerate(rules):
        if rule.artifact != tensor.kind or not _any(rule.methods, spec.method.name):
            continue
        if not _any(rule.tensors, tensor.name):
            nearest = f"no rule for {tensor.kind} of {spec.method.name} names these tensors"
            continue
        why = _obstacle(rule, spec, round_number)
        if why is None:
            return index, ""
        nearest = why
    return None, nearest


def _limit_obstacle(rule: AllowRule, spec: RunSpec, round_number: int) -> str | None:
    """Return why a rule that fits by kind and method does not allow this round, or None if it does."""
    has_no_masks = (*SITE_ARTIFACTS, *spec.method.sent_apart)
    if rule.secure == "required" and (spec.secure_aggregation is None or rule.artifact in has_no_masks):
        return f"{rule.artifact} may leave only inside a secure aggregation, and the run sends it without masks"
    rounds = max(spec.num_rounds, round_number)
    if rule.max_rounds is not None and rounds > rule.max_rounds:
        return f"the run has {plural(rounds, 'round')}, max_rounds allows {rule.max_rounds}"
    return None


def _obstacle(rule: AllowRule, spec: RunSpec, round_number: int) -> str | None:
    """Return why a rule that fits by kind, method and name does not allow this round, or None if it does."""
    if (why := _limit_obstacle(rule, spec, round_number)) is not None:
        return why
    public = spec.public_data
    if public is not None and not _any(rule.datasets, _name_of(public)):
        return f"the run uses the public images {public.dataset}, and datasets does not list {_name_of(public)}"
    return None


def _name_of(public: PublicDataConfig) -> str:
    return public.dataset if public.digest is None else f"sha256:{public.digest}"


def _any(patterns: tuple[str, ...], name: str) -> bool:
    return _compiled(patterns).fullmatch(name) is not None


@lru_cache(maxsize=4096)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(pattern) for pattern in patterns) or r"(?!)")


def _some(names: Iterable[str]) -> str:
    """Return the names grouped by their first part, as patterns that would match them."""
    counts = Counter(name if "." not in name else f"{name.split('.')[0]}.*" for name in names)
    shown = [f"{group}: {count}" for group, count in counts.most_common(_GROUPS_SHOWN)]
    return ", ".join(shown) + (", and others" if len(counts) > _GROUPS_SHOWN else "")
