"""A small federation of real images (scikit-learn's digits) for tests of methods."""

import functools
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

from fedssl.data import ImageData
from fedssl.data.partitioning import load_public, partition_dataset
from fedssl.dimensions import client_dimensions
from fedssl.methods.api import ClientData, Context
from fedssl.protocol.data import DataConfig, PartitionConfig, PublicDataConfig
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import Result, simulate

PUBLIC = {"dataset": "digits", "split": "test", "num_images": 48}

# What a config needs beyond its defaults to fit the digits; keyed by method.
CONFIGS: dict[str, dict[str, Any]] = {
    "classifier": {"encoder_learning_rate": 0.02},
    "fedca": {"dictionary_size": 128, "client_dictionary_size": 64, "num_base_epochs": 5},
    "feddino": {"num_prototypes": 32},
    "fedmae": {"mask_ratio": 0.5, "decoder_width": 16, "decoder_depth": 1},
    "flesd": {
        "temperature": 0.1,
        "reducer": {
            "name": "distillation",
            "num_epochs": 6,
            "batch_size": 16,
            "num_anchors": 32,
            "momentum": 0.9,
            "temperature": 0.05,
            "optimizer": {"name": "adam", "learning_rate": 3e-3},
        },
    },
    "orchestra": {"num_global_centroids": 16, "num_local_centroids": 4, "memory_size": 32, "num_global_steps": 50},
    "fedu2": {"reducer": {"name": "eua", "server_learning_rate": 0.3}},
}

# First rounds whose loss cannot be compared: FedCA's dictionary is random, Orchestra only clusters.
ROUNDS_BEFORE_LEARNING = {"fedca": 1, "orchestra": 1}

# Methods that take no training step: they have no loss.
WITHOUT_LOSS = frozenset({"ridge-probe"})

# Further sections of the spec that a method needs; keyed by method.
SECTIONS: dict[str, dict[str, Any]] = {
    "fedca": {"public_data": PUBLIC},
    "fedmae": {"model": {"encoder": {"name": "vit-tiny", "patch_size": 4, "depth": 2}}},
    "flesd": {"public_data": {**PUBLIC, "num_images": 128}},
    "ssd": {"model": {"encoder": {"widths": [8, 16]}, "projector": {"hidden_dims": [16], "out_dim": 16}}},
}


def method_spec(name: str, **changes: Any) -> RunSpec:
    """Return a spec that trains `name` in seconds; `changes` replace whole sections."""
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
            **SECTIONS.get(name, {}),
            **changes,
        }
    )


@functools.lru_cache
def _shards(partition: PartitionConfig) -> dict[str, ImageData]:
    return partition_dataset(partition, method_spec("fedsimclr").data).by_client


def shards(spec: RunSpec) -> dict[str, ImageData]:
    """Return every client's images."""
    assert spec.partition is not None
    return _shards(spec.partition)


def simulation_of(spec: RunSpec) -> Result:
    """Return the simulation of a spec, which this process computes once."""
    return _simulated(spec.model_dump_json())


@functools.lru_cache(maxsize=8)
def _simulated(spec_json: str) -> Result:
    spec = RunSpec.model_validate_json(spec_json)
    return simulate(spec, shards(spec))


@functools.lru_cache
def _public(config: PublicDataConfig, data: DataConfig) -> ClientData:
    return ClientData(torch.from_numpy(load_public(config, data).images))


def context(spec: RunSpec, round_number: int, client_id: str = "") -> Context:
    """Return the context of a client in a round, with the public images and the client's own dimensions."""
    public = None if spec.public_data is None else _public(spec.public_data, spec.data)
    dimensions = client_dimensions(spec, shards(spec)).get(client_id)
    return Context(spec=spec, round_number=round_number, client_id=client_id, public=public, dimensions=dimensions)


ALL_METHODS = sorted(METHOD_CONFIGS)

TRAINED_METHODS = [name for name in ALL_METHODS if name not in WITHOUT_LOSS]

REPRESENTATIVE_METHODS = ("fedema", "fedmoco", "flesd", "orchestra", "scaffold")
"""Together they have every trait that `tests/contract/test_representative_methods.py` lists."""


def methods_of_this_run(names: Iterable[str], kept: Collection[str] = REPRESENTATIVE_METHODS) -> list[Any]:
    """Return the names as test parameters. All but those in `kept` run only if pytest is called with --full (see
    conftest.py)."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.full) for name in names]
