"""Runs on 16-bit TIFF, 16-bit PNG, array and DICOM files, through a window, have the bits of their simulations.

Some of the files cannot be read and are left out.
"""

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import torch
from PIL import Image

from fedssl.data.datasets import load_conformed
from fedssl.data.image_cache import load_cached
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome
from fedssl.simulation import simulate
from support.deployed import assert_simulated, wait_until_completed, wait_until_ended
from support.dicom_files import write_dicom
from support.methods import method_spec
from support.processes import Federation, federation
from support.servers import Servers

pytestmark = [pytest.mark.parity, pytest.mark.full]

WINDOW = {"values": [100, 3900]}
SUFFIXES = (".tif", ".png", ".npy", ".dcm")
PATIENT = "Secret-Patient"
DATA = {"channels": 1, "image_size": 8, "window": WINDOW, "max_unreadable": 0.2}


def _write(path: Path, values: np.ndarray[Any, np.dtype[np.uint16]], patient: str) -> None:
    if path.suffix == ".tif":
        tifffile.imwrite(path, values, compression="zlib")
    elif path.suffix == ".png":
        Image.fromarray(values).save(path)
    elif path.suffix == ".dcm":
        write_dicom(path, values, bits=12, RescaleSlope=1, RescaleIntercept=0, PatientID=patient)
    else:
        np.save(path, values)


def _pack(folder: Path) -> None:
    """Put four of the arrays into files that contain several images: `.npz`, a tar shard and Parquet."""
    values = [np.load(path) for path in (folder / f"{number}.npy" for number in range(8, 12))]
    np.savez(folder / "8.npz", images=np.stack(values[:2]))
    content = []
    for each in values[2:]:
        Image.fromarray(each).save(png := io.BytesIO(), "PNG")
        content.append(png.getvalue())
    with tarfile.open(folder / "9.tar", "w") as archive:
        info = tarfile.TarInfo("000.png")
        info.size = len(content[0])
        archive.addfile(info, io.BytesIO(content[0]))
    pq.write_table(pa.table({"image": [{"bytes": content[1], "path": "1.png"}]}), folder / "a.parquet")
    for number in range(8, 12):
        (folder / f"{number}.npy").unlink()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of images with 12 bits in 16, which would be nearly black without a window."""
    found, rng = {}, np.random.default_rng(0)
    for number, suffix in enumerate(SUFFIXES):
        folder = found[f"client-{number}"] = tmp_path_factory.mktemp("images")
        for image in range(12):
            values = rng.integers(0, 4096, (11, 9)).astype(np.uint16)
            _write(folder / f"{image}{suffix}", values, f"{PATIENT}-{image % 4}")
        if suffix == ".npy":
            _pack(folder)
        (folder / f"3{suffix}").write_bytes((folder / f"3{suffix}").read_bytes()[:-60])
    return found


@pytest.fixture(scope="module")
def running(
    servers: Servers, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Federation]:
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path_factory.mktemp("run") / "run", folders) as started,
    ):
        for name in folders:
            started.start(name, FEDSSL_WORKER_IMAGE_SIZE="16", FEDSSL_WORKER_MAX_UNREADABLE="0.2")
        yield started


def _assert_simulated(running: Federation, spec: RunSpec, clients: Mapping[str, Any]) -> None:
    """Assert that the run of a spec has the bits of its simulation with the same images."""
    simulated = simulate(spec, clients).model
    done = wait_until_completed(running, running.client.create_run(spec).id, 100)
    assert_simulated(running, done.id, simulated)


def test_a_windowed_run_equals_its_simulation(running: Federation, folders: dict[str, Path]) -> None:
    spec = method_spec("fedbyol", data=DATA, cohort={"min_clients": len(folders)}, partition=None)
    clients = {
        name: load_conformed(str(folder), "train", spec.data, leave_out=True) for name, folder in folders.items()
    }
    assert all(len(images) == 11 for images in clients.values())
    assert {images.images.dtype for images in clients.values()} == {np.dtype(np.int16)}
    _assert_simulated(running, spec, clients)
    files = [path for path in running.folder.rglob("*") if path.is_file()]  # logs, states, ledgers, the store
    assert len(files) > len(folders)
    assert not [path for path in files if PATIENT.encode() in path.read_bytes()]


def test_a_run_that_crops_from_caches_equals_its_simulation(
    running: Federation, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {**DATA, "cache_size": 10}
    spec = method_spec("fedbyol", data=data, cohort={"min_clients": len(folders)}, partition=None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clients = {name: load_cached(str(folder), spec.data) for name, folder in folders.items()}
    _assert_simulated(running, spec, clients)


def test_batches_of_different_patients_equal_their_simulation(running: Federation, folders: dict[str, Path]) -> None:
    data = {**DATA, "distinct_groups": True}
    spec = method_spec("fedbyol", data=data, cohort={"clients": ["client-3"], "min_clients": 1}, partition=None)
    clients = {"client-3": load_conformed(str(folders["client-3"]), "train", spec.data, leave_out=True)}
    _assert_simulated(running, spec, clients)
    plain = RunSpec.model_validate({**spec.model_dump(), "data": DATA})
    models = [simulate(each, clients).model for each in (spec, plain)]
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_run_without_a_window_shows_why_workers_declined(running: Federation) -> None:
    data = {**DATA, "window": None}
    spec = method_spec("fedbyol", data=data, cohort={"min_clients": len(SUFFIXES), "max_attempts": 1}, partition=None)
    run = running.client.create_run(spec)

    def declined() -> list[str] | None:
        found = [one for each in running.client.rounds(run.id) for one in each.assignments]
        reasons = [one.reason for one in found if one.state is AssignmentState.DECLINED and one.reason]
        return reasons if len(reasons) == len(SUFFIXES) else None

    reasons = running.wait_for(declined, "all assignments declined", 60)
    assert wait_until_ended(running, run.id, 100).outcome is Outcome.FAILED
    words = "more than 8 bits per value: set [data.window] in the run's spec"
    assert all(words in reason for reason in reasons), reasons


def test_a_run_with_unsupported_channels_shows_why_no_client_takes_part(running: Federation) -> None:
    data = {**DATA, "channels": 5}
    run = running.client.create_run(
        method_spec("fedbyol", data=data, cohort={"min_clients": len(SUFFIXES)}, partition=None)
    )

    # The first reason may only be that clients have not registered yet.
    names = ", ".join(f"client-{number}" for number in range(len(SUFFIXES)))
    words = f"{names}: the run needs images of 5 channels and 8 x 8 pixels, but this client serves 1 or 3"

    def named() -> bool:
        return words in (running.client.run(run.id).reason or "")

    running.wait_for(named, "a reason that names every client", 60)
    running.client.stop(run.id)
