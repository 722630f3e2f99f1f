"""Data sets are written to one file and read back."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedssl.artifacts.store import digest_of
from fedssl.data import DATASETS, ImageData, choose_images, conform, load_dataset
from fedssl.data.dataset_files import (
    ImageSelection,
    has_digest,
    own_shape,
    read_labelled,
    read_public,
    registered_shape,
    write_labelled,
    write_public,
)
from fedssl.data.partitioning import load_public, read_registered
from fedssl.errors import ArtifactDamaged, ArtifactError, ArtifactTooLarge, DataError
from fedssl.protocol.data import KNOWN_DATASETS, DataConfig, PublicDataConfig, WindowConfig

RNG = np.random.default_rng(0)
IMAGES = ImageData(RNG.integers(0, 256, (30, 3, 16, 16), np.uint8), np.arange(30) % 4, ("a", "b", "c", "d"))


def test_the_protocol_lists_the_same_known_data_sets_as_the_library() -> None:
    assert KNOWN_DATASETS == DATASETS


def test_a_public_data_set_loses_only_its_labels(tmp_path: Path) -> None:
    digest = write_public(IMAGES, tmp_path / "a", registered_shape(IMAGES))
    assert digest == digest_of(tmp_path / "a")
    assert write_public(IMAGES, tmp_path / "b", registered_shape(IMAGES)) == digest
    back = read_public(tmp_path / "a", digest)
    assert np.array_equal(back.images, IMAGES.images)
    assert back.labels is None
    assert has_digest(IMAGES, digest)
    assert not has_digest(IMAGES.subset(np.arange(29)), digest)
    assert not has_digest(ImageData(IMAGES.images[..., :8]), digest)
    assert not has_digest(ImageData(IMAGES.images[:0]), digest)


def test_selected_images_are_written_in_another_shape(tmp_path: Path) -> None:
    told: list[int] = []
    digest = write_public(IMAGES, tmp_path / "a", (1, 8), ImageSelection(12, seed=3), told.append)
    chosen = IMAGES.subset(choose_images(30, 12, 3))
    expected = conform(chosen, DataConfig(channels=1, image_size=8)).images
    assert np.array_equal(read_public(tmp_path / "a", digest).images, expected)
    assert told == [12]


def test_a_labelled_data_set_is_read_back(tmp_path: Path) -> None:
    train, test = IMAGES.subset(np.arange(20)), IMAGES.subset(np.arange(20, 30))
    told: list[int] = []
    written = (ImageSelection(11, 1), ImageSelection(5, 2))
    digest = write_labelled(train, test, tmp_path / "a", (3, 16), written, told.append)
    for split, back, choice in zip(
        (train, test), read_labelled(tmp_path / "a", digest), ((11, 1), (5, 2)), strict=True
    ):
        chosen = split.subset(choose_images(len(split), *choice))
        assert np.array_equal(back.images, chosen.images)
        assert back.labels is not None
        assert np.array_equal(back.labels, chosen.labels)
        assert back.class_names == IMAGES.class_names
    assert told == [5, 16]


def test_data_sets_that_cannot_be_registered_are_refused(tmp_path: Path) -> None:
    unlabelled, wide = ImageData(IMAGES.images), ImageData(IMAGES.images[..., :8])
    with pytest.raises(DataError, match="no labels"):
        write_labelled(IMAGES, unlabelled, tmp_path / "a", (3, 16))
    with pytest.raises(DataError, match="at most 65536 classes"):
        write_labelled(IMAGES, ImageData(IMAGES.images, np.full(30, 65_536)), tmp_path / "a", (3, 16))
    with pytest.raises(DataError, match="no images to register"):
        write_public(IMAGES.subset(np.arange(0)), tmp_path / "a", (3, 16))
    with pytest.raises(DataError, match=r"16 x 8 pixels: give --image-size"):
        own_shape(wide)
    with pytest.raises(DataError, match="4 pixels wide: give --image-size, between 8 and 512"):
        own_shape(ImageData(IMAGES.images[..., :4, :4]))
    assert own_shape(wide, 32, 1) == (1, 32)


IN_PARTS = """
import sys, tracemalloc
from pathlib import Path

import numpy as np
from fedssl.artifacts.store import digest_of
from fedssl.data.dataset_files import write_public
from fedssl.data.images import ImageData
from fedssl.data.partitioning import read_registered
from fedssl.protocol.data import DataConfig, PublicDataConfig

