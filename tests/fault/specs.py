"""The specs of the disturbed runs, and their results without faults."""

import functools
from typing import Any

from fedssl.artifacts.tensors import Tensors
from fedssl.data import ImageData
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import CONFIGS, PUBLIC, method_spec, shards

METHODS = ("fedbyol", "flesd", "scaffold", "ssd")
"""State on the client (the target network; the control variates), on the coordinator, in rows, and a distillation."""

OBJECTIVES = ("feddino", "fedmae", "fedvicreg", "fedbarlow")
"""Recent objectives, whose states are of the kinds above. Only random faults hit them."""

CLIENTS = ("client-0", "client-1")
COHORT = {"clients": CLIENTS, "min_clients": 2, "lease_seconds": 10, "max_attempts": 30}
_TRAINING = {"batch_size": 16, "local_epochs": 6}
"""Each client trains several times as long as a test needs to notice that a round has begun."""
_PARTITION = {"dataset": "digits", "num_clients": 2, "alpha": 0.5, "max_images": 160}


def spec(method: str, num_rounds: int = 3, **changes: Any) -> RunSpec:
    """Return a spec of two clients with 160 images together; `changes` replace whole sections."""
    sections: dict[str, Any] = {
        "num_rounds": num_rounds,
        "cohort": COHORT,
        "partition": _PARTITION,
        "training": _TRAINING,
    }
    if method == "flesd":
        reducer = {**CONFIGS["flesd"]["reducer"], "num_epochs": 12}
        sections["method"] = {"name": "flesd", **CONFIGS["flesd"], "reducer": reducer}
        sections["public_data"] = {**PUBLIC, "num_images": 64}
    return method_spec(method, **{**sections, **changes})


def images() -> dict[str, ImageData]:
    """Return each client's images, which are the same in every run."""
    return shards(spec("fedbyol"))


def reference(of: RunSpec) -> Tensors:
    """Return the weights of the undisturbed run: the simulation's, which has a deployment's bits (tests/parity)."""
    return _reference(of.model_dump_json())


@functools.lru_cache
def _reference(text: str) -> Tensors:
    return simulate(RunSpec.model_validate_json(text), images()).model
