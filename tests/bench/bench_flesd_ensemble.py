"""How much memory FLESD needs for 50,000 public images and 10 clients: under 4 GB, on the coordinator and on a client.

    python tests/bench/bench_flesd_ensemble.py            for each width of the embedding, one aggregation, one packing
    make bench ARGS="-k flesd_ensemble -s"                the same, asserted

The matrix of all pairs would take 10 GB per client in float32. Every measurement runs in a separate process and counts
everything in its memory: in an aggregation, torch, the images, the model and the clients' updates; in a packing, torch
and the embeddings.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import read_tensors, save_tensors
from fedssl.engine import run_aggregation, start_run
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context, Update
from fedssl.methods.reducers.similarity import pack
from fedssl.protocol.runs import RunSpec

NUM_IMAGES, NUM_CLIENTS, LIMIT_BYTES = 50_000, 10, 4e9
WIDTHS = (128, 512)


def _spec(width: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "method": {"name": "flesd", "reducer": {"name": "distillation", "num_epochs": 1}},
            "model": {"encoder": {"widths": [8, 16]}, "projector": {"hidden_dims": [32], "out_dim": width}},
            "public_data": {"dataset": "cifar10", "num_images": NUM_IMAGES},
        }
    )


def measure(width: int) -> dict[str, float]:
    """Aggregate once in this process, and return the peak of its memory and the seconds."""
    spec, generator = _spec(width), torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    ctx = Context(spec=spec, round_number=1, public=ClientData(images))
    method = METHODS["flesd"]
    state = start_run(method, ctx).state
    with tempfile.TemporaryDirectory() as folder:
        updates = []
        for client in range(NUM_CLIENTS):
            path = Path(folder) / f"client-{client}"
            z_ND = torch.randn(NUM_IMAGES, width, generator=generator)
            save_tensors({"factor": F.normalize(z_ND, dim=1)}, path)  # as large as a real factor
            updates.append(Update(path.name, 1, partial(read_tensors, path, digest_of(path))))
        started = time.monotonic()
        run_aggregation(method, state, updates, ctx)
    return _found(started)


def measure_packing(width: int) -> dict[str, float]:
    """Pack one client's factor in this process, and return the peak of its memory and the seconds."""
    z_ND = torch.randn(NUM_IMAGES, width, generator=torch.Generator().manual_seed(0))
    started = time.monotonic()
    pack(z_ND, "factored-f32")
    return _found(started)


def _found(started: float) -> dict[str, float]:
    seconds = time.monotonic() - started
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "seconds": seconds}


def measure_apart(width: int, *, what: str = "aggregation") -> dict[str, float]:
    """Measure in a separate process, whose memory no other measurement has used."""
    command = [sys.executable, __file__, what, str(width)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def _report(width: int, found: dict[str, float], *, what: str = "aggregation") -> str:
    if what == "packing":
        return (
            f"FLESD, one client's factor of {NUM_IMAGES:,} public images, embeddings of {width}: peak memory "
            f"{found['peak_bytes'] / 1e9:.2f} GB, in {found['seconds']:.1f} s"
        )
    return (
        f"FLESD, {NUM_IMAGES:,} public images, {NUM_CLIENTS} clients, embeddings of {width}: peak memory "
        f"{found['peak_bytes'] / 1e9:.2f} GB, one epoch of distillation in {found['seconds']:.0f} s "
        f"(all pairs would take {NUM_IMAGES**2 * 4 * NUM_CLIENTS / 1e9:.0f} GB)"
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("what", ["aggregation", "packing"])
def test_flesd_ensemble_stays_below_four_gigabytes(width: int, what: str) -> None:
    found = measure_apart(width, what=what)
    print(_report(width, found, what=what))  # noqa: T201
    assert found["peak_bytes"] < LIMIT_BYTES


if __name__ == "__main__":
    if len(sys.argv) > 2:
        torch.set_num_threads(1)
        measured = measure if sys.argv[1] == "aggregation" else measure_packing
        sys.stdout.write(json.dumps(measured(int(sys.argv[2]))))
    else:
        for chosen in WIDTHS:
            for kind in ("packing", "aggregation"):
                print(_report(chosen, measure_apart(chosen, what=kind), what=kind), flush=True)  # noqa: T201
