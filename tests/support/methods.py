"""A small federation of real images (scikit-learn's digits) for tests of methods."""

import functools
from typing import Any

from fedssl.data import ImageData
from fedssl.protocol.data import PartitionConfig
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec
from fedssl.shards import deal

# What a config needs beyond its defaults to fit the digits; keyed by method.
CONFIGS: dict[str, dict[str, Any]] = {}


def method_spec(name: str, **changes: Any) -> RunSpec:
    """A spec that trains `name` in seconds; `changes` replace whole sections."""
    return RunSpec.model_validate(
        {
            "seed": 11,
            "num_rounds": 2,
            "method": {"name": name, **CONFIGS.get(name, {})},
            "model": {
                "encoder": {"widths": [8, 16]},
                "projector": {"hidden_dims": [16], "out_dim": 8},
                "predictor": {"hidden_dims": [16], "out_dim": 8},
            },
            "data": {"channels": 1, "image_size": 8},
            "training": {"batch_size": 32, "local_epochs": 1},
            "cohort": {"min_clients": 3},
            "partition": {"dataset": "digits", "num_clients": 3, "alpha": 0.5, "max_images": 360},
            **changes,
        }
    )


@functools.lru_cache
def _shards(partition: PartitionConfig) -> dict[str, ImageData]:
    return deal(partition, method_spec("fedsimclr").data).by_client


def shards(spec: RunSpec) -> dict[str, ImageData]:
    """Every client's images."""
    assert spec.partition is not None
    return _shards(spec.partition)


ALL_METHODS = sorted(METHOD_CONFIGS)