folder = Path(sys.argv[1])
source = np.memmap(folder / "source", np.uint8, "w+", shape=(20_000, 1, 64, 64))
source[::1000] = 7
tracemalloc.start()
digest = write_public(ImageData(source), folder / "written", (1, 64))
config = PublicDataConfig(dataset="x", num_images=100, digest=digest)
few = read_registered(folder / "written", config, DataConfig(channels=1, image_size=64))
print(tracemalloc.get_traced_memory()[1], len(few), digest == digest_of(folder / "written"))
"""


def test_a_data_set_is_processed_in_parts(tmp_path: Path) -> None:
    """The source has 80 MB on disk. Neither the source nor the written file is ever in memory as a whole.

    Runs in a separate process, because allocations of other tests' threads would be counted here.
    """
    done = subprocess.run([sys.executable, "-c", IN_PARTS, tmp_path], check=True, capture_output=True, text=True)
    peak, num_read, same_digest = done.stdout.split()
    assert int(peak) < 25_000_000  # twice a part of 2,048 images
    assert (num_read, same_digest) == ("100", "True")


@pytest.mark.parametrize("window", [None, WindowConfig(percentiles=(2, 98)), WindowConfig(values=(0, 200), bits=8)])
@pytest.mark.parametrize("num_images", [50, 360])
def test_registered_images_are_chosen_like_those_found_by_name(
    tmp_path: Path, num_images: int, window: WindowConfig | None
) -> None:
    """A run with a digest therefore equals the simulation without one."""
    whole = load_dataset("digits", "test")
    digest = write_public(whole, tmp_path / "written", registered_shape(whole))
    config = PublicDataConfig(dataset="digits", split="test", num_images=num_images, seed=3)
    for size in (8, 16):
        data = DataConfig(channels=1, image_size=size, window=window)
        by_name = load_public(config, data).images
        pinned = config.model_copy(update={"digest": digest})
        assert np.array_equal(read_registered(tmp_path / "written", pinned, data).images, by_name)
        assert np.array_equal(load_public(pinned, data).images, by_name)  # a simulation of the run's own spec


def test_a_simulation_refuses_images_that_differ_from_the_registered_ones() -> None:
    config = PublicDataConfig(dataset="digits", split="test", num_images=50, digest="0" * 64)
    with pytest.raises(DataError, match=r"digits here is not what was registered.*take public_data.digest out"):
        load_public(config, DataConfig(channels=1, image_size=8))


@pytest.mark.parametrize("size", [8, 200, 512])
@pytest.mark.parametrize(("max_train", "max_test"), [(7, 3), (None, None), (1, 30)])
def test_chosen_images_are_read_in_parts(
    tmp_path: Path, size: int, max_train: int | None, max_test: int | None
) -> None:
    """Rows of 64 bytes to 786 kB are read in parts of one mebibyte, so the parts end anywhere."""
    images = ImageData(RNG.integers(0, 256, (30, 3, size, size), np.uint8), np.arange(30) % 4)
    digest = write_labelled(images, images, tmp_path / "a", (3, size))
    choices = (ImageSelection(max_train, 1), ImageSelection(max_test, 2))
    for read, choice in zip(read_labelled(tmp_path / "a", digest, choices), choices, strict=True):
        chosen = images.subset(choose_images(30, choice.max_images, choice.seed))
        assert np.array_equal(read.images, chosen.images)
        assert read.labels is not None
        assert np.array_equal(read.labels, chosen.labels)


DAMAGES = ["length", "header", "images that are not read", "cut", "appended", "empty"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_reported_as_damaged_whatever_else_it_looks_like(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a"
    labelled = write_labelled(IMAGES, IMAGES, path, (3, 16))
    _damage(path, damage)
    few = ImageSelection(1)
    with pytest.raises(ArtifactDamaged, match=labelled):
        read_labelled(path, labelled, (few, few))
    public = write_public(IMAGES, path, (3, 16))
    _damage(path, damage)
    for num_images in (2, 31):  # with 31, the header seems to list too few images, which would fail the run permanently
        with pytest.raises(ArtifactDamaged, match=public):
            read_registered(path, PublicDataConfig(dataset="x", num_images=num_images, digest=public), DataConfig())


def test_an_intact_file_of_another_kind_is_not_reported_as_damaged(tmp_path: Path) -> None:
    digest = write_labelled(IMAGES, IMAGES, tmp_path / "a", (3, 16))
    with pytest.raises(ArtifactError, match="not a public data set") as caught:
        read_public(tmp_path / "a", digest)
    assert not isinstance(caught.value, ArtifactDamaged)
    (tmp_path / "b").write_bytes(b"\xff" * 100)
    with pytest.raises(ArtifactTooLarge):
        read_public(tmp_path / "b", digest_of(tmp_path / "b"))


def _damage(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    match damage:
        case "length":
            content[1] ^= 1
        case "header":
            content[12] ^= 1
        case "images that are not read":
            content[-5] ^= 4
        case "cut":
            del content[-1]
        case "appended":
            content.append(0)
        case "empty":
            content.clear()
    path.write_bytes(content)
