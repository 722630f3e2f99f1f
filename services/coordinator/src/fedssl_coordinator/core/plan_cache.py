"""The artifact plans of specs that are not runs yet, which an aggregator computes on request.

The API process cannot compute a plan, because it never imports torch. It puts the spec into Redis under its digest, a
task computes the plan, and both expire. If there is no plan for the spec, the task stores the reason instead. Nothing
depends on plans but estimates; a reason also refuses a run that could only fail.
"""

import hashlib
import json

import redis
import structlog
from sqlalchemy.orm import Session

from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.queues import redis_connection

log = structlog.get_logger(__name__)

_KEPT_SECONDS = 24 * 3600
_REFUSAL_KEPT_SECONDS = 600  # no longer, as another version of the aggregator may have a plan for the spec
_ASKED_SECONDS = 60
_IRRELEVANT = (
    "name",
    "seed",
    "num_rounds",
    "cohort",
    "partition",
    "evaluation",
    "watch",
    "secure_aggregation",
)


def plan_of(session: Session, spec: RunSpec) -> ArtifactPlan | None:
    """Return the plan of such a run. If it is not known yet, return None and enqueue its computation."""
    digest = _digest(spec)
    try:
        found = redis_connection().get(_plan_key(digest))
        if found is not None:
            return ArtifactPlan.model_validate_json(found)
        if redis_connection().set(_spec_key(digest), spec.model_dump_json(), ex=_ASKED_SECONDS, nx=True):
            enqueue.compute_plan(session, digest)
    except redis.RedisError as error:
        log.warning("redis.unreachable", error=type(error).__name__, consequence="an estimate has no bytes")
    return None


def refusal(spec: RunSpec) -> str | None:
    """Return why no run can have such a spec, if an aggregator has found that out; None if nothing is known."""
    try:
        found = redis_connection().get(_refusal_key(_digest(spec)))
    except redis.RedisError as error:
        log.warning("redis.unreachable", error=type(error).__name__, consequence="an impossible spec is not refused")
        return None
    return None if found is None else str(json.loads(found))


def is_answering() -> bool:
    """Return whether Redis answers, so that a plan that is not known may be computed."""
    try:
        return bool(redis_connection().ping())
    except redis.RedisError:
        return False


def asked(digest: str) -> RunSpec | None:
    """Return the spec whose plan was requested, or None if the request has expired."""
    found = redis_connection().get(_spec_key(digest))
    return None if found is None else RunSpec.model_validate_json(found)


def keep(digest: str, plan: ArtifactPlan) -> None:
    """Store the plan of the spec with this digest."""
    redis_connection().set(_plan_key(digest), plan.model_dump_json(), ex=_KEPT_SECONDS)


def keep_refusal(digest: str, why: str) -> None:
    """Store why there is no plan for the spec with this digest."""
    redis_connection().set(_refusal_key(digest), json.dumps(why), ex=_REFUSAL_KEPT_SECONDS)


def _digest(spec: RunSpec) -> str:
    """Return the digest of the settings on which the plan, or its refusal, depends. They may not be a valid spec."""
    return hashlib.sha256(spec.model_dump_json(exclude=set(_IRRELEVANT)).encode()).hexdigest()


def _spec_key(digest: str) -> str:
    return f"fedssl:plan-of:{digest}"


def _plan_key(digest: str) -> str:
    return f"fedssl:plan:{digest}"


def _refusal_key(digest: str) -> str:
    return f"fedssl:no-plan:{digest}"
