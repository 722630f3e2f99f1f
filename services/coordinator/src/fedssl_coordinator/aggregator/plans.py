"""Computes the artifact plans of specs, for estimates."""

import torch

from fedssl.methods import METHODS
from fedssl_coordinator.core import plan_cache


def compute(digest: str) -> None:
    """Store the plan of a requested spec. The networks are built without memory for their weights."""
    spec = plan_cache.asked(digest)
    if spec is None:
        return
    with torch.device("meta"):
        plan = METHODS[spec.method.name].bind(spec).plan
    plan_cache.keep(digest, plan)
