"""What data owners' policies refuse: a run that a client could not deliver to is not offered to it."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from fedssl.artifacts.permission import refusal
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.identity import clients


def refusals(session: Session, run: Run, spec: RunSpec, names: Sequence[str]) -> dict[str, str]:
    """Those of the clients whose policy keeps the run's updates back, and why.

    A policy is the owner's standing word and not a matter of luck, so, unlike liveness, it may decide who takes part.
    What a worker says of it binds nobody: each checks for itself before it trains.
    """
    plan = ArtifactPlan.model_validate(run.plan)
    policies = clients.policies(session, names)
    found = {name: policy.too_long or refusal(policy, spec, plan) for name, policy in policies.items()}
    return {name: f"its data owner's policy: {why}" for name, why in found.items() if why is not None}
