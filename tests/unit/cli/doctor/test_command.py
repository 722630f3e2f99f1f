"""Tests of the problems that `fedssl doctor` reports."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedssl.cli.main import app
from support.answers import answering

_Usage = namedtuple("_Usage", "total used free")


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of a user who has a token, but has not named a coordinator."""
    for name in ("FEDSSL_URL", "FEDSSL_TOKEN_FILE", "FEDSSL_CONNECTION", "FEDSSL_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("FEDSSL_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def doctor(*arguments: object, code: int = 1) -> dict[str, Any]:
    """Run `fedssl doctor`, and return a dictionary from the name of each failed check to what it found."""
    result = CliRunner().invoke(app, ["doctor", "--format", "json", *map(str, arguments)])
    assert result.exit_code == code, result.output
    checks = json.loads(result.stdout)["checks"]
    assert all(check["todo"] for check in checks if check["found"] == "wrong")
    return {check["name"]: check["what"] for check in checks if check["found"] == "wrong"}


def test_without_a_coordinator_only_the_machine_is_checked() -> None:
    assert doctor(code=0) == {}


def test_a_coordinator_with_a_late_clock_and_missing_servers_is_reported() -> None:
    unavailable = {"status": "unavailable", "checks": {"postgres": "OperationalError"}}
    known = {
        ("GET", "/healthz"): {"status": "ok"},
        ("GET", "/readyz"): unavailable,
        ("GET", "/v1/methods"): {"items": []},
    }
    with answering(known) as server:
        server.date = "Thu, 19 Nov 2020 00:00:00 GMT"
        wrong = doctor("--url", server.url)
    assert wrong.keys() == {"clock", "its servers", "token and methods"}
    assert "ahead of the coordinator's" in wrong["clock"]
    assert "postgres: OperationalError" in wrong["its servers"]
    assert "fedbyol" in wrong["token and methods"]


def test_a_missing_coordinator_is_reported() -> None:
    with answering({}) as server:
        url = server.url
    assert doctor("--url", url).keys() == {"coordinator"}


def test_missing_data_and_a_full_disk_are_reported(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (working_folder / "empty").mkdir()
    assert "does not exist" in doctor("--data", working_folder / "missing")["data"]
    assert "is empty" in doctor("--data", working_folder / "empty")["data"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(10**12, 10**12, 10**6))
    assert doctor().keys() == {"disk space here", "disk space for data sets"}


def test_connections_that_other_users_can_read_are_reported(working_folder: Path) -> None:
    path = working_folder / "fedssl" / "connections.json"
    path.parent.mkdir()
    path.write_text("{}")
    path.chmod(0o644)
    assert "other users can read" in doctor()["connections"]


def _checked(path: Path, code: int = 0) -> dict[str, str]:
    result = CliRunner().invoke(app, ["doctor", "--format", "json", "--data", str(path)])
    assert result.exit_code == code, result.output
    return next(check for check in json.loads(result.stdout)["checks"] if check["name"] == "data")


def test_the_images_for_a_worker_are_counted_and_a_sample_is_decoded(working_folder: Path) -> None:
    for name, size in (("a/1.png", 20), ("a/deep/2.png", 20), ("b/3.tif", 24)):
        path = working_folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (size, size), 7).save(path)
    (working_folder / "images" / "list.csv").write_text("not an image")
    found = _checked(working_folder / "images")
    assert found["found"] == "ok"
    assert "3 images for a worker" in found["what"]
    assert "in 2 classes; decoded all: 20 x 20 (2), 24 x 24 (1) pixels; L of 8 bits" in found["what"]
    assert "left out: 1 .csv (not images)" in found["what"]


@pytest.mark.parametrize("suffix", ["mha", "nii", "dcm", "tif", "png"])
def test_unreadable_images_are_a_problem(working_folder: Path, suffix: str) -> None:
    (working_folder / "images").mkdir()
    for number in range(3):
        (working_folder / "images" / f"{number}.{suffix}").write_bytes(b"damaged")
    what = _checked(working_folder / "images", code=1)["what"]
    assert ("3 .mha (this format is not read" if suffix == "mha" else "3 of 3 decoded images cannot be used") in what


def test_a_folder_that_can_be_read_only_in_part_is_a_problem(working_folder: Path) -> None:
    (working_folder / "images").mkdir()
    Image.new("RGB", (20, 20)).save(working_folder / "images" / "1.png")
    (working_folder / "images" / "2.heic").write_bytes(b"")
    found = _checked(working_folder / "images", code=1)
    assert "1 image for a worker" in found["what"]
    assert "1 .heic (this format is not read: convert them to PNG, JPEG or TIFF; 2.heic)" in found["what"]
    assert "a worker would train without these" in found["todo"]


def test_values_of_12_bits_stored_in_16_need_a_window(working_folder: Path) -> None:
    (working_folder / "images").mkdir()
    Image.fromarray(np.full((9, 9), 4000, np.uint16)).save(working_folder / "images" / "1.png")
    found = _checked(working_folder / "images")
    assert found["found"] == "note"
    assert "I;16 of 16 bits" in found["what"]
    assert "no value is above 4,000, so the values have 12 bits" in found["what"]
    assert "[data.window] in its spec, for example percentiles = [0.5, 99.5]" in found["todo"]


def test_images_of_more_than_8_bits_lead_to_advice_about_windows(working_folder: Path) -> None:
    (working_folder / "images").mkdir()
    Image.fromarray(np.full((9, 9), 60_000, np.uint16)).save(working_folder / "images" / "1.png")
    assert "uses only the upper 8 bits" in _checked(working_folder / "images")["todo"]
    np.save(working_folder / "images" / "2.npy", np.ones((9, 9), np.float32))
    found = _checked(working_folder / "images")
    assert "float32 with 1 channel of 32 bits" in found["what"]
    assert "a run needs [data.window]" in found["todo"]
    np.save(working_folder / "images" / "2.npy", np.full((9, 9), np.nan))
    assert "2.npy: it has values that are not finite numbers" in _checked(working_folder / "images", code=1)["what"]


def test_an_npz_file_and_a_known_data_set_are_checked(working_folder: Path) -> None:
    np.savez(working_folder / "set.npz", images=np.zeros((4, 9, 9), np.uint8))
    assert "4 images for a worker" in _checked(working_folder / "set.npz")["what"]
    np.savez(working_folder / "set.npz", images=np.zeros((4, 9, 9), np.float32))
    assert "a run needs [data.window]" in _checked(working_folder / "set.npz")["todo"]
    np.savez(working_folder / "set.npz", images=np.full((4, 9, 9), "x"))
    assert "must be numbers" in _checked(working_folder / "set.npz", code=1)["what"]
    assert "is on this machine" in _checked(Path("digits"))["what"]
    assert "is not on this machine" in _checked(Path("svhn"), code=1)["what"]
