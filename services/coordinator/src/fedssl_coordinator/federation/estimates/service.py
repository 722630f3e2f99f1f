"""Estimates of a run: which clients would take part, the bytes that they would send, and the time."""

import statistics
from collections.abc import Sequence

from sqlalchemy.orm import Session

from fedssl.artifacts.header import file_bytes, frozen_bytes
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import EstimateView
from fedssl_coordinator.core import plan_cache
from fedssl_coordinator.federation.estimates import repository
from fedssl_coordinator.federation.rounds import fitness, policies
from fedssl_coordinator.identity import clients


def estimate(session: Session, project: str, spec: RunSpec) -> EstimateView:
    """Return the estimate of a run that might be created. Null stands for what is not known.

    Raises ProblemError if such a run would be refused because of its clients, or if no run can have such a spec.
    """
    fitness.require_possible(spec)
    fitness.require_fit(session, project, spec)
    names = clients.eligible(session, project, spec.cohort.clients)
    plan = plan_cache.plan_of(session, spec)
    left_out = fitness.unfit(session, spec, spec.method.info.version, names)
    if plan is not None:
        left_out |= policies.refused(session, plan, spec, names)
    taking = [name for name in names if name not in left_out]
    asked = spec.cohort.num_asked(len(taking)) if taking else 0
    down, up = (None, None) if plan is None else (file_bytes(plan.broadcast), file_bytes(plan.update))
    if spec.secure_aggregation is not None:
        up = None  # the size of a masked vector, which needs torch: `fedssl run submit --dry-run` measures it
    per_round, measured = _seconds(session, spec, taking)
    return EstimateView(
        clients=taking,
        left_out=left_out,
        num_missing=max(0, spec.cohort.min_clients - len(taking)),
        clients_per_round=asked,
        bytes_down_per_client=down,
        bytes_up_per_client=up,
        bytes_in_total=None if plan is None or up is None else _total(spec.num_rounds * asked, len(taking), plan),
        is_measuring=plan is None and plan_cache.is_answering(),
        seconds_per_round=per_round,
        seconds_in_total=None if per_round is None else per_round * spec.num_rounds,
        num_measured=measured,
    )


def _total(num_assignments: int, num_clients: int, plan: ArtifactPlan) -> int:
    """Return an upper bound of the bytes of the whole run: each client receives the frozen tensors once."""
    per_assignment = file_bytes(plan.broadcast) + file_bytes(plan.update)
    return num_assignments * per_assignment + min(num_clients, num_assignments) * frozen_bytes(plan)


def _seconds(session: Session, spec: RunSpec, names: Sequence[str]) -> tuple[float | None, int]:
    """Return the time that the slowest of these clients needs for a round, and on how many updates it is based.

    A client that has not trained such a model yet counts as one of median speed.
    """
    known = {speed.client_id: speed for speed in repository.speeds(session, spec)}
    if not known or not names:
        return None, 0
    usual = statistics.median(speed.seconds_per_image for speed in known.values())
    epochs = spec.training.num_epochs or spec.training.epoch_fraction
    images = repository.num_images(session, list(names))
    times = [
        (known[name].seconds_per_image if name in known else usual) * images[name] * epochs
        for name in names
        if images[name]  # otherwise its policy keeps the number
    ]
    return max(times, default=None), sum(speed.updates for speed in known.values())
