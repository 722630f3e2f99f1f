"""The executor of one work item: what it refuses before training, and what it does not train twice."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.client import NotFound
from fedssl.data import ImageData
from fedssl.errors import ArtifactTooLarge, Cancelled, DataError, DeviceError, DigestMismatch, MethodError, PlanMismatch
from fedssl.protocol.data import DataConfig, WindowConfig
from fedssl.protocol.plan import TensorSpec
from fedssl.protocol.secure_work import SECURE_PROTOCOL
from fedssl.protocol.states import Cause
from fedssl.protocol.work import Progress, WorkItem
from fedssl_worker import data as data_module
from fedssl_worker import executor as executor_module
from fedssl_worker.causes import CannotTrain, cause_of
from fedssl_worker.data import OwnImages
from fedssl_worker.disclosure.policy import NotPermitted
from fedssl_worker.state import Finished

from .conftest import CPU, WorkerHarness, good_update, make_spec, write_images


def silent(progress: Progress) -> None:
    pass


def widened(item: WorkItem) -> WorkItem:
    more = TensorSpec(name="images", dtype="U8", shape=(32, 1, 16, 16))
    return item.model_copy(update={"plan": item.plan.model_copy(update={"update": (*item.plan.update, more)})})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (widened, r"artifact plan for \w+ differs from this worker's"),
        (lambda item: item.model_copy(update={"method_version": 99}), "fedbyol version 99; this worker has version 1"),
        (lambda item: item.model_copy(update={"client_id": "hospital-b"}), "is for the client hospital-b"),
    ],
    ids=["wider plan", "other version", "foreign"],
)
def test_work_for_another_client_or_version_is_refused(harness: WorkerHarness, change: Any, words: str) -> None:
    with pytest.raises(CannotTrain, match=words):
        harness.executor().execute(change(harness.item(make_spec(), 1)), silent)
    assert harness.coordinator.calls == []


def test_an_update_of_a_secure_run_leaves_only_masked(harness: WorkerHarness) -> None:
    secure = {"aggregation": {"arithmetic": "fixed"}, "secure_aggregation": {"min_cohort": 3}}
    item = harness.item(make_spec(**secure), 1)
    for version in (None, SECURE_PROTOCOL + 1):  # version 1 had no key
        older = "coordinator" if version is None else "worker"
        with pytest.raises(CannotTrain, match=f"coordinator version {version or 1}: upgrade the {older}"):
            harness.executor().secure_context(item.model_copy(update={"secure_protocol": version}))
    item = item.model_copy(update={"secure_protocol": SECURE_PROTOCOL})
    with pytest.raises(CannotTrain, match="cohort has no secure sum: secure aggregation needs at least 3") as refused:
        harness.executor().secure_context(item)
    assert refused.value.cause == Cause.COORDINATOR
    finished = harness.executor().execute(item, silent)
    with pytest.raises(NotPermitted, match="only leave as a masked vector"):
        harness.egress().deliver(item, finished)
    assert harness.coordinator.artifacts.keys() == {item.broadcast}


def test_an_update_out_of_range_is_refused_by_tensor_name_without_its_value(harness: WorkerHarness) -> None:
    secure = {"aggregation": {"arithmetic": "fixed"}, "secure_aggregation": {"min_cohort": 3}}
    item = harness.item(make_spec(**secure), 1)
    update = good_update()
    name = next(name for name, tensor in update.items() if tensor.is_floating_point())
    update[name].view(-1)[0] = 1e9
    path = harness.folder / "update.safetensors"
    save_tensors(update, path)
    with pytest.raises(CannotTrain, match=f"^out of range: {name}: a value does not fit") as refused:
        harness.executor().secure_words(item, Finished(path, digest_of(path), 1000, {}))
    assert "e+09" not in str(refused.value)


def test_shapes_beyond_the_workers_limits_are_refused(harness: WorkerHarness, tmp_path: Path) -> None:
    path = str(write_images(tmp_path / "bounded.npz"))
    harness.images = OwnImages(path, CPU, image_size=16, channels=1)
    for data, words in (
        ({"channels": 3, "image_size": 16}, "serves only 1 channel: .* --channels 3"),
        ({"channels": 1, "image_size": 32}, "serves at most 16 pixels: .* --image-size 32"),
    ):
        with pytest.raises(DataError, match=words):
            harness.executor().execute(harness.item(make_spec(data=data), 1), silent)


def test_a_worker_trains_with_any_shape_that_a_run_asks_for(harness: WorkerHarness) -> None:
    spec = make_spec(data={"channels": 3, "image_size": 24})
    finished = harness.executor().execute(harness.item(spec, 1), silent)
    assert finished.num_examples == 32
    again = harness.executor().execute(harness.item(make_spec(), 1), silent)
    assert again.digest != finished.digest


def test_a_broadcast_is_fetched_once_and_only_one_is_kept(harness: WorkerHarness) -> None:
    executor = harness.executor()
    first = executor.execute(harness.item(make_spec(), 1), silent)
    executor.execute(harness.item(make_spec(), 2), silent)
    assert harness.coordinator.calls.count("GET artifact") == 1
    (cached,) = (harness.folder / "broadcasts").iterdir()
    cached.write_bytes(b"damaged")
    executor.execute(harness.item(make_spec(), 3), silent)
    assert harness.coordinator.calls.count("GET artifact") == 2
    assert first.num_examples == 32
    other = make_spec(seed=1)
    executor.execute(harness.item(other, 1), silent)
    assert len(list((harness.folder / "broadcasts").iterdir())) == 1


def test_a_broadcast_that_is_damaged_too_large_missing_or_does_not_fit_is_refused(harness: WorkerHarness) -> None:
    executor = harness.executor()
    item = harness.item(make_spec(), 1)
    content = harness.coordinator.artifacts[item.broadcast]
    harness.coordinator.artifacts[item.broadcast] = content[:-1] + b"\x01"
    with pytest.raises(DigestMismatch):
        executor.execute(item, silent)
    harness.coordinator.artifacts[item.broadcast] = content * 100
    with pytest.raises(ArtifactTooLarge):
        executor.execute(item, silent)
    del harness.coordinator.artifacts[item.broadcast]
    with pytest.raises(NotFound):
        executor.execute(item, silent)
    wrong: Tensors = {"encoder": torch.zeros(1)}
    with pytest.raises(PlanMismatch):
        executor.execute(harness.item(make_spec(), 1, wrong), silent)


def test_a_finished_update_is_not_trained_again(harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    item = harness.item(make_spec(), 1)
    finished = harness.executor().execute(item, silent)
    monkeypatch.setattr(executor_module, "run_local_round", None)
    again = item.model_copy(update={"assignment_id": harness.item(make_spec(), 1).assignment_id})
    assert harness.executor().execute(again, silent) == finished


@pytest.mark.parametrize("difference", ["round", "spec", "broadcast", "images"])
def test_work_that_differs_from_the_finished_work_is_trained(
    harness: WorkerHarness, tmp_path: Path, difference: str
) -> None:
    finished = harness.executor().execute(harness.item(make_spec(), 1), silent)
    spec = make_spec(seed=1) if difference == "spec" else make_spec()
    broadcast = None
    if difference == "broadcast":
        broadcast = harness.train_directly(spec, 1)[0]
    if difference == "images":
        harness.images = OwnImages(str(write_images(tmp_path / "other.npz", num_images=24)), CPU)
    other = harness.executor().execute(harness.item(spec, 2 if difference == "round" else 1, broadcast), silent)
    assert other.digest != finished.digest


def test_divergence_is_a_method_error(harness: WorkerHarness) -> None:
    spec = make_spec(training={"batch_size": 8, "local_epochs": 3, "optimizer": {"learning_rate": 100.0}})
    broadcast = {
        name: tensor * 1e30 if tensor.is_floating_point() else tensor
        for name, tensor in harness.train_directly(make_spec(), 1)[0].items()
    }
    with pytest.raises(MethodError):
        harness.executor().execute(harness.item(spec, 1, broadcast), silent)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_names_the_batch_size(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(executor_module, "run_local_round", fail)
    with pytest.raises(DeviceError, match=r"batch size 8: lower training\.batch_size") as refused:
        harness.executor().execute(harness.item(make_spec(), 1), silent)
    assert cause_of(refused.value) == Cause.CLIENT_MACHINE


def test_progress_is_reported_and_may_cancel(harness: WorkerHarness) -> None:
    told: list[Progress] = []
    harness.executor().execute(harness.item(make_spec(), 1), told.append)
    assert told[0].phase == "downloading"
    assert told[-1].phase == "training"
    assert told[-1].step == told[-1].num_steps == 4

    def cancel(progress: Progress) -> None:
        if progress.phase == "training":
            raise Cancelled("no more")

    with pytest.raises(Cancelled):
        harness.executor().execute(harness.item(make_spec(), 2), cancel)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_work_is_declined_if_its_images_do_not_fit_on_the_device_and_the_worker_continues(
    harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    harness = dataclasses.replace(harness, images=OwnImages(str(write_images(tmp_path / "own.npz")), CPU))
    agent = harness.restart()
    spec = make_spec(data={"image_size": 12, "channels": 1})
    harness.offer(spec, 1)

    def fail(*args: object, **options: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(data_module.torch, "tensor", fail)
        agent.step()
    [declined] = harness.coordinator.declined
    assert "cannot be prepared with 1 channel and 12 x 12 pixels: see its worker's log" in declined.reason
    harness.offer(spec, 1)
    agent.step()
    assert len(harness.coordinator.submissions) == 1


def test_images_are_converted_to_the_requested_size_and_channels(tmp_path: Path) -> None:
    path = write_images(tmp_path / "own.npz", size=20)
    images = OwnImages(str(path), CPU, image_size=16, channels=3)
    assert (images.channels, images.image_size, len(images)) == (3, 16, 32)
    assert images.data.images.dtype == torch.uint8
    assert images.fingerprint != OwnImages(str(path), CPU).fingerprint
    with pytest.raises(DataError, match="found no data set"):
        OwnImages(str(tmp_path / "nowhere"), CPU)


def _random_files(folder: Path, num_images: int = 3) -> Path:
    generator = np.random.default_rng(1)
    folder.mkdir()
    for number in range(num_images):
        pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_images_prepared_on_demand_equal_those_of_a_worker_started_with_that_shape(tmp_path: Path, kind: str) -> None:
    path = _random_files(tmp_path / "own") if kind == "files" else write_images(tmp_path / "own.npz", size=40)
    images = OwnImages(str(path), CPU)
    for channels, size in ((1, 16), (3, 24), (3, 40), (1, 16)):
        expected = OwnImages(str(path), CPU, image_size=size, channels=channels)  # type: ignore[arg-type]
        prepared = images.prepared(DataConfig(channels=channels, image_size=size))  # type: ignore[arg-type]
        assert prepared.fingerprint == expected.fingerprint
        assert torch.equal(prepared.data.images, expected.data.images)


def test_the_last_two_shapes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = OwnImages(str(_random_files(tmp_path / "own")), CPU)
    read: list[int] = []
    real = data_module.load_own

    def load_own(*args: Any, image_size: int, **others: Any) -> ImageData:
        read.append(image_size)
        return real(*args, image_size=image_size, **others)

    monkeypatch.setattr(data_module, "load_own", load_own)
    for size in (40, 16, 40, 16, 24, 16, 40):
        images.prepared(DataConfig(channels=3, image_size=size))
    assert read == [16, 24, 40]


def test_the_error_for_images_that_cannot_be_prepared_does_not_name_the_file(tmp_path: Path) -> None:
    folder = _random_files(tmp_path / "own")
    images = OwnImages(str(folder), CPU)
    (folder / "1.png").write_bytes(b"damaged")
    with pytest.raises(DataError) as error:
        images.prepared(DataConfig(channels=1, image_size=16))
    assert "cannot be prepared with 1 channel and 16 x 16 pixels: see its worker's log" in str(error.value)
    assert "1.png" not in str(error.value)
    (folder / "1.png").unlink()
    with pytest.raises(DataError, match="images have changed: 3 were registered, and now there are 2; restart"):
        images.prepared(DataConfig(channels=1, image_size=16))


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_other_images_than_the_registered_ones_are_refused_even_if_their_number_is_the_same(
    tmp_path: Path, kind: str
) -> None:
    """Labels belong to images by position, so the earlier labels would be applied to other images."""
    path = _random_files(tmp_path / "own") if kind == "files" else write_images(tmp_path / "own.npz", size=40)
    images = OwnImages(str(path), CPU)
    if kind == "files":
        (path / "notes.txt").write_text("not an image")
        (path / "1.png").write_bytes((path / "2.png").read_bytes())  # another image under the same name
    assert len(images.prepared(DataConfig(channels=1, image_size=16)).data) == len(images)
    if kind == "files":
        (path / "0.png").rename(path / "9.png")
    else:
        write_images(path, size=48)
    with pytest.raises(DataError, match="have changed since they were registered; restart the worker"):
        images.prepared(DataConfig(channels=1, image_size=24))


def test_large_photographs_need_an_image_size_and_are_refused_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (530, 520)).save(tmp_path / "photo.jpg")
    assert OwnImages(str(tmp_path), CPU, image_size=16).image_size == 16
    monkeypatch.setattr("fedssl.data.folders.decode_to_memory", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataError, match="520 pixels wide: give --image-size, between 8 and 512"):
        OwnImages(str(tmp_path), CPU)


def test_images_of_more_than_8_bits_are_registered_and_need_the_window_of_the_run(tmp_path: Path) -> None:
    for number in range(4):
        pixels = np.linspace(0, 4000 - number, 256).astype(np.uint16).reshape(16, 16)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    images = OwnImages(str(tmp_path), CPU)
    assert (len(images), images.channels, images.image_size) == (4, 1, 16)
    with pytest.raises(DataError, match=r"more than 8 bits per value: set \[data\.window\] in the run's spec"):
        images.prepared(DataConfig(channels=1, image_size=16))
    prepared = images.prepared(DataConfig(channels=1, image_size=16, window=WindowConfig(values=(0, 4000))))
    assert prepared.data.images.dtype == torch.int16
    assert prepared.data.images[0].max() == 32_767
    other = images.prepared(DataConfig(channels=1, image_size=16, window=WindowConfig(values=(0, 8000))))
    assert other.data.images[0].max() == 16_384
    assert other.fingerprint != prepared.fingerprint


def test_images_with_five_channels_serve_only_runs_with_five_channels(tmp_path: Path) -> None:
    np.save(tmp_path / "1.npy", np.zeros((16, 16, 5), np.uint8))
    images = OwnImages(str(tmp_path), CPU)
    assert images.serves.max_channels == images.channels == 5
    assert images.prepared(DataConfig(channels=5, image_size=16)).data.images.shape == (1, 5, 16, 16)
    with pytest.raises(DataError, match="this client serves 5 channels"):
        images.prepared(DataConfig(channels=3, image_size=16))
    with pytest.raises(DataError, match="this client serves 1 or 3 channels"):
        OwnImages(str(_random_files(tmp_path / "rgb")), CPU).prepared(DataConfig(channels=5, image_size=16))


def test_pages_of_tiff_files_are_channels_if_their_number_is_given(tmp_path: Path) -> None:
    for number in range(2):
        tifffile.imwrite(tmp_path / f"{number}.tif", np.full((5, 16, 16), 900, np.uint16), photometric="minisblack")
    with pytest.raises(DataError, match="it has 5 pages: if they are channels, ask for 5 channels"):
        OwnImages(str(tmp_path), CPU)
    images = OwnImages(str(tmp_path), CPU, channels=5)
    assert (images.channels, images.serves.max_channels) == (5, 5)
    window = WindowConfig(values=(0, 1800))
    assert images.prepared(DataConfig(channels=5, image_size=16, window=window)).data.images.unique().tolist() == [
        16_384
    ]
    Image.new("L", (16, 16)).save(tmp_path / "2.png")
    with pytest.raises(DataError, match=r"2\.png: it has 1 channel, and the run needs 5"):
        OwnImages(str(tmp_path), CPU, channels=5)


def test_unreadable_images_are_left_out_up_to_the_owners_and_the_runs_limits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(100):
        Image.fromarray(rng.integers(0, 256, (16, 16), np.uint8)).save(tmp_path / f"{number:02}.png")
    (tmp_path / "00.png").write_bytes(b"")
    images = OwnImages(str(tmp_path), CPU)
    assert (len(images), images.num_listed) == (99, 100)
    shape = DataConfig(channels=1, image_size=16)
    assert len(images.prepared(shape).data) == 99
    assert images.prepared(shape.model_copy(update={"image_size": 8})).unreadable == (0,)
    for size in (8, 12):
        strict = DataConfig(channels=1, image_size=size, max_unreadable=0)
        with pytest.raises(
            DataError, match=r"cannot be (read than the run allows: at most 0 %|prepared with 1 channel)"
        ):
            images.prepared(strict)
    (tmp_path / "01.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot decode any of the first 2 of 100 images .*00\.png: .*01\.png: "):
        OwnImages(str(tmp_path), CPU)
    tolerant = OwnImages(str(tmp_path), CPU, max_unreadable=0.02)
    assert len(tolerant) == len(tolerant.data) == 98
    (tmp_path / "02.png").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be prepared"):  # the owner's limit also applies if a run allows more
        tolerant.prepared(DataConfig(channels=1, image_size=10, max_unreadable=0.5))


def test_an_update_reports_how_many_files_were_left_out(harness: WorkerHarness, tmp_path: Path) -> None:
    folder = _random_files(tmp_path / "files", 8)
    (folder / "broken.png").write_bytes(b"")
    harness.images = OwnImages(str(folder), CPU, max_unreadable=0.2)
    spec = make_spec(data={"channels": 1, "image_size": 16, "max_unreadable": 0.2}, num_rounds=1)
    finished = harness.executor().execute(harness.item(spec, 1), silent)
    assert finished.metrics["unreadable_images"] == 1
    assert finished.num_examples == 8


def test_a_site_without_a_folder_for_each_class_does_not_train_with_shifted_class_numbers(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    for name in ("dog", "owl"):
        _random_files(tmp_path / "own" / name, 4)
    spec = make_spec({"name": "supervised", "num_classes": 3})
    harness.images = OwnImages(str(tmp_path / "own"), CPU)
    with pytest.raises(DataError, match="add an empty folder for each class that this client lacks"):
        harness.executor().execute(harness.item(spec, 1), silent)
    (tmp_path / "own" / "cat").mkdir()
    harness.images = OwnImages(str(tmp_path / "own"), CPU)
    assert harness.images.data.labels is not None
    assert harness.images.data.labels.tolist() == [1] * 4 + [2] * 4
    assert harness.executor().execute(harness.item(spec, 1), silent).num_examples == 8
