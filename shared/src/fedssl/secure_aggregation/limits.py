"""A data owner's demands, which a secure round must meet before the worker takes part."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedssl.secure_aggregation.context import RoundContext
from fedssl.secure_aggregation.errors import Refused


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """A data owner's demands. `pins`: identity keys by client; None accepts every identity in the cohort."""

    min_cohort: int = 3
    collusion: int = 0
    pins: Mapping[str, str] | None = None


def check_limits(context: RoundContext, client: str, limits: OwnerLimits) -> None:
    """Raise Refused unless the context has this client and respects its owner's limits."""
    if context.identity_of(client) is None:
        raise Refused(f"{client} is not in the cohort of this round")
    if context.thresholds.min_survivors < limits.min_cohort:
        offered = context.thresholds.min_survivors
        raise Refused(f"the round sums {offered} updates or more, and the data owner demands {limits.min_cohort}")
    if context.thresholds.collusion < limits.collusion:
        offered = context.thresholds.collusion
        raise Refused(f"the round resists {offered} colluding clients, and the data owner demands {limits.collusion}")
    if limits.pins is None:
        return
    for member in context.cohort:
        if member.client != client and limits.pins.get(member.client) != member.identity:
            raise Refused(f"the identity key of {member.client} is not the pinned one: ask its owner for the new key")
