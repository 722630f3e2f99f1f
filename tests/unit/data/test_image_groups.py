"""Images of one group, such as a patient, stay together in every partition, hold-out and split."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedssl.data import ImageData, load_dataset, save_npz
from fedssl.data.datasets import require_whole_groups
from fedssl.data.image_groups import ImageGroups
from fedssl.data.partitioning import assign_images, held_out_images, partition_dataset, partition_plan
from fedssl.errors import DataError
from fedssl.evaluation.suite import load_labelled
from fedssl.protocol.data import DataConfig, PartitionConfig
from support.dicom_files import write_dicom

_RNG = np.random.default_rng(0)
_GROUPS = _RNG.integers(0, 120, 600) * 7 - 300  # any whole numbers
_LABELS = (_GROUPS + _RNG.integers(0, 2, 600)) % 4  # the images of a group may have different classes
_DATA = DataConfig(channels=1, image_size=8)

configs = st.builds(
    PartitionConfig,
    num_clients=st.integers(1, 6),
    scheme=st.sampled_from(["iid", "classes", "dirichlet"]),
    variant=st.sampled_from(["fedx", "ssd", "flesd", "orchestra"]),
    alpha=st.sampled_from([1.0, 100.0]),
    share=st.sampled_from([0.25, 1.0]),
    max_images=st.sampled_from([None, 400]),
    hold_out=st.sampled_from([0.0, 0.1, 0.5]),
    pooled=st.booleans(),
    seed=st.integers(0, 2**32),
)


def test_a_groups_class_is_its_most_frequent_one() -> None:
    found = ImageGroups.of(np.array([3, 1, 1, 2, 0, 2, 0]), np.array([5, -2, -2, 5, 9, 5, 9]))
    assert found.number.tolist() == [1, 0, 0, 1, 2, 1, 2]
    assert found.labels.tolist() == [1, 2, 0]
    assert ImageGroups.of(np.array([1, 0]), np.array([4, 4])).labels.tolist() == [0], "the lowest of equally many"


@settings(max_examples=50, deadline=None)
@given(config=configs)
def test_no_group_is_split(config: PartitionConfig) -> None:
    config = config.model_copy(update={"num_clients": min(config.num_clients, 4)})
    held = assign_images(config, _LABELS, groups=_GROUPS)
    parts = [part for part in held.by_client.values() if len(part)]
    out = held_out_images(config, _LABELS, groups=_GROUPS) if config.hold_out else np.empty(0, np.int64)
    owners = [set(_GROUPS[part].tolist()) for part in (*parts, out)]
    assert sum(map(len, owners)) == len(set().union(*owners))
    assert all(bool((np.diff(part) > 0).all()) for part in parts)
    assert held.counts.sum(axis=1).tolist() == [len(part) for part in held.by_client.values()]
    if config.hold_out:
        smaller = held_out_images(config, _LABELS, config.hold_out / 2, _GROUPS)
        assert set(smaller.tolist()) < set(out.tolist())
    if config.share == 1 and (config.pooled or config.variant != "flesd" or config.scheme != "dirichlet"):
        assert sum(map(len, parts)) == min(config.max_images or 600, 600 - len(out))


def test_groups_of_one_image_do_not_change_the_partition() -> None:
    config = PartitionConfig(num_clients=4, alpha=0.5, hold_out=0.1, max_images=500, share=0.5, seed=3)
    alone = assign_images(config, _LABELS, groups=np.arange(600)[::-1])
    plain = assign_images(config, _LABELS)
    assert alone.counts.sum() == pytest.approx(plain.counts.sum(), abs=2)
    by_order = assign_images(config, _LABELS, groups=np.arange(600))
    assert {name: part.tolist() for name, part in by_order.by_client.items()} == {
        name: part.tolist() for name, part in plain.by_client.items()
    }


def test_too_few_groups_and_a_file_that_splits_one_are_refused(tmp_path: Path) -> None:
    images = ImageData(np.zeros((40, 1, 8, 8), np.uint8), np.repeat([0, 1], 20), groups=np.arange(40) // 8)
    save_npz(tmp_path / "set.npz", images)
    config = PartitionConfig(dataset="set.npz", num_clients=2, alpha=1.0)
    for read in (lambda: partition_plan(config, tmp_path), lambda: partition_dataset(config, _DATA, tmp_path)):
        with pytest.raises(DataError, match=r"stay together, so set\.npz counts as 5 images"):
            read()
    (tmp_path / "parts.json").write_text(json.dumps([[0, 1, 8], [16, 9]]))
    divided = PartitionConfig(dataset="set.npz", num_clients=2, scheme="file", file="parts.json")
    words = r"parts\.json gives image 8 to client-0 and image 9 to client-1, but both belong to one group of set\.npz"
    with pytest.raises(DataError, match=words):
        partition_plan(divided, tmp_path)
    (tmp_path / "parts.json").write_text(json.dumps([[0, 1, 8, 9], [16]]))
    assert partition_plan(divided, tmp_path).counts.sum() == 5


def test_patients_of_a_folder_stay_at_one_client(tmp_path: Path) -> None:
    """The last image is unreadable, which must not change the assignment of the others."""
    for number in range(24):
        pixels = np.full((8, 8), 10 * number, np.uint8)
        pixels[0, 0] = 255
        write_dicom(tmp_path / "ab"[number % 2] / f"{number:02}.dcm", pixels, PatientID=f"P{number % 6}")
    config = PartitionConfig(dataset=str(tmp_path), num_clients=3, scheme="iid", seed=1)
    whole = partition_dataset(config, _DATA).by_client
    for images in whole.values():
        assert images.groups is not None
        patients = images.images[:, 0, 1, 1] // 10 % 6
        assert (len(images), len(set(patients.tolist()))) == (8, 2)
    last = tmp_path / "b" / "23.dcm"
    last.write_bytes(last.read_bytes()[:-30])
    some = partition_dataset(config, _DATA.model_copy(update={"max_unreadable": 0.1})).by_client
    for name, images in some.items():
        pixels = whole[name].images
        assert np.array_equal(images.images, pixels[pixels[:, 0, 1, 1] != 230])


def test_an_evaluation_refuses_splits_that_share_a_group(tmp_path: Path) -> None:
    def write(split: str, number: int, patient: str) -> None:
        pixels = np.full((8, 8), number, np.uint8)
        write_dicom(tmp_path / "scans" / split / "ab"[number % 2] / f"{number}.dcm", pixels, PatientID=patient)

    for number in range(6):
        write("train" if number < 4 else "test", number, f"P{number}")
    limits = {"max_train": None, "max_test": None, "seed": 0}
    assert len(load_labelled(str(tmp_path / "scans"), _DATA, **limits).train) == 4
    write("test", 6, "P3")
    words = r"share a group, such as a patient \(train/b/3\.dcm and test/a/6\.dcm\), .* move all images of a group"
    with pytest.raises(DataError, match=words):
        load_labelled(str(tmp_path / "scans"), _DATA, **limits)
    blank = np.zeros((4, 1, 8, 8), np.uint8)
    train, test = (ImageData(blank, np.arange(4) % 2, groups=np.arange(4) + first) for first in (0, 3))
    save_npz(tmp_path / "set.npz", train, test)
    with pytest.raises(DataError, match=r"share a group, such as a patient \(group 3\)"):
        require_whole_groups(str(tmp_path / "set.npz"))
    save_npz(tmp_path / "set.npz", train, ImageData(blank, test.labels, groups=np.arange(4) + 4))
    require_whole_groups(str(tmp_path / "set.npz"))
    Image.new("L", (8, 8)).save(tmp_path / "1.png")
    require_whole_groups("digits")
    assert load_dataset(str(tmp_path / "set.npz"), "test").groups is not None
