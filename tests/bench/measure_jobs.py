"""Clients per minute of a simulation on one GPU, by the number of processes that share it (`--jobs`).

    PYTHONPATH=tests python tests/bench/measure_jobs.py --seconds 120 --json jobs.json

Each simulation trains small clients, in bf16 and with recorded steps, in one process or in several that share the GPU.
Its first round is left out: it starts the processes, records the steps and lets cuDNN benchmark its algorithms. The
table has the seconds from the beginning to the end of that round. Images are noise, because only the time matters. The
last columns say how far the weights are from those of one process, as a share of the way that these went, and how much
memory of the whole GPU was used.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.data import ImageData
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import Result, RoundRecord, simulate
from support.weights import distance

ENCODERS: dict[str, dict[str, Any]] = {
    "convnet": {"name": "convnet", "widths": [32, 64, 128]},
    "resnet18": {"name": "resnet18"},
}
NUM_JOBS = (1, 4, 8, 2)  # the most important first, in case the time does not suffice for all
NUM_ROUNDS = 4


def spec_of(encoder: str, *, deterministic: bool) -> RunSpec:
    """Return the run that is measured."""
    training = {"batch_size": 64, "local_epochs": 2, "precision": "bf16", "gpu_steps": "recorded"}
    return RunSpec.model_validate(
        {
            "num_rounds": NUM_ROUNDS,
            "method": {"name": "fedsimclr"},
            "model": {"encoder": ENCODERS[encoder], "projector": {"hidden_dims": [256], "out_dim": 128}},
            "data": {"channels": 3, "image_size": 32},
            "training": {**training, "deterministic": deterministic},
            "watch": {"num_images": 0},
        }
    )


def clients(number: int, num_images: int) -> dict[str, ImageData]:
    """Return clients with images of noise."""
    rng = np.random.default_rng(0)
    shape = (num_images, 3, 32, 32)
    return {f"client-{n:02}": ImageData(rng.integers(0, 256, shape, np.uint8)) for n in range(number)}


def measure(spec: RunSpec, jobs: int, images: dict[str, ImageData], device: str) -> tuple[dict[str, Any], Result]:
    """Run one simulation, and return a row of the table."""
    started, first = time.perf_counter(), 0.0
    used = 0

    def note(record: RoundRecord) -> None:
        nonlocal first, used
        first = first or time.perf_counter() - started
        if device.startswith("cuda"):
            free, total = torch.cuda.mem_get_info()
            used = max(used, total - free)

    result = simulate(spec, images, device=device, jobs=jobs, on_round=note)
    seconds = [record.seconds for record in result.history[1:]]
    return {
        "encoder": spec.model.encoder.name,
        "jobs": jobs,
        "clients_per_minute": 60 * len(images) / statistics.median(seconds),
        "seconds_of_rounds": seconds,
        "seconds_to_the_end_of_the_first": first,
        "used_bytes": used,
    }, result


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    print(  # noqa: T201
        f"{row['encoder']:<10}{row['jobs']:>5}{row['clients_per_minute']:>13.0f}{row['gain']:>7.2f}"
        f"{row['seconds_to_the_end_of_the_first']:>10.1f}{row['distance']:>12.2g}{row['used_bytes'] / 2**30:>10.1f}",
        flush=True,
    )


def main() -> None:
    """Measure each pair of an encoder and a number of processes until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--images", type=int, default=512, help="per client")
    parser.add_argument("--encoders", nargs="+", default=list(ENCODERS), choices=list(ENCODERS))
    parser.add_argument("--jobs", nargs="+", type=int, default=list(NUM_JOBS))
    parser.add_argument("--deterministic", action="store_true", help="training.deterministic")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further simulation after that time")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    images = clients(options.clients, options.images)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    print(f"{name}, torch {torch.__version__}: {options.clients} clients x {options.images} images, bf16, "  # noqa: T201
          f"deterministic: {options.deterministic}")  # fmt: skip
    print(f"{'encoder':<10}{'jobs':>5}{'clients/min':>13}{'gain':>7}{'first, s':>10}{'distance':>12}{'GiB':>10}")  # noqa: T201
    rows: list[dict[str, Any]] = []
    of_one: dict[str, tuple[float, Result]] = {}
    for jobs in options.jobs:
        for encoder in options.encoders:
            if time.monotonic() - started > options.seconds:
                print(f"no time for {encoder} with {jobs}")  # noqa: T201
                continue
            spec = spec_of(encoder, deterministic=options.deterministic)
            row, result = measure(spec, jobs, images, options.device)
            rate, one = of_one.setdefault(encoder, (row["clients_per_minute"], result))
            row["gain"] = row["clients_per_minute"] / rate
            row["distance"] = distance(result.model, one.model, one.initial)
            rows.append(row)
            show(row)
            if options.json is not None:
                options.json.write_text(
                    json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1)
                )


if __name__ == "__main__":
    main()
