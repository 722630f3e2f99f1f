"""`fedssl public-dataset` and `fedssl evaluation-dataset` against a real coordinator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedssl.artifacts.store import digest_of
from fedssl.data import ImageData, load_dataset, save_npz
from fedssl.data.dataset_files import read_labelled, read_public
from support.commands import Fedssl, json_of
from support.coordinator import Coordinator
from support.data_sets import digits_file

pytestmark = pytest.mark.integration


def _stored(coordinator: Coordinator, view: dict[str, Any]) -> Path:
    digest = view["digest"]
    return coordinator.store / digest[:2] / digest[2:4] / digest


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Return a file of labelled RGB images with a test split."""
    rng = np.random.default_rng(0)
    train, test = (
        ImageData(rng.integers(0, 256, (n, 3, 20, 16), np.uint8), np.arange(n) % 3, ("a", "b", "c")) for n in (30, 9)
    )
    save_npz(tmp_path / "scans.npz", train, test)
    return tmp_path / "scans.npz"


def test_a_known_data_set_is_registered_as_public_images_once(
    coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path
) -> None:
    arguments = ("public-dataset", "add", "digits", "digits", "--split", "test", "--format", "json")
    first = json_of(fedssl(*arguments))
    assert first["digest"] == digest_of(digits_file(tmp_path, "test"))
    assert (first["num_images"], first["split"], first["image_size"]) == (360, "test", 16)
    assert json_of(fedssl(*arguments)) == first  # there is nothing to do the second time
    assert json_of(fedssl("public-dataset", "ls", "--format", "json")) == [first]
    assert json_of(fedssl("public-dataset", "show", "digits", "--format", "json")) == first
    table = fedssl("public-dataset", "ls").stdout
    assert first["digest"][:12] in table
    assert "360" in table
    assert first["digest"] in fedssl("public-dataset", "show", "digits").stdout
    said = fedssl("public-dataset", "add", "digits", "digits", "--split", "test")
    assert said.stdout == ""
    assert f"digits is registered: 360 images, digest {first['digest']}" in said.stderr


def test_some_images_of_a_file_are_registered_in_another_shape(
    coordinator: Coordinator, fedssl: Fedssl, scans: Path
) -> None:
    shape = ("--image-size", 8, "--channels", 1)
    view = json_of(
        fedssl("public-dataset", "add", "scans", scans, *shape, "--max-images", 12, "--seed", 3, "--format", "json")
    )
    assert (view["num_images"], view["channels"], view["image_size"]) == (12, 1, 8)
    assert read_public(_stored(coordinator, view), view["digest"]).images.shape == (12, 1, 8, 8)
    other = fedssl("public-dataset", "add", "scans", scans, *shape, "--max-images", 12, "--seed", 4)
    assert other.exit_code == 5
    assert "scans already names other images" in other.stderr


def test_evaluation_data_sets_are_registered_from_a_file_and_by_name(
    coordinator: Coordinator, fedssl: Fedssl, scans: Path
) -> None:
    arguments = ("evaluation-dataset", "add", "held-out", scans, "--image-size", 16, "--max-train", 20, "--max-test", 5)
    view = json_of(fedssl(*arguments, "--format", "json"))
    assert (view["num_train"], view["num_test"], view["num_classes"], view["channels"]) == (20, 5, 3, 3)
    train, test = read_labelled(_stored(coordinator, view), view["digest"])
    assert (train.images.shape, test.images.shape) == ((20, 3, 16, 16), (5, 3, 16, 16))
    assert train.class_names == ("a", "b", "c")
    assert "20 training and 5 test images of 3 classes" in fedssl(*arguments).stderr
    assert json_of(fedssl("evaluation-dataset", "ls", "--format", "json")) == [view]
    assert "held-out" in fedssl("evaluation-dataset", "ls").stdout
    assert view["digest"] in fedssl("evaluation-dataset", "show", "held-out").stdout
    digits = json_of(fedssl("evaluation-dataset", "add", "digits", "digits", "--format", "json"))
    whole = load_dataset("digits", "train")
    assert np.array_equal(read_labelled(_stored(coordinator, digits), digits["digest"])[0].images, whole.images)


@pytest.mark.full(but=6)
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["public-dataset", "add", "../x", "digits"], 2, "cannot be a name"),
        (["evaluation-dataset", "add", "Held Out", "digits"], 2, "cannot be a name"),
        (["public-dataset", "add", "digits", "scans.npz"], 2, "digits is a known data set"),
        (["public-dataset", "add", "digits", "digits", "--max-images", "5"], 2, "only the whole of it"),
        (["public-dataset", "add", "x", "missing.npz"], 2, "found no data set at missing.npz"),
        (["public-dataset", "add", "x", "scans.npz"], 2, "20 x 16 pixels: give --image-size"),
        (["public-dataset", "add", "x", "digits", "--channels", "2"], 2, "--channels must be 1 or 3"),
        (["evaluation-dataset", "add", "x", "plain.npz"], 2, "test_images"),
        (["evaluation-dataset", "add", "x", "unlabelled.npz"], 2, "no labels"),
        (["public-dataset", "show", "nothing"], 5, "no data set nothing"),
        (["evaluation-dataset", "show", "nothing"], 5, "no data set nothing"),
        (["public-dataset", "add", "x", "digits", "--token-file", "worker"], 4, "yours is a worker's"),
    ],
)
def test_errors_are_one_clear_line(
    coordinator: Coordinator, fedssl: Fedssl, scans: Path, arguments: list[str], code: int, said: str
) -> None:
    plain = ImageData(np.zeros((4, 1, 8, 8), np.uint8))
    save_npz(scans.parent / "plain.npz", plain)
    save_npz(scans.parent / "unlabelled.npz", plain, plain)
    (scans.parent / "worker").write_text(coordinator.worker_token("a"))
    (scans.parent / "worker").chmod(0o600)
    result = fedssl(*arguments)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert result.stdout == ""
