"""Data owners' policies: a round is not offered to a client whose policy refuses the run's updates."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from fedssl.artifacts.permission import refusal
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.run_documents import plan_of
from fedssl_coordinator.identity import clients


def refusals(session: Session, run: Run, spec: RunSpec, names: Sequence[str]) -> dict[str, str]:
    """Return the clients whose policy refuses the run's updates, with the reason.

    A policy is a lasting decision of the data owner, so, unlike liveness, it may decide which clients take part. What a
    worker reports is only advice: each worker checks its policy again before it trains.
    """
    return refused(session, plan_of(run), spec, names)


def refused(session: Session, plan: ArtifactPlan, spec: RunSpec, names: Sequence[str]) -> dict[str, str]:
    """Return the clients whose policy refuses the updates of such a run, with the reason."""
    if not names:
        return {}
    found: dict[str, str] = {}
    for policy, client_ids in clients.policies(session, names):
        if (why := policy.too_long or refusal(policy, spec, plan)) is not None:
            found |= dict.fromkeys(client_ids, f"its data owner's policy: {why}")
    return dict(sorted(found.items()))
