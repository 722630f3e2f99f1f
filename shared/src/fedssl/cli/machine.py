"""Preparing this machine to compute: data sets, threads and device."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.cli.datasets.fetching import data_folder, ensure
from fedssl.cli.errors import UsageError
from fedssl.cli.output import note
from fedssl.errors import DeviceError
from fedssl.protocol.runs import RunSpec

if TYPE_CHECKING:
    from fedssl.experiments.runs import ComputeSettings


def datasets_of(spec: RunSpec) -> set[str]:
    """Return the names of the data sets that a simulation of the spec reads."""
    found = {spec.partition and spec.partition.dataset, spec.evaluation and spec.evaluation.dataset}
    return {name for name in found if name}


def prepare(device: str, threads: int, data_root: Path | None, datasets: set[str]) -> "ComputeSettings":
    """Download the data sets that can be downloaded, and set up torch. Raises UsageError if the device is unusable."""
    # Numerical libraries read these when they are imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    for name in sorted(datasets) if data_root is None else ():
        ensure(name, note)
    import torch

    from fedssl.engine.devices import require_device
    from fedssl.experiments.runs import ComputeSettings

    torch.set_num_threads(threads)
    try:
        require_device(device)
    except DeviceError as error:
        raise UsageError(f"--{error}") from None
    return ComputeSettings(device=device, data_root=data_root or data_folder())
