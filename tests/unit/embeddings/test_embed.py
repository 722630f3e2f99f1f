"""Embedding images gives the bits of the evaluation, even after interruptions, and reports all omitted images."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.data import decode_file, load_conformed, save_npz
from fedssl.data.images import ImageData
from fedssl.embeddings.embed import embed
from fedssl.embeddings.encoders import Model, load_model
from fedssl.embeddings.index_file import Index, read_index
from fedssl.embeddings.sources import open_source
from fedssl.errors import DataError, ExportError, FolderInUseError, ResultsError
from fedssl.evaluation import extract_features
from support.encoder_folders import SMALL_DATA, write_encoder_folder
from support.federation import tiny_spec

from .conftest import Photos

FORMATS = pytest.mark.parametrize("suffix", [".npz", ".parquet"])


@FORMATS
def test_a_folder_has_the_same_representations_as_in_the_evaluation_bit_for_bit(
    tmp_path: Path, model: Model, photos: Photos, suffix: str
) -> None:
    folder, out = photos(tmp_path / "photos", 530), tmp_path / f"out{suffix}"
    made = embed(open_source(str(folder), None, None), model, "run", out)
    data = model.encoder.data
    expected = extract_features(model.encoder.encoder, load_conformed(str(folder), "train", data), data)
    found = read_index(out)
    assert np.array_equal(found.representations, expected.numpy())
    assert (found.representations != 0).any(axis=1).all()
    assert found.paths == [
        *(f"cats/{n:04d}.png" for n in range(0, 530, 2)),
        *(f"dogs/old/{n:04d}.png" for n in range(1, 530, 2)),
    ]
    assert found.about == made.about
    assert (made.num_before, made.about["num_embedded"], made.about["left_out"]["num"]) == (0, 530, 0)
    assert not (tmp_path / f"out{suffix}.partial").exists()


@pytest.mark.parametrize("split", ["train", "test"])
def test_arrays_have_the_same_representations_as_in_the_evaluation_bit_for_bit(
    tmp_path: Path, model: Model, split: str
) -> None:
    rng = np.random.default_rng(0)
    train, test = (ImageData(rng.integers(0, 256, (n, 1, 20, 16)).astype(np.uint8)) for n in (700, 40))
    save_npz(tmp_path / "set.npz", train, test)
    source = open_source(str(tmp_path / "set.npz"), split, None)  # type: ignore[arg-type]
    embed(source, model, "run", tmp_path / "out.npz")
    data = model.encoder.data
    images = load_conformed(str(tmp_path / "set.npz"), split, data)  # type: ignore[arg-type]
    found = read_index(tmp_path / "out.npz")
    assert np.array_equal(found.representations, extract_features(model.encoder.encoder, images, data).numpy())
    assert found.paths == [str(number) for number in range(len(images))]
    assert found.about["images"]["split"] == split


def test_the_digest_is_that_of_the_encoder_whichever_file_it_is_read_from(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_encoder_folder(tmp_path / "a", tiny_spec(data=SMALL_DATA))
    alone = load_model(tmp_path / "a")
    (tmp_path / "a" / "encoder.safetensors").rename(tmp_path / "a" / "model.safetensors")
    assert load_model(tmp_path / "a" / "model.safetensors").sha256 == alone.sha256
    write_encoder_folder(tmp_path / "a", tiny_spec(data=SMALL_DATA))
    assert load_model(tmp_path / "a").sha256 != alone.sha256


@FORMATS
def test_damaged_images_are_left_out_named_and_counted(
    tmp_path: Path, model: Model, photos: Photos, suffix: str
) -> None:
    folder = photos(tmp_path / "photos", 20)
    whole = read_index_of(folder, model, tmp_path / f"whole{suffix}")
    (folder / "cats" / "0004.png").write_bytes(b"no image")
    half = (folder / "dogs" / "old" / "0007.png").read_bytes()
    (folder / "dogs" / "old" / "0007.png").write_bytes(half[: len(half) // 2])
    (folder / "scan.mha").write_bytes(b"volume")
    source = open_source(str(folder), None, None)
    about = embed(source, model, "run", tmp_path / f"out{suffix}").about
    found = read_index(tmp_path / f"out{suffix}")
    kept = [path not in ("cats/0004.png", "dogs/old/0007.png") for path in whole.paths]
    assert found.paths == [path for path, keep in zip(whole.paths, kept, strict=True) if keep]
    assert np.allclose(found.representations, whole.representations[kept], atol=1e-6)
    assert about["num_embedded"] == 18
    assert about["left_out"]["num"] == 2
    assert [each["path"] for each in about["left_out"]["first"]] == ["cats/0004.png", "dogs/old/0007.png"]
    assert all(each["reason"] for each in about["left_out"]["first"])
    assert "1 .mha" in source.left_out()


def test_a_folder_without_any_usable_image_is_an_error(tmp_path: Path, model: Model) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"no image of .*photos can be decoded: a\.png"):
        read_index_of(tmp_path / "photos", model, tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_images_of_16_bits_that_would_be_black_are_refused_as_in_training(tmp_path: Path, model: Model) -> None:
    (tmp_path / "photos").mkdir()
    Image.fromarray(np.full((12, 12), 4095, np.uint16)).save(tmp_path / "photos" / "a.png")
    with pytest.raises(DataError, match="12 bits"):
        read_index_of(tmp_path / "photos", model, tmp_path / "out.npz")


def test_loose_images_next_to_folders_and_names_that_are_not_utf_8_are_embedded(
    tmp_path: Path, model: Model, photos: Photos
) -> None:
    folder = photos(tmp_path / b"caf\xe9s".decode(errors="surrogateescape"), 2)
    Image.new("RGB", (12, 12)).save(os.fsencode(folder) + b"/caf\xe9.png", "PNG")
    for suffix in (".npz", ".parquet"):
        found = read_index_of(folder, model, tmp_path / f"out{suffix}")
        assert found.paths == ["caf�.png", "cats/0000.png", "dogs/old/0001.png"]


KILLED = """
import sys, time
from pathlib import Path
import torch
from fedssl.embeddings import embed as module
from fedssl.embeddings.encoders import load_model
from fedssl.embeddings.sources import open_source
torch.set_num_threads(1)
folder, run, out = map(Path, sys.argv[1:])
def wait(num):
    if num >= 1024:
        print("half", flush=True)
        time.sleep(60)
