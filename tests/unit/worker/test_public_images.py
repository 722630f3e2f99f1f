"""Which images on a data owner's machine a run may use as public images."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.artifacts.tensors import load_tensors
from fedssl.data import ImageData, save_npz
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, PublicDataConfig
from fedssl_worker.data import PublicImages

from .conftest import WorkerHarness, make_spec

DATA = DataConfig(channels=1, image_size=8)
CPU = torch.device("cpu")


def _config(dataset: str, num_images: int = 6) -> PublicDataConfig:
    return PublicDataConfig(dataset=dataset, num_images=num_images)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 255, (6, 1, 8, 8), dtype=np.uint8)
    for path in (tmp_path / "private.npz", tmp_path / "public" / "shared.npz"):
        path.parent.mkdir(exist_ok=True)
        save_npz(path, ImageData(images))
    return tmp_path / "public"


def test_a_file_in_the_owners_public_folder_is_found_by_its_name(folder: Path) -> None:
    public = PublicImages(CPU, folder).load(_config("shared.npz"), DATA)
    assert public is not None
    assert public.images.shape == (6, 1, 8, 8)
    assert public.labels is None


@pytest.mark.parametrize("dataset", ["../private.npz", "{parent}/private.npz", "missing.npz", "link.npz", "."])
def test_a_run_cannot_name_other_files(folder: Path, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "link.npz").symlink_to(folder.parent / "private.npz")
    monkeypatch.chdir(folder.parent)
    named = dataset.format(parent=folder.parent)
    with pytest.raises(DataError):
        PublicImages(CPU, folder).load(_config(named), DATA)


def test_only_known_data_sets_are_read_without_a_public_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    images = PublicImages(CPU)
    with pytest.raises(DataError, match=r"--public-data FOLDER"):
        images.load(_config("shared.npz"), DATA)
    digits = images.load(_config("digits", 20), DATA)
    assert digits is not None
    assert len(digits) == 20


def test_public_images_stay_loaded_until_a_run_names_others() -> None:
    images = PublicImages(CPU)
    first = images.load(_config("digits"), DATA)
    assert images.load(_config("digits"), DATA) is first
    assert images.load(_config("digits", 7), DATA) is not first
    assert images.load(None, DATA) is None


def test_a_worker_sends_normalised_representations_of_public_images(harness: WorkerHarness) -> None:
    method = {"name": "flesd", "reducer": {"name": "distillation", "num_anchors": 8, "batch_size": 4}}
    spec = make_spec(method=method, public_data={"dataset": "digits", "num_images": 20})
    finished = harness.executor().execute(harness.item(spec, 1), lambda progress: None)
    (representations,) = load_tensors(finished.update).values()
    assert representations.shape[0] == 20
    torch.testing.assert_close(representations.norm(dim=1), torch.ones(20))


def test_work_with_missing_public_images_is_refused_with_the_reason(harness: WorkerHarness) -> None:
    method = {"name": "flesd", "reducer": {"name": "distillation", "num_anchors": 8, "batch_size": 4}}
    spec = make_spec(method=method, public_data={"dataset": "scans", "num_images": 20})
    with pytest.raises(DataError, match="scans, which this machine does not hold"):
        harness.executor().execute(harness.item(spec, 1), lambda progress: None)
    assert harness.coordinator.calls == []
