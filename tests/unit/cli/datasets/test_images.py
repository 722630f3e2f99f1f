"""The commands `fedssl data check` and `fedssl data views`: what a folder contains, and what a network sees of it."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedssl.cli.datasets import views as drawn_views
from fedssl.data import load_conformed, save_npz
from fedssl.protocol.data import DataConfig, WindowConfig
from support.commands import error_of, fedssl, output_of
from support.dicom_files import write_dicom

_SPEC = """
name = "check"
[method]
name = "fedbyol"
[data]
channels = 1
image_size = 16
"""


def _draw(*arguments: object) -> None:
    result = fedssl("data", "views", *arguments)
    assert result.exit_code == 0, result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of two classes: 20 images of 8 bits, a copy of one, one of a single value, and 10 of 12 bits."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(20):
        path = Path("images", "ab"[number % 2], f"{number:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 200, (20, 30), np.uint8)).save(path)
    Image.open("images/a/00.png").save("images/b/copy.bmp")
    Image.new("L", (10, 10), 7).save("images/b/black.png")
    for number in range(10):
        tifffile.imwrite(f"images/a/{number}.tif", rng.integers(0, 4096, (20, 20)).astype(np.uint16))
    Path("images/notes.txt").write_text("text")
    Path("run.toml").write_text(_SPEC)
    return Path("images")


def test_the_report_has_every_number(folder: Path) -> None:
    (folder / "b" / "broken<b>.png").write_bytes(b"no image")
    result = fedssl("data", "check", str(folder), "--out", "check.html", "--format", "json")
    assert result.exit_code == 1, "one of 33 images is unreadable, and none may be"
    found = json.loads(result.stdout)
    assert (found["num_images"], found["num_decoded"], found["is_usable"]) == (33, 33, False)
    assert {(each["width"], each["height"]): each["num"] for each in found["sizes"]} == {
        (30, 20): 21,
        (20, 20): 10,
        (10, 10): 1,
    }
    assert found["kinds"] == {"1 channel of 8 bits": 22, "1 channel of 16 bits": 10}
    assert found["classes"] == {"a": 20, "b": 13}
    assert found["num_groups"] is None
    assert [each["name"] for each in found["unreadable"]] == ["b/broken<b>.png"]
    assert found["unreadable"][0]["reason"]
    assert found["constant"] == ["b/black.png"]
    assert found["duplicates"] == [{"name": "b/copy.bmp", "equals": "a/00.png"}]
    assert found["num_more_than_8_bits"] == 10
    assert found["left_out"] == "left out: 1 .txt (not images)"
    deep = found["histograms"]["more than 8 bits"]
    assert sum(deep["counts"]) == 4000
    assert 0 <= deep["lowest"] < 100
    assert 4000 < deep["highest"] < 4096
    assert abs(deep["median"] - 2048) < 150
    assert found["settings"]["from_spec"] is False
    assert found["memory_bytes"] == 33 * 224 * 224
    page = Path("check.html").read_text(encoding="utf-8")
    assert page.count("<img ") == 32
    assert "broken&lt;b&gt;.png" in page
    assert "<script" not in page
    for words in ("Values of the images of more than 8 bits", "b/copy.bmp", "30 x 20", 'style="width:100.0%"'):
        assert words in page
    checked = fedssl("data", "check", str(folder))
    assert "training on these images would stop: 1 cannot be read, and max_unreadable allows 0." in checked.stderr
    terminal = checked.stdout
    for words in ("33", "b/broken<b>.png: ", "copy.bmp = a/00.png", "[data.window]", "a (20), b (13)", "█"):
        assert words in terminal


def test_the_spec_sets_memory_cache_and_max_unreadable(folder: Path) -> None:
    (folder / "b" / "broken.png").write_bytes(b"no image")
    options = ("--set", "data.max_unreadable=0.1", "--set", "data.window.values=[0,255]")
    found = output_of("data", "check", folder, "--spec", "run.toml", *options)
    assert found["settings"] == {"channels": 1, "image_size": 16, "cache_size": None, "from_spec": True}
    assert found["memory_bytes"] == 33 * 16 * 16 * 2  # a window keeps 16 bits
    assert found["cache_bytes"] is None
    cached = ("--set", "data.cache_size=20", *options[:2])
    found = output_of("data", "check", folder, "--spec", "run.toml", *cached)
    assert 33 * 20 * 20 < found["cache_bytes"] < 2 * 33 * 20 * 20
    few = output_of("data", "check", folder, "--sample", "4")
    assert (few["num_images"], few["num_decoded"]) == (33, 4)


def test_an_image_with_values_that_are_not_numbers_is_unreadable(tmp_path: Path) -> None:
    """A worker would not start with it either."""
    for number, value in enumerate((1e300, np.nan)):
        np.save(tmp_path / f"{number}.npy", np.array([[0, value]] * 8).repeat(4, axis=1))
    result = fedssl("data", "check", str(tmp_path), "--format", "json")
    assert result.exit_code == 1, result.output
    (unreadable,) = json.loads(result.stdout)["unreadable"]
    assert unreadable == {"name": "1.npy", "reason": "it has values that are not finite numbers; replace them"}


def test_patients_are_counted_but_not_named(tmp_path: Path) -> None:
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        write_dicom(tmp_path / "images" / f"{number}.dcm", pixels, PatientID=f"Secret-{number % 2}")
    out = tmp_path / "check.html"
    result = fedssl("data", "check", str(tmp_path / "images"), "--out", str(out), "--format", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_groups"] == 2
    assert "Secret" not in result.output + out.read_text()
    (tmp_path / "images" / "6.dcm").write_bytes((tmp_path / "images" / "5.dcm").read_bytes()[:-20])
    (tmp_path / "run.toml").write_text(_SPEC)
    sheet = tmp_path / "views.png"
    drawn = fedssl("data", "views", tmp_path / "images", "--spec", tmp_path / "run.toml", "--out", sheet)
    assert drawn.exit_code == 0, drawn.output
    assert "6.dcm is left out, because it cannot be read: " in drawn.output
    assert Image.open(sheet).size[1] == 2 + 6 * 18


def test_changes_need_a_spec(folder: Path) -> None:
    assert "give the spec with --spec" in error_of("data", "check", folder, "--set", "data.image_size=32")


def test_arrays_are_left_to_doctor(folder: Path) -> None:
    images = load_conformed(str(folder / "b"), "train", DataConfig(channels=1, image_size=8))
    save_npz(Path("images.npz"), images)
    result = fedssl("data", "check", "images.npz")
    assert result.exit_code == 2
    assert "is not a folder of image files: `fedssl doctor --data images.npz` describes arrays" in result.output


@pytest.mark.parametrize("cached", [(), ("--set", "data.cache_size=20")])
def test_views_show_the_prepared_image_and_then_random_views(folder: Path, cached: tuple[str, ...]) -> None:
    window = ("--set", "data.window.percentiles=[0,100]", *cached)
    _draw(str(folder), "--spec", "run.toml", *window, "--images", "5", "--views", "3")
    sheet = np.asarray(Image.open("views.png"))
    assert sheet.shape == (2 + 5 * 18, 2 + 4 * 18, 3)
    data = DataConfig(channels=1, image_size=16, window=WindowConfig(percentiles=(0, 100)))
    prepared = load_conformed(str(folder), "train", data).images
    first = sheet[2:18, 2:18, 0].astype(float)
    assert np.abs(first - prepared[0, 0] / 32_767 * 255).max() <= 1
    views = [sheet[2:18, 2 + 18 * column : 18 * (column + 1)] for column in (1, 2, 3)]
    assert len({view.tobytes() for view in views}) == 3
    again = Path("views.png").read_bytes()
    _draw(str(folder), "--spec", "run.toml", *window, "--images", "5", "--views", "3")
    assert Path("views.png").read_bytes() == again
    none = ("--set", "data.augmentation.preset=none")
    _draw(str(folder), "--spec", "run.toml", *window, *none, "--images", "1", "--views", "1")
    pair = np.asarray(Image.open("views.png"))
    prepared, view = pair[2:18, 2:18, 0].astype(float), pair[2:18, 20:36, 0]
    if cached:  # sampled from an image of another size
        assert np.corrcoef(prepared.ravel(), view.ravel())[0, 1] > 0.95
    else:
        assert np.array_equal(prepared, view)


def test_views_of_arrays_are_drawn_and_impossible_views_are_refused(folder: Path) -> None:
    images = load_conformed(str(folder / "b"), "train", DataConfig(channels=1, image_size=16))
    save_npz(Path("images.npz"), images)
    _draw("images.npz", "--spec", "run.toml", "--out", "new/views.png", "--images", "2")
    assert Image.open("new/views.png").size == (2 + 9 * 18, 2 + 2 * 18)
    cached = fedssl("data", "views", "images.npz", "--spec", "run.toml", "--set", "data.cache_size=20")
    assert cached.exit_code == 2
    assert "data.cache_size is for folders of image files" in cached.output
    gone = fedssl("data", "views", "nowhere", "--spec", "run.toml")
    assert gone.exit_code == 2
    assert "found no data set at nowhere" in gone.output


def test_pixels_that_are_read_only_cause_no_warning() -> None:
    pixels = np.frombuffer(bytes(range(4)), np.uint8).reshape(1, 2, 2)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert drawn_views._tensor(pixels).flatten().tolist() == [0, 1, 2, 3]
    finally:
        torch.set_warn_always(False)