module.embed(open_source(str(folder), None, None), load_model(run), "run", out, on_progress=wait)
"""


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".npz", pytest.param(".parquet", marks=pytest.mark.full)])
def test_a_killed_process_is_resumed_and_gives_equal_bytes(
    tmp_path: Path, model: Model, photos: Photos, suffix: str
) -> None:
    folder = photos(tmp_path / "photos", 1300)
    (folder / "cats" / "0010.png").write_bytes(b"no image")
    out, partial = tmp_path / f"out{suffix}", tmp_path / f"out{suffix}.partial"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, folder, tmp_path / "run", out], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    with pytest.raises(FolderInUseError):
        embed(open_source(str(folder), None, None), model, "run", out)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not out.exists()
    with (partial / "rows").open("ab") as rows:  # as if it had been killed during a batch
        rows.write(b"\0" * 100)
    with (partial / "batches.jsonl").open("a") as lines:
        lines.write('{"num": 276, "damaged": [')
    made = embed(open_source(str(folder), None, None), model, "run", out)
    assert made.num_before == 1023
    embed(open_source(str(folder), None, None), model, "run", tmp_path / f"whole{suffix}")
    assert out.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not partial.exists()


def test_lines_without_their_rows_are_computed_again(tmp_path: Path, model: Model, photos: Photos) -> None:
    """After a power failure, a line may have been written but not its rows."""
    folder, out = photos(tmp_path / "photos", 1100), tmp_path / "out.npz"
    stop_after(folder, model, out, 2)
    rows = tmp_path / "out.npz.partial" / "rows"
    os.truncate(rows, rows.stat().st_size - 4)
    assert embed(open_source(str(folder), None, None), model, "run", out).num_before == 512
    embed(open_source(str(folder), None, None), model, "run", tmp_path / "whole.npz")
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()


class Stopped(Exception):
    """Raised to interrupt the embedding."""


def stop_after(folder: Path, model: Model, out: Path, num_batches: int) -> None:
    def stop(num: int) -> None:
        if num >= 512 * num_batches:
            raise Stopped

    with pytest.raises(Stopped):
        embed(open_source(str(folder), None, None), model, "run", out, on_progress=stop)


def test_another_encoder_or_folder_is_refused_for_partial_and_complete_files(
    tmp_path: Path, model: Model, photos: Photos
) -> None:
    folder, out = photos(tmp_path / "photos", 600), tmp_path / "out.npz"
    (tmp_path / "other").mkdir()
    write_encoder_folder(tmp_path / "other", tiny_spec(data=SMALL_DATA))
    other = load_model(tmp_path / "other")
    pulled_with = {**SMALL_DATA, "mean": [0.1, 0.1, 0.1]}
    stop_after(folder, model, out, 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out.npz.partial").iterdir()}
    spec = tmp_path / "run" / "spec.yaml"
    original = spec.read_text()

    def refusals(place: str) -> None:
        with pytest.raises(ResultsError, match=f"{place}.* another encoder .*(remove).*--out"):
            embed(open_source(str(folder), None, None), other, "run", out)
        spec.write_text(json.dumps(tiny_spec(data=pulled_with).model_dump(mode="json")))
        with pytest.raises(ResultsError, match=f"{place}.* prepared in another way"):
            embed(open_source(str(folder), None, None), load_model(tmp_path / "run"), "run", out)
        spec.write_text(original)
        new = folder / "cats" / "9999.png"
        Image.new("RGB", (12, 12)).save(new)
        with pytest.raises(ResultsError, match=f"{place}.* other images"):
            embed(open_source(str(folder), None, None), model, "run", out)
        new.unlink()

    refusals("out.npz.partial")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out.npz.partial").iterdir()} == before
    assert embed(open_source(str(folder), None, None), model, "run", out).num_before == 512
    refusals("out.npz")
    written = out.stat().st_mtime_ns
    assert embed(open_source(str(folder), None, None), model, "run", out).num_before == 600
    assert out.stat().st_mtime_ns == written


def test_a_half_made_file_is_not_continued_with_another_version_of_a_decoder(
    tmp_path: Path, model: Model, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = photos(tmp_path / "photos", 600), tmp_path / "out.npz"
    Image.new("L", (12, 12)).save(folder / "last.tif")
    with monkeypatch.context() as earlier:
        earlier.setattr(decode_file, "_with_versions", lambda *packages: " tifffile 2020.1.1")
        stop_after(folder, model, out, 1)
    with pytest.raises(ResultsError, match=r"out.npz.partial .* decoded by .* tifffile 2020\.1\.1, not by .*remove"):
        embed(open_source(str(folder), None, None), model, "run", out)
    shutil.rmtree(tmp_path / "out.npz.partial")
    about = embed(open_source(str(folder), None, None), model, "run", out).about
    assert len(about["decoders"]) == 2
    with monkeypatch.context() as later:
        later.setattr(decode_file, "_with_versions", lambda *packages: " tifffile 9999")
        assert embed(open_source(str(folder), None, None), model, "run", out).num_before == 601


def test_images_that_nothing_decodes_continue_after_a_version_that_named_no_decoders(
    tmp_path: Path, model: Model
) -> None:
    """Until 27 November 2026, no decoders were stored."""
    images = np.random.default_rng(0).integers(0, 255, (600, 1, 8, 8), dtype=np.uint8)
    save_npz(tmp_path / "set.npz", ImageData(images, None, ()))
    whole = embed(open_source(str(tmp_path / "set.npz"), "train", None), model, "run", tmp_path / "whole.npz")
    assert whole.about["decoders"] == []
    stop_after(tmp_path / "set.npz", model, tmp_path / "out.npz", 1)
    about = tmp_path / "out.npz.partial" / "about.json"
    content = json.loads(about.read_text())
    del content["decoders"]
    about.write_text(json.dumps(content))
    source = open_source(str(tmp_path / "set.npz"), "train", None)
    assert embed(source, model, "run", tmp_path / "out.npz").num_before == 512
    assert (tmp_path / "out.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


PEAK = """
import sys, tracemalloc
from pathlib import Path

