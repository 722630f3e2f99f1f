"""Computes the artifact plans of specs, for estimates."""

from fedssl.engine.aggregation import starting_plan
from fedssl.errors import DataError, MethodError, SpecError
from fedssl.methods import METHODS
from fedssl.models.initialisation import on_meta_device
from fedssl_coordinator.core import plan_cache


def compute(digest: str) -> None:
    """Store the plan of a requested spec, or the reason why there is none.

    The networks are built without memory for their weights.
    """
    spec = plan_cache.asked(digest)
    if spec is None:
        return
    try:
        with on_meta_device():
            plan = starting_plan(METHODS[spec.method.name].bind(spec))
    except (MethodError, DataError, SpecError) as error:  # the errors with which the preparation of a run ends it
        plan_cache.keep_refusal(digest, str(error))
        return
    plan_cache.keep(digest, plan)
