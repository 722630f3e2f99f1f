"""The cost and the loss of each packing of FLESD's similarities: bytes, error of S, accuracy of the student.

    python tests/bench/bench_flesd_packings.py                 all packings, two rounds of Fashion-MNIST
    python tests/bench/bench_flesd_packings.py factored-f16 1  one of them, from another seed
    make bench ARGS="-k flesd_packings -s"                     the sizes and errors asserted, on one trained client

A federation of three clients trains and is distilled from scratch with each packing, from the same seed: the rows
differ only by the packing and its consequences. `representations-f32` is what FLESD's code sends, and the reference.
"""

import dataclasses
import functools
import sys
import time
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.artifacts.tensors import serialised
from fedssl.data import ImageData, choose_images, conform, load_dataset
from fedssl.data.partitioning import load_public, partition_dataset
from fedssl.engine import run_local_round, start_run
from fedssl.evaluation import knn_accuracy, linear_probe
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context
from fedssl.methods.composition.embedding import embed
from fedssl.methods.reducers.similarity import pack
from fedssl.methods.reducers.similarity_distillation import network
from fedssl.protocol.methods.distillation import Packing
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate

NUM_PUBLIC, WIDTH = 2000, 64
PACKINGS: tuple[Packing, ...] = get_args(Packing)
MEASURE: Packing = "representations-f32"

BYTES = {
    "factored-f32": 4 * NUM_PUBLIC * WIDTH,
    "factored-f16": 2 * NUM_PUBLIC * WIDTH,
    "representations-f32": 4 * NUM_PUBLIC * WIDTH,
    "representations-f16": 2 * NUM_PUBLIC * WIDTH,
    "triangle-f16": NUM_PUBLIC * (NUM_PUBLIC - 1),
    "triangle-i8": NUM_PUBLIC * (NUM_PUBLIC - 1) // 2,
}
LARGEST_ERRORS = {
    "factored-f32": 1e-6,
    "factored-f16": 1e-3,
    "representations-f32": 1e-6,
    "representations-f16": 1e-3,
    "triangle-f16": 3e-4,
    "triangle-i8": 4.1e-3,
}


def spec_with(packing: Packing, seed: int = 0) -> RunSpec:
    reducer = {
        "name": "distillation",
        "packing": packing,
        "num_epochs": 15,
        "num_anchors": 512,
        "momentum": 0.99,
        "optimizer": {"name": "adam", "learning_rate": 1e-3, "weight_decay": 1e-6},
    }
    return RunSpec.model_validate(
        {
            "seed": seed,
            "num_rounds": 2,
            "method": {"name": "flesd", "temperature": 0.2, "reducer": reducer},
            "model": {
                "encoder": {"widths": [32, 64, 128]},
                "projector": {"hidden_dims": [128], "out_dim": WIDTH, "batch_norm": False},
            },
            "data": {"channels": 1, "image_size": 28, "mean": [0.286], "std": [0.353]},
            "training": {"local_epochs": 4, "optimizer": {"name": "adam", "learning_rate": 1e-3}},
            "partition": {"dataset": "fashion-mnist", "num_clients": 3, "alpha": 0.5, "max_images": 6000},
            "public_data": {"dataset": "fashion-mnist", "num_images": NUM_PUBLIC, "seed": 1},
        }
    )


@functools.lru_cache
def _split(name: str) -> ImageData:
    images = load_dataset("fashion-mnist", name)  # type: ignore[arg-type]
    return conform(images.subset(choose_images(len(images), 4000, 7)), spec_with(MEASURE).data)


def accuracies(weights: dict[str, Tensor], spec: RunSpec) -> tuple[float, float]:
    """Return the accuracies of the encoder by linear probe and by kNN, with 4,000 labels and 4,000 test images."""
    ctx = Context(spec=spec, round_number=0)
    encoder = network(spec.model.encoder, weights, "student", ctx)["encoder"]
    sets = []
    for name in ("train", "test"):
        images = _split(name)
        assert images.labels is not None
        sets += [embed([encoder], torch.from_numpy(images.images), ctx), torch.from_numpy(images.labels)]
    return linear_probe(*sets).accuracy, knn_accuracy(*sets, k=50)


@functools.lru_cache
def trained_embeddings() -> Tensor:
    """Return the representations of the public images that one client sends after its first round."""
    spec = spec_with(MEASURE)
    assert spec.partition is not None
    assert spec.public_data is not None
    name, own = next(iter(partition_dataset(spec.partition, spec.data).by_client.items()))
    public = ClientData(torch.from_numpy(load_public(spec.public_data, spec.data).images))
    ctx = Context(spec=spec, round_number=1, client_id=name, public=public)
    method = METHODS["flesd"]
    broadcast = start_run(method, dataclasses.replace(ctx, round_number=0, client_id="")).received
    data = ClientData(torch.from_numpy(own.images))
    return run_local_round(method, broadcast, None, data, ctx).update["representations"]


def largest_error(z_ND: Tensor, packing: Packing) -> float:
    """Return the largest error of any pair's cosine, as the coordinator reads it from the packed tensor."""
    exact_NN = F.normalize(z_ND.double(), dim=1) @ F.normalize(z_ND.double(), dim=1).T
    packed = pack(z_ND, packing)
    if packed.ndim == 2:
        unit_ND = F.normalize(packed.float(), dim=1)
        return float((unit_ND @ unit_ND.T - exact_NN).abs().max())
    rows, columns = torch.triu_indices(len(z_ND), len(z_ND), offset=1)
    read = packed.double() / 127 if packed.dtype == torch.int8 else packed.double()
    return float((read - exact_NN[rows, columns]).abs().max())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packing", PACKINGS)
def test_flesd_packings_have_the_expected_sizes_and_errors(packing: Packing) -> None:
    z_ND = trained_embeddings()
    size, error = len(serialised({"x": pack(z_ND, packing)})), largest_error(z_ND, packing)
    print(f"{packing:20} {size:>9,} bytes, largest error of a cosine {error:.1e}")  # noqa: T201
    assert size == pytest.approx(BYTES[packing], abs=200)
    assert error < LARGEST_ERRORS[packing]


def report(packing: Packing, seed: int) -> str:
    """Run one federation from start to end, and return its line of the report."""
    started, spec = time.monotonic(), spec_with(packing, seed)
    result = simulate(spec)
    probe, knn = accuracies(result.model, spec)
    before = accuracies(result.initial, spec)
    z_ND = trained_embeddings()
    packing_started = time.monotonic()
    size = len(serialised({"x": pack(z_ND, packing)}))
    seconds = time.monotonic() - packing_started
    return (
        f"{packing:20} {size:>9,} bytes up a client and round, S off by {largest_error(z_ND, packing):.1e}, probe "
        f"{before[0]:.2%} -> {probe:.2%}, kNN {before[1]:.2%} -> {knn:.2%} "
        f"(packed in {1000 * seconds:.0f} ms, all in {time.monotonic() - started:.0f} s)"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen, seeds = sys.argv[1:2] or PACKINGS, [int(seed) for seed in sys.argv[2:]] or [0]
    for packing in chosen:
        for seed in seeds:
            print(f"seed {seed}", report(packing, seed), flush=True)  # type: ignore[arg-type]  # noqa: T201
