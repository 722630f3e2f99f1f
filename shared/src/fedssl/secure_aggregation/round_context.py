"""The context of a run's round, which the coordinator and each worker compute on their own."""

import hashlib
import json
from collections.abc import Iterable

from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import SecureMember
from fedssl.secure_aggregation.context import Member, RoundContext
from fedssl.secure_aggregation.thresholds import choose_thresholds


def round_context(
    run: str,
    number: int,
    *,
    spec: RunSpec,
    plan: ArtifactPlan,
    broadcast: str,
    frozen: str | None,
    num_words: int,
    cohort: Iterable[SecureMember],
    total_bits: tuple[int, int] | None = None,
) -> RoundContext:
    """Return the context of one round.

    It includes the whole spec and the frozen tensors: a coordinator that let only one client train, and gave the others
    a learning rate of 0 or frozen weights without a gradient, would obtain that client's update as the sum.

    Args:
        run: the run's id, or a random one of a simulation. number: of the round.
        plan: the method's artifact plan, of the caller's own installation.
        broadcast: SHA-256 of the round's broadcast, in hexadecimal. frozen: that of the run's frozen tensors, or None.
        num_words: as `fedssl.engine.secure_sums.num_client_words` returns.
        cohort: all clients of the round, with their identity keys.
        total_bits: of the round's `Context`, or None.

    Raises ValueError if the cohort is too small for the spec's `secure_aggregation`, or has a name or a key twice.
    """
    config = spec.secure_aggregation
    assert config is not None, "only with secure aggregation"
    members = sorted((Member(each.client, each.identity) for each in cohort), key=lambda member: member.client)
    least = max(config.min_cohort, spec.cohort.min_updates or 0)
    documents = {"plan": plan.model_dump(mode="json"), "spec": spec.model_dump(mode="json"), "frozen": frozen}
    return RoundContext(
        run=run,
        round=number,
        broadcast=broadcast,
        plan=hashlib.sha256(json.dumps(documents, sort_keys=True).encode()).hexdigest(),
        num_words=num_words,
        thresholds=choose_thresholds(len(members), min_cohort=least, collusion=config.collusion),
        cohort=tuple(members),
        total_bits=total_bits,
    )
