"""The commands `fedssl embed`, `search`, `duplicates` and `outliers`, run in this process on a small encoder."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.client import Retry
from fedssl.embeddings.index_file import Content, read_index, write_index
from support.commands import error_of, fedssl, output_of
from support.encoder_folders import write_encoder_folder
from support.federation import tiny_spec

DATA = {"channels": 3, "image_size": 12}


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with an encoder, images and a volume. Two images are equal, and one cannot be decoded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_URL", "http://127.0.0.1:1")
    Path("run").mkdir()
    write_encoder_folder(Path("run"), tiny_spec(data=DATA))
    rng = np.random.default_rng(0)
    for number in range(12):
        path = Path("photos", "ab"[number % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        colours = rng.integers(0, 20 * (number + 1), (2, 1, 3))  # the encoder can distinguish all images
        Image.fromarray(colours.repeat(6, 0).repeat(12, 1).astype(np.uint8)).save(path)
    shutil.copy("photos/a/4.png", "photos/b/copy.png")
    Path("photos/b/broken.png").write_bytes(b"no image")
    Path("photos/scan.mha").write_bytes(b"volume")
    return tmp_path


@pytest.fixture
def index(working_folder: Path) -> Path:
    output_of("embed", "photos", "--model", "run", "--out", "photos.npz")
    return Path("photos.npz")


def test_embed_names_and_counts_the_images_it_leaves_out(working_folder: Path) -> None:
    result = fedssl("embed", "photos", "--model", "run", "--out", "out/photos.parquet")
    assert result.exit_code == 0, result.output
    assert "left out b/broken.png: " in result.stderr
    table = " ".join(result.stdout.split())
    for words in ("13 of 14 images, 0 of them before", "1 that cannot be decoded", "1 .mha", "convnet"):
        assert words in table
    again = output_of("embed", "photos", "--model", "run/encoder.safetensors", "--out", "out/photos.parquet")
    assert again["num_before"] == again["num_embedded"] == 13
    assert again["left_out"]["first"][0]["path"] == "b/broken.png"
    assert len(again["encoder"]["sha256"]) == 64
    assert again["preprocessing"] == {"channels": 3, "image_size": 12, "mean": None, "std": None}
    assert again["model"] == str(working_folder / "run")
    assert again["images"]["from"] == str(working_folder / "photos")


def test_search_finds_the_copies_first_and_shows_them(working_folder: Path, index: Path) -> None:
    shutil.copy("photos/a/4.png", "new.png")
    found = output_of("search", "new.png", "--index", index, "--num", 5)
    assert {each["path"] for each in found["neighbours"][:2]} == {"a/4.png", "b/copy.png"}
    assert found["neighbours"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert found["page"] == "neighbours.html"
    page = Path("neighbours.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 6
    result = fedssl("search", "new.png", "--index", index, "--out", "other.html")
    assert "b/copy.png" in result.stdout
    assert "other.html: open it in a browser" in result.stderr


def test_an_index_of_another_encoder_is_refused(working_folder: Path, index: Path) -> None:
    Path("other").mkdir()
    write_encoder_folder(Path("other"), tiny_spec(data=DATA))
    said = error_of("search", "photos/a/0.png", "--index", index, "--model", "other")
    assert "another encoder" in said
    assert "--model" in said
    write_encoder_folder(Path("run"), tiny_spec(data=DATA))  # the folder now has another encoder
    assert "another encoder" in error_of("search", "photos/a/0.png", "--index", index)
    assert not Path("neighbours.html").exists()


def test_a_moved_encoder_is_named_with_the_option_model(working_folder: Path, index: Path) -> None:
    Path("run").rename("moved")
    assert "--model" in error_of("search", "photos/a/0.png", "--index", index)
    assert output_of("search", "photos/a/0.png", "--index", index, "--model", "moved")["neighbours"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("embed", "photos", "--model", "nowhere", "--out", "a.npz"), "fedssl run ls"),
        (("embed", "nowhere", "--model", "run", "--out", "a.npz"), "found no data set at nowhere"),
        (("embed", "photos", "--model", "run", "--out", "a.csv"), ".parquet or .npz"),
        (("embed", "photos", "--model", "photos", "--out", "a.npz"), "fedssl run pull"),
        (("embed", "photos", "--model", "encoder.onnx", "--out", "a.npz"), "fedssl run pull"),
        (("embed", "photos", "--model", "run", "--out", "a.npz", "--split", "test"), "read as a whole"),
        (("search", "nowhere.png", "--index", "photos.npz"), "nowhere.png"),
        (("search", "photos/b/broken.png", "--index", "photos.npz"), "cannot decode"),
        (("search", "photos/a/0.png", "--index", "nowhere.npz"), "fedssl embed"),
        (("search", "photos/a/0.png", "--index", "photos/a/0.png"), ".parquet or .npz"),
        (("duplicates", "--index", "nowhere.parquet"), "fedssl embed"),
        (("outliers", "--index", "nowhere.npz"), "fedssl embed"),
    ],
)
@pytest.mark.usefixtures("index")
def test_impossible_requests_are_refused_with_advice(arguments: tuple[str, ...], words: str) -> None:
    Path("encoder.onnx").write_bytes(b"graph")
    assert words in error_of(*arguments)


def test_a_run_at_an_unreachable_coordinator_is_an_error(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl.client.Retry", lambda seconds: Retry(seconds=0))  # not for half a minute
    Path("token").write_text("secret")
    where = ("--url", "http://127.0.0.1:1", "--token-file", "token")
    result = fedssl("embed", "photos", "--model", "1a2b3c4d", "--out", "a.npz", *where)
    assert result.exit_code == 3
    assert not Path("a.npz").exists()


def test_duplicates_are_grouped(working_folder: Path, index: Path) -> None:
    found = output_of("duplicates", "--index", index, "--threshold", "0.999999")
    assert found["num_pairs"] == 1
    assert sorted(found["groups"][0]["paths"]) == ["a/4.png", "b/copy.png"]
    result = fedssl("duplicates", "--index", index, "--threshold", "-1", "--max-pairs", "5")
    assert (
        "78 pairs of the 13 images in photos.npz, each with a cosine of -1.0 or more. The 5 most similar"
        in result.stderr
    )
    assert "Group 1: cosine " in Path("duplicates.html").read_text()


def test_outliers_are_ranked(working_folder: Path, index: Path) -> None:
    found = output_of("outliers", "--index", index, "--num", 3, "--neighbours", 2)
    cosines = [each["cosine"] for each in found["outliers"]]
    assert len(cosines) == 3
    assert cosines == sorted(cosines)
    assert Path("outliers.html").read_text().count("data:image/jpeg;base64,") == 3
    assert output_of("outliers", "--index", index, "--neighbours", 99)["neighbours"] == 12, "there are no more others"


def test_moved_images_are_found_with_the_option_images(working_folder: Path, index: Path) -> None:
    Path("photos").rename("moved")
    result = fedssl("outliers", "--index", index, "--num", 2)
    assert result.exit_code == 0
    assert "no pictures" in result.stderr
    assert "--images" in result.stderr
    assert "cannot be read" in Path("outliers.html").read_text()
    fedssl("outliers", "--index", index, "--num", 2, "--images", "moved")
    assert Path("outliers.html").read_text().count("data:image/jpeg;base64,") == 2


def test_arrays_have_thumbnails_too(working_folder: Path) -> None:
    np.savez("set.npz", images=np.random.default_rng(0).integers(0, 256, (30, 12, 12, 3)).astype(np.uint8))
    output_of("embed", "set.npz", "--model", "run", "--out", "index.npz")
    found = output_of("outliers", "--index", "index.npz", "--num", 2)
    assert all(each["path"].isdigit() for each in found["outliers"])
    assert Path("outliers.html").read_text().count("data:image/jpeg;base64,") == 2


def test_an_index_cannot_show_files_outside_its_folder(working_folder: Path, index: Path) -> None:
    Image.new("RGB", (12, 12)).save("secret.png")
    found = read_index(index)
    names = ["../secret.png", str(working_folder / "secret.png"), "a/../../secret.png", *found.paths[3:]]
    rows = found.representations
    write_index(Path("evil.npz"), Content(found.about, len(rows), rows.shape[1], lambda: [names], [rows]))
    output_of("outliers", "--index", "evil.npz", "--num", 13, "--neighbours", 1)
    assert Path("outliers.html").read_text().count("data:image/jpeg;base64,") == 10
