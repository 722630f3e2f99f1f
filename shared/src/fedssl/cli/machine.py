"""Preparing this machine to compute: data sets, threads and device."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.cli.datasets.fetching import data_folder, ensure, would_download
from fedssl.cli.errors import UsageError
from fedssl.cli.output import note
from fedssl.cores import num_usable_cores
from fedssl.errors import DataError, DeviceError
from fedssl.packages import is_installed
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.runs import RunSpec

if TYPE_CHECKING:
    from fedssl.experiments.runs import ComputeSettings


def datasets_of(spec: RunSpec) -> set[str]:
    """Return the names of the data sets that a simulation of the spec reads."""
    found = {spec.partition and spec.partition.dataset, spec.central_evaluation and spec.central_evaluation.dataset}
    return {name for name in found if name}


def require_evaluation_images(evaluation: EvaluationConfig | None, root: Path | None) -> None:
    """Raise DataError if an evaluation's data set is a folder or file without labelled test images. Decodes no folder.

    Known data sets have such images, and may not have been downloaded yet.
    """
    from fedssl.data.datasets import DATASETS, count_images, may_have_labels

    if evaluation is None or (name := evaluation.dataset) in DATASETS:
        return
    try:
        count_images(name, "test", root)
        if not all(may_have_labels(name, split, root) for split in ("train", "test")):
            raise DataError(f"the images of {name} have no labels: give it one sub-folder per class in train and test")
    except DataError as error:
        raise DataError(f"encoders are evaluated on labelled images (evaluation.dataset), but {error}") from None


def show_start(spec: RunSpec) -> None:
    """Print the weights that a simulation starts from, if they are not random.

    Raises SpecError if they cannot be read, or do not fit the encoder.
    """
    if spec.model.initial is None:
        return
    from fedssl.models import build_encoder, load_initial
    from fedssl.models.start_files import read_start

    start = read_start(spec)
    assert start is not None, "the spec names one"
    encoder = build_encoder(spec.model.encoder, spec.data.channels, spec.data.image_size)
    table = load_initial(encoder, start.tensors, spec.model.initial.adapt)
    note(f"the encoder starts from the {spec.model.initial.source}, digest {start.digest}: {table}")


def prepare(
    device: str, threads: int, data_root: Path | None, datasets: set[str], jobs: str = "1"
) -> "ComputeSettings":
    """Download the data sets that can be downloaded, and set up torch.

    Raises UsageError if the device cannot be used, or `jobs` is neither a number nor `auto`.
    """
    _require_jobs(jobs)
    # Numerical libraries read these when they are imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    for name in sorted(datasets) if data_root is None else ():
        ensure(name, note)
    import torch

    from fedssl.experiments.runs import ComputeSettings

    torch.set_num_threads(threads)
    _require_device(device)
    num_jobs = _suitable_jobs(device, threads) if jobs == "auto" else int(jobs)
    return ComputeSettings(device=device, data_root=data_root or data_folder(), jobs=num_jobs)


def would_be_downloaded(datasets: set[str], data_root: Path | None) -> set[str]:
    """Return and report the data sets that `prepare` would download."""
    return {name for name in sorted(datasets) if data_root is None and would_download(name, note)}


def require_machine(device: str, jobs: str = "1") -> None:
    """Raise what `prepare` would raise, as far as that is known without torch, which dry runs do not need."""
    _require_jobs(jobs)
    if is_installed("torch"):
        _require_device(device)


def _require_jobs(jobs: str) -> None:
    if jobs != "auto" and not (jobs.isdecimal() and int(jobs) >= 1):
        raise UsageError(f"--jobs {jobs}: give a number of processes, 1 or more, or auto")


def _require_device(device: str) -> None:
    from fedssl.engine.devices import require_device

    try:
        require_device(device)
    except DeviceError as error:
        raise UsageError(f"--{error}") from None


def _suitable_jobs(device: str, threads: int) -> int:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.device_count() if device == "cuda" else 1
    return max(1, num_usable_cores() // threads)
