"""The settings of a run, in words."""

from collections.abc import Mapping
from typing import Any

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_aggregation import NOT_PROMISED
from fedssl.wording import plural
from fedssl_coordinator.dashboard.layout import formats


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a spec with dotted keys, as `--set` takes them. Lists stay whole."""
    found: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            found |= flat(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = inner
    return found


def shown(value: object) -> str:
    """Format a setting for people."""
    if value is None:
        return formats.NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(shown(inner) for inner in value) or "none"
    if isinstance(value, Mapping):
        name, rest = value.get("name"), {key: inner for key, inner in value.items() if key != "name"}
        inside = ", ".join(f"{key} {shown(inner)}" for key, inner in rest.items() if inner is not None)
        return f"{name} ({inside})" if name and inside else str(name or inside)
    return str(value)


def summary(spec: RunSpec) -> list[tuple[str, str]]:
    """Return the most important settings."""
    training, cohort = spec.training, spec.cohort
    needed = "all" if cohort.min_updates is None else formats.number(cohort.min_updates)
    members = "every client" if cohort.clients is None else plural(len(cohort.clients), "client")
    share = "" if cohort.fraction == 1 else f", {formats.percent(cohort.fraction, 0)} per round"
    optimizer = training.optimizer
    part = "" if training.epoch_fraction == 1 else f" of {formats.percent(training.epoch_fraction)} of the batches"
    return [
        ("Method", spec.method.info.title),
        ("Encoder", spec.model.encoder.name),
        ("Local training", f"{plural(training.local_epochs, 'epoch')}{part}, batch {training.batch_size}"),
        ("Optimiser", f"{optimizer.name}, {optimizer.learning_rate:g}, {optimizer.schedule}"),
        ("Images", f"{spec.data.channels} × {spec.data.image_size} × {spec.data.image_size}"),
        ("Cohort", f"{members}{share}"),
        ("Updates needed", needed),
        ("Deadline", formats.seconds(cohort.deadline_seconds)),
        ("Attempts", f"{cohort.max_attempts}, then {cohort.without_quorum}"),
        *_secure(spec),
        ("Seed", str(spec.seed)),
        ("Leaves the client", spec.method.info.leaves_the_client),
    ]


def _secure(spec: RunSpec) -> list[tuple[str, str]]:
    config = spec.secure_aggregation
    if config is None:
        return []
    return [("Secure aggregation", f"sums of {formats.number(config.min_cohort)} updates or more. {NOT_PROMISED}")]
