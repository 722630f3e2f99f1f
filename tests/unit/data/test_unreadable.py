"""Files that cannot be read are left out, counted and named, up to a permitted share. Above it, reading stops."""

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.data import load_conformed
from fedssl.data.label_files import load_site_labels
from fedssl.data.partitioning import partition_dataset, partition_plan
from fedssl.data.site_labels import own_labels, split_labels
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, PartitionConfig, WindowConfig

_DATA = DataConfig(channels=1, image_size=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two classes with 100 images each. The first pixel of an image is the image's number."""
    for number in range(200):
        path = tmp_path / ("ab"[number // 100]) / f"{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        pixels[0, 0] = number
        Image.fromarray(pixels).save(path)
    return tmp_path


def _damage(folder: Path, *numbers: int) -> None:
    for number in numbers:
        [path] = folder.glob(f"*/{number:03}.png")
        path.write_bytes(b"" if number % 2 else path.read_bytes()[:60])


def test_unreadable_files_are_left_out_with_their_labels(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _damage(folder, 0, 151)
    with caplog.at_level(logging.WARNING, "fedssl.data"):
        found = load_conformed(str(folder), "train", _DATA, leave_out=True)
    assert found.unreadable == (0, 151)
    rest = [number for number in range(200) if number not in (0, 151)]
    assert found.images[:, 0, 0, 0].tolist() == rest
    assert found.labels is not None
    assert found.labels.tolist() == [number // 100 for number in rest]
    [said] = [record.getMessage() for record in caplog.records]
    assert "left out 2 of 200 images, which cannot be read (at most 2 may be, by max_unreadable): a/000.png: " in said
    assert "b/151.png: " in said


def test_too_many_unreadable_files_are_an_error_with_their_names_and_reasons(folder: Path) -> None:
    _damage(folder, 3, 50, 151)
    with pytest.raises(
        DataError, match=r"cannot decode 3 of 200 .*a/003\.png: .*a/050\.png: .*at most 1 % may be"
    ) as error:
        load_conformed(str(folder), "train", _DATA, leave_out=True)
    assert "b/151.png" in str(error.value)
    more = _DATA.model_copy(update={"max_unreadable": 0.05})
    assert load_conformed(str(folder), "train", more, leave_out=True).unreadable == (3, 50, 151)
    _damage(folder, *range(20, 40))
    with pytest.raises(DataError, match=r"cannot decode (at least )?23 of 200") as error:
        load_conformed(str(folder), "train", more, leave_out=True)
    assert str(error.value).count(".png: ") == 10


def test_a_limit_of_zero_and_evaluations_permit_no_unreadable_file(folder: Path) -> None:
    _damage(folder, 7)
    with pytest.raises(DataError, match=r"cannot decode .*007\.png"):
        load_conformed(str(folder), "train", _DATA.model_copy(update={"max_unreadable": 0.0}), leave_out=True)
    with pytest.raises(DataError, match=r"cannot decode .*007\.png"):
        load_conformed(str(folder), "train", _DATA)


def test_files_that_need_a_window_are_never_left_out(folder: Path) -> None:
    np.save(folder / "a" / "deep.npy", np.zeros((8, 8), np.float32))
    with pytest.raises(DataError, match=r"deep\.npy: .*\[data\.window\]"):
        load_conformed(str(folder), "train", _DATA, leave_out=True)
    window = WindowConfig(values=(0, 255))
    found = load_conformed(str(folder), "train", _DATA.model_copy(update={"window": window}), leave_out=True)
    assert len(found) == 201


@pytest.mark.parametrize("scheme", ["iid", "dirichlet"])
def test_a_partition_assigns_the_readable_images_as_if_all_were_readable(folder: Path, scheme: str) -> None:
    config = PartitionConfig.model_validate({"dataset": str(folder), "num_clients": 3, "scheme": scheme, "alpha": 1.0})
    whole = partition_dataset(config, _DATA)
    _damage(folder, 10, 151)
    some, plan = partition_dataset(config, _DATA), partition_plan(config)
    for name, images in some.by_client.items():
        numbers = [number for number in plan.by_client[name].tolist() if number not in (10, 151)]
        assert images.images[:, 0, 0, 0].tolist() == numbers
        kept = whole.by_client[name].images
        assert np.array_equal(images.images, kept[~np.isin(kept[:, 0, 0, 0], (10, 151))])
        assert images.labels is not None
        assert images.labels.tolist() == [number // 100 for number in numbers]
    assert (whole.counts - some.counts).sum(axis=0).tolist() == [1, 1]


def test_the_labels_of_a_site_belong_to_the_readable_images(folder: Path) -> None:
    labels = load_site_labels(str(folder), "own")
    _damage(folder, 10, 151)
    images = load_conformed(str(folder), "train", _DATA, leave_out=True)
    found, simulated = labels.without(images.unreadable), own_labels(images, "the images")
    assert found.labels.tolist() == simulated.labels.tolist()
    split, expected = split_labels(found, 0.3, 0), split_labels(simulated, 0.3, 0)
    assert np.array_equal(split.test, expected.test)
    assert np.array_equal(split.train, expected.train)


def test_constant_and_equal_images_are_reported_but_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Image.new("L", (8, 8), 7).save(folder / "a" / "flat.png")
    (folder / "b" / "again.png").write_bytes((folder / "a" / "003.png").read_bytes())
    with caplog.at_level(logging.WARNING, "fedssl.data"):
        assert len(load_conformed(str(folder), "train", _DATA)) == 202
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{folder}: images of only one value: 1 (a/flat.png)",
        f"{folder}: images that equal an earlier one: 1 (b/again.png = a/003.png)",
    ]


def test_the_default_share_is_not_in_a_serialised_spec() -> None:
    assert "max_unreadable" not in _DATA.model_dump(mode="json")
    assert DataConfig(max_unreadable=0).model_dump(mode="json")["max_unreadable"] == 0
