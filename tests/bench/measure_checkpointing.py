# ruff: noqa: T201
"""Memory and time of local training with and without gradient checkpointing, on a CPU.

    python tests/bench/measure_checkpointing.py

Each line is a separate process, whose largest resident size, less that before training, is the memory of a few steps.
"""

import os
import resource
import subprocess
import sys
import time

import torch

from fedssl.engine import run_local_round, start_run
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context
from fedssl.protocol.runs import RunSpec

ENCODERS = {
    "resnet18": {"name": "resnet18"},
    "convnext-tiny": {"name": "convnext-tiny"},
    "vit-tiny": {"name": "vit-tiny", "patch_size": 4},
}
RETURNING = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory is returned to the system at once
BATCH_SIZE, STEPS = 128, 1


def _train(name: str, *, recomputes: bool) -> None:
    """Print the megabytes and the seconds of a short round."""
    spec = RunSpec.model_validate(
        {
            "method": {"name": "fedsimclr"},
            "model": {"encoder": ENCODERS[name]},
            "data": {"channels": 3, "image_size": 32},
            "training": {"batch_size": BATCH_SIZE, "gradient_checkpointing": recomputes},
        }
    )
    method, generator = METHODS["fedsimclr"], torch.Generator().manual_seed(0)
    broadcast = start_run(method, Context(spec=spec, round_number=0)).broadcast
    images = torch.randint(0, 256, (STEPS * BATCH_SIZE, 3, 32, 32), dtype=torch.uint8, generator=generator)
    before, started = _peak_mb(), time.perf_counter()
    run_local_round(method, broadcast, None, ClientData(images), Context(spec=spec, round_number=1, client_id="a"))
    print(f"{_peak_mb() - before:.0f} {time.perf_counter() - started:.1f}")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure all encoders, or the one that is named on the command line."""
    if len(sys.argv) > 1:
        _train(sys.argv[1], recomputes=sys.argv[2] == "yes")
        return
    print(f"{'encoder':<16}{'MB':>8}{'s':>8}{'MB, recomputed':>18}{'s':>8}")
    for name in ENCODERS:
        found = [
            subprocess.run(
                [sys.executable, __file__, name, answer], check=True, capture_output=True, text=True, env=RETURNING
            ).stdout
            for answer in ("no", "yes")
        ]
        (megabytes, seconds), (fewer, longer) = (line.split() for line in found)
        print(f"{name:<16}{megabytes:>8}{seconds:>8}{fewer:>18}{longer:>8}", flush=True)


if __name__ == "__main__":
    main()
