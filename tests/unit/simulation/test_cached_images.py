"""Simulations that crop from cached images: the same bits with several processes, and for every way to pass them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedssl.artifacts.tensors import Tensors
from fedssl.data import load_conformed
from fedssl.data.image_cache import load_cached
from fedssl.data.partitioning import partition_dataset, partition_images
from fedssl.errors import DataError
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.dicom_files import write_dicom
from support.methods import method_spec

_CACHED = {"channels": 1, "image_size": 8, "cache_size": 12}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / "images" / "abc"[number % 3] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, rng.integers(10, 40, 2), np.uint8)).save(path)
    return tmp_path / "images"


def _spec(folder: Path, name: str = "fedbyol", **changes: Any) -> RunSpec:
    partition = {"dataset": str(folder), "num_clients": 3, "scheme": "iid"}
    return method_spec(name, data=_CACHED, partition=partition, training={"batch_size": 8}, **changes)


def _differences(first: Tensors, second: Tensors) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", ["fedx", "orchestra", "fedrlc"])  # references, rotated images, and whole passes
def test_methods_train_on_cached_images(folder: Path, name: str) -> None:
    result = simulate(_spec(folder, name))
    assert result.rounds_done == 2
    assert all(torch.isfinite(tensor).all() for tensor in result.model.values() if tensor.is_floating_point())
    assert _differences(result.initial, result.model)


@pytest.mark.full
def test_two_processes_give_the_bits_of_one(folder: Path) -> None:
    assert _differences(simulate(_spec(folder)).model, simulate(_spec(folder), jobs=2).model) == []


def test_crops_of_whole_images_differ_from_crops_of_their_squares(folder: Path) -> None:
    spec = _spec(folder)
    squares = RunSpec.model_validate({**spec.model_dump(), "data": {**_CACHED, "cache_size": None}})
    assert _differences(simulate(spec).model, simulate(squares).model)


def test_sites_are_evaluated_on_the_middle_squares(folder: Path) -> None:
    evaluation = {"at": "sites", "sites": {"classes": ["a", "b", "c"]}, "max_train": 100, "max_test": 100}
    result = simulate(_spec(folder, evaluation=evaluation))
    assert result.site_evaluations


def test_images_that_do_not_match_the_cache_settings_are_refused(folder: Path) -> None:
    spec = _spec(folder)
    plain = spec.data.model_copy(update={"cache_size": None})
    squares = dict.fromkeys("abc", load_conformed(str(folder), "train", plain))
    with pytest.raises(DataError, match=r"squares in memory, and data\.cache_size needs whole images: load them with"):
        simulate(spec, squares)
    other = load_cached(str(folder), spec.data.model_copy(update={"cache_size": 16}))
    with pytest.raises(DataError, match="the cached images have other settings than the run"):
        simulate(spec, dict.fromkeys("abc", other))
    assert spec.partition is not None
    with pytest.raises(DataError, match=r"become squares of data\.image_size here"):
        partition_dataset(spec.partition, spec.data)


def test_unreadable_files_belong_to_no_client(folder: Path) -> None:
    whole = simulate(_spec(folder)).history[0].num_examples
    (folder / "a" / "00.png").write_bytes(b"")
    data = {**_CACHED, "max_unreadable": 0.05}
    spec = RunSpec.model_validate({**_spec(folder).model_dump(), "data": data})
    found = simulate(spec).history[0].num_examples
    assert sum(found.values()) == sum(whole.values()) - 1


@pytest.mark.parametrize("cache_size", [None, 12])
def test_images_of_five_floating_point_channels_can_be_trained_on(folder: Path, cache_size: int | None) -> None:
    own = folder.parent / "channels"
    own.mkdir()
    rng = np.random.default_rng(1)
    for number in range(24):
        np.save(own / f"{number}.npy", rng.normal(number, 50, (5, *rng.integers(9, 20, 2))).astype(np.float32))
    window = {"percentiles": [1, 99], "per_channel": True}
    data = {"channels": 5, "image_size": 8, "cache_size": cache_size, "window": window}
    spec = RunSpec.model_validate({**_spec(own).model_dump(), "data": data})
    result = simulate(spec)
    assert all(torch.isfinite(tensor).all() for tensor in result.model.values() if tensor.is_floating_point())
    assert _differences(result.initial, result.model)
    assert sum(result.history[0].num_examples.values()) == 24


def test_dicom_and_16_bit_tiff_can_be_trained_on_and_patients_are_kept_together(folder: Path) -> None:
    own, rng = folder.parent / "scans", np.random.default_rng(2)
    for number in range(24):
        values = rng.integers(0, 4096, (14, 11)).astype(np.uint16)
        write_dicom(own / "ab"[number % 2] / f"{number}.dcm", values, bits=12, PatientID=f"patient {number // 4}")
        tifffile.imwrite(own / "ab"[number % 2] / f"{number}.tif", values * 16, tile=(16, 16), compression="zlib")
    evaluation = {"at": "sites", "sites": {"classes": ["a", "b"]}}
    data = {**_CACHED, "window": {"stored": True}, "distinct_groups": True}
    spec = RunSpec.model_validate({**_spec(own, "fedx", evaluation=evaluation).model_dump(), "data": data})
    result = simulate(spec)
    assert result.site_evaluations
    assert _differences(result.initial, result.model)
    assert spec.partition is not None
    owners = [
        set() if images.groups is None else set(images.groups.tolist())
        for images in partition_images(spec.partition, spec.data).values()
    ]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 6 + 24