import fedssl.data.decoding, fedssl.embeddings.embed
from fedssl.embeddings.encoders import load_model
from fedssl.embeddings.sources import open_source

fedssl.data.decoding._CHUNK_IMAGES, fedssl.embeddings.embed._ROWS_PER_PART = 64, 512
model = load_model(Path(sys.argv[1]))
for number, folder in enumerate(sys.argv[2:]):
    source = open_source(folder, None, None)
    tracemalloc.start()
    fedssl.embeddings.embed.embed(source, model, "run", Path(f"{folder}-{number}.npz"))
    print(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
"""


@pytest.mark.full
def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path, model: Model, photos: Photos) -> None:
    """Runs in a separate process, because allocations of other tests' threads would be counted here."""
    folders = []
    for num in (1024, 6 * 1024):
        folders.append(photos(tmp_path / f"photos-{num}", 1))
        for number in range(num):
            (folders[-1] / "cats" / f"more-{number}.png").hardlink_to(folders[-1] / "cats" / "0000.png")
    command = [sys.executable, "-c", PEAK, tmp_path / "run", folders[0], *folders]  # the first also imports modules
    _, small, large = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert large < 1.3 * small


def test_a_split_of_a_folder_an_unknown_format_and_a_missing_library_are_refused(
    tmp_path: Path, model: Model, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = photos(tmp_path / "photos", 2)
    with pytest.raises(DataError, match=r"read as a whole: give the folder .*photos/test"):
        open_source(str(folder), "test", None)
    source = open_source(str(folder), None, None)
    with pytest.raises(ExportError, match=r"\.parquet or \.npz"):
        embed(source, model, "run", tmp_path / "out.csv")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"fedssl\[parquet\].*\.npz"):
        embed(source, model, "run", tmp_path / "out.parquet")


def test_a_diverged_encoder_is_an_error_and_another_encoder_can_follow(
    tmp_path: Path, model: Model, photos: Photos
) -> None:
    folder, out = photos(tmp_path / "photos", 2), tmp_path / "out.npz"
    (tmp_path / "other").mkdir()
    write_encoder_folder(tmp_path / "other", tiny_spec(data=SMALL_DATA))
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match="diverged"):
        read_index_of(folder, model, out)
    assert len(read_index_of(folder, load_model(tmp_path / "other"), out).paths) == 2


def read_index_of(folder: Path, model: Model, out: Path) -> Index:
    embed(open_source(str(folder), None, None), model, "run", out)
    return read_index(out)
