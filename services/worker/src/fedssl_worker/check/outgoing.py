"""The artifacts that the rounds of a run would send, and whether the data owner's policy permits them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from fedssl.artifacts.header import file_bytes, frozen_bytes, max_file_bytes
from fedssl.artifacts.permission import permits_metric, refusal
from fedssl.cli.doctor.findings import Check, Found
from fedssl.cli.output import size
from fedssl.engine.secure_sums import tensors_sent
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.runs import RunSpec
from fedssl.wording import plural
from fedssl_worker.disclosure.policy import NO_POLICY, REPORTED, Policy, PolicyEnforcer, read_policy
from fedssl_worker.memory import total_memory_bytes
from fedssl_worker.settings import Settings


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The policy that decides what may leave; None if there is none."""

    policy: Policy | None
    digest: str

    @classmethod
    def read(cls, settings: Settings) -> Self:
        """Read the policy as a worker does. Raises PolicyError."""
        PolicyEnforcer(settings.policy, settings.coordinator)  # it must be for this coordinator
        return cls(None, NO_POLICY) if settings.policy is None else cls(*read_policy(settings.policy))

    @property
    def notice(self) -> PolicyNotice | None:
        """All that the policy allows, or None if everything may leave."""
        return None if self.policy is None else self.policy.described(self.digest)


@dataclass(slots=True)
class OutgoingFound:
    """The sizes of what one round sends and receives, in bytes."""

    checks: list[Check] = field(default_factory=list)
    update_bytes: int | None = None
    broadcast_bytes: int | None = None


def check_policy(settings: Settings, outgoing: Outgoing) -> Check:
    """Report which policy is in force."""
    if outgoing.policy is None:
        todo = "write a policy if less may leave, and give --policy: `fedssl-worker policy check` shows what it allows"
        return Check("policy", Found.NOTE, "none: whatever the run's method declares may leave", todo)
    policy = outgoing.policy
    num_rules = len(policy.allow)
    what = f"{settings.policy} ({outgoing.digest[:8]}) of {policy.client} has {plural(num_rules, 'rule')}"
    return Check("policy", Found.OK, what)


def check_outgoing(settings: Settings, spec: RunSpec, outgoing: Outgoing | None) -> OutgoingFound:
    """Compare what the rounds of a run send with the policy and with this machine."""
    plan = METHODS[spec.method.name].bind(spec).plan
    sent = file_bytes(_sent(spec, plan))
    found = OutgoingFound(update_bytes=sent, broadcast_bytes=file_bytes(plan.broadcast))
    kinds, once = Counter(tensor.kind for tensor in plan.update), frozen_bytes(plan)
    tensors = ", ".join(f"{kind} ({plural(count, 'tensor')})" for kind, count in kinds.items()) or "nothing"
    form = tensors if spec.secure_aggregation is None else f"a masked vector of {tensors}"
    each = f"each sends {form}, {size(sent)}, and receives {size(file_bytes(plan.broadcast))}"
    what = f"{spec.method.name}, {plural(spec.num_rounds, 'round')}: {each}" + (
        f", and once {size(once)}" if once else ""
    )
    found.checks.append(_fits(settings, plan, what))
    if outgoing is not None and outgoing.notice is not None:
        found.checks.append(_permitted(outgoing, outgoing.notice, spec, plan))
    return found


def _sent(spec: RunSpec, plan: ArtifactPlan) -> tuple[TensorSpec, ...]:
    """Return the tensors in the file that leaves: those of the update, or in a secure round a masked vector."""
    if spec.secure_aggregation is None:
        return plan.update
    return tensors_sent(METHODS[spec.method.name], Context(spec=spec, round_number=1))


def _fits(settings: Settings, plan: ArtifactPlan, what: str) -> Check:
    most = settings.max_artifact_bytes or total_memory_bytes() // 4
    largest = max(max_file_bytes(tensors) for tensors in (plan.update, plan.received))
    if largest > most:
        todo = "use a smaller model, or raise --max-artifact-bytes"
        return Check("what a round sends", Found.WRONG, f"{what}; this worker accepts {size(most)}", todo)
    return Check("what a round sends", Found.OK, what)


def _permitted(outgoing: Outgoing, notice: PolicyNotice, spec: RunSpec, plan: ArtifactPlan) -> Check:
    name = "policy and run"
    if (why := refusal(notice, spec, plan, spec.num_rounds) or _over_totals(outgoing, spec, plan)) is not None:
        todo = "change the policy if you agree to this, or ask the operator for another run"
        return Check(name, Found.WRONG, f"the policy does not permit this run: {why}", todo)
    numbers = [number for number in REPORTED if permits_metric(notice, spec.method.name, number)]
    shown = f"also {', '.join(numbers)}" if numbers else "no progress numbers"
    return Check(name, Found.OK, f"the policy permits every round; {shown}")


def _over_totals(outgoing: Outgoing, spec: RunSpec, plan: ArtifactPlan) -> str | None:
    """Return which limit on all runs together this run alone exceeds, or None."""
    assert outgoing.policy is not None, "there is a policy"
    most_rounds, most_bytes = outgoing.policy.max_rounds_total, outgoing.policy.max_bytes_total
    total = spec.num_rounds * file_bytes(_sent(spec, plan))
    if most_rounds is not None and spec.num_rounds > most_rounds:
        return f"the run has {plural(spec.num_rounds, 'round')}, max_rounds_total allows {most_rounds} in all runs"
    if most_bytes is not None and total > most_bytes:
        return f"all rounds send {total} bytes, max_bytes_total allows {most_bytes} in all runs"
    return None
