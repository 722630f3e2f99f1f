"""The commands `fedssl classify` and `fedssl export --head`, run in this process on a small encoder."""

import ast
import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from PIL import Image

from fedssl.classification.head_file import read_head
from fedssl.models import load_encoder
from fedssl.models.classifier import Classifier
from support.commands import error_of, fedssl, output_of
from support.encoder_folders import write_encoder_folder
from support.federation import tiny_spec

DATA = {"channels": 3, "image_size": 12, "mean": [0.5, 0.4, 0.3], "std": [0.25, 0.2, 0.3]}
PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "classify-images.md"
FIT = ("classify", "scans", "--model", "run", "--labels", "scans")


def lines_of(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with an encoder and images of two classes. One image cannot be decoded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_URL", "http://127.0.0.1:1")
    Path("run").mkdir()
    write_encoder_folder(Path("run"), tiny_spec(data=DATA))
    rng = np.random.default_rng(0)
    for number in range(24):
        name, colour = (("a, b", (200, 60, 60)), ("path", (60, 60, 200)))[number % 2]
        path = Path("scans", name, f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.array(colour) + rng.integers(-50, 50, (12, 12, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    Path("scans/path/broken.png").write_bytes(b"no image")
    return tmp_path


def test_a_folder_is_classified_by_its_own_labels(working_folder: Path) -> None:
    found = output_of(*FIT, "--out", "new/predictions.csv")
    lines = lines_of("new/predictions.csv")
    assert list(lines[0]) == ["path", "predicted", "p_a, b", "p_path"]
    assert [line["path"] for line in lines] == [
        *(f"a, b/{n}.png" for n in sorted(range(0, 24, 2), key=str)),
        *(f"path/{n}.png" for n in sorted(range(1, 24, 2), key=str)),
    ]
    for line in lines:
        p = {name: float(line[f"p_{name}"]) for name in ("a, b", "path")}
        assert sum(p.values()) == pytest.approx(1, abs=1e-5)
        assert line["predicted"] == max(p, key=lambda name: p[name]) == line["path"].split("/")[0]
    assert found["num_predicted"] == {"a, b": 12, "path": 12}
    assert [each["path"] for each in found["left_out"]["first"]] == ["path/broken.png"]
    assert found["classifier"]["accuracy"] == 1
    assert found["classifier"]["per_class"][0] == {"name": "a, b", "num_images": 12, "num_held_out": 2, "num_right": 2}


def test_a_saved_classifier_gives_the_same_bytes(working_folder: Path) -> None:
    result = fedssl(*FIT, "--save-head", "head.safetensors")
    assert result.exit_code == 0, result.output
    assert "left out path/broken.png" in result.stderr
    assert "100.00 % of the held-out images are right (chance: 50.00 %, 1 of 2 classes)" in result.stderr
    assert "24 of 25 images" in " ".join(result.stdout.split())
    output_of("classify", "scans", "--model", "run", "--head", "head.safetensors", "--out", "again.csv")
    assert Path("again.csv").read_bytes() == Path("predictions.csv").read_bytes()


def test_several_labels_per_image_come_from_a_csv_file(working_folder: Path) -> None:
    rows = [f"{path.relative_to('scans')}" for path in Path("scans").rglob("*.png")]
    cells = [[row, *("11" if row.startswith("a") else "01")] for row in rows]
    for number in range(0, len(cells), 4):
        cells[number][2] = "0"
    with Path("labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "red", "odd"], *cells])
    found = output_of("classify", "scans", "--model", "run", "--labels", "labels.csv")
    fit = found["classifier"]
    assert fit["multi_label"]
    num, with_each = fit["num_held_out"], [each["num_held_out"] for each in fit["per_class"]]
    assert fit["chance"] == {
        "accuracy": sum(max(each, num - each) for each in with_each) / (2 * num),
        "num_classes": 2,
        "how": "the more frequent answer, yes or no, for each of 2 classes",
    }
    for line in lines_of("predictions.csv"):
        assert line["predicted"] == ";".join(name for name in ("red", "odd") if float(line[f"p_{name}"]) >= 0.5)


def test_the_onnx_graph_has_encoder_and_classifier_in_one_file(working_folder: Path) -> None:
    output_of(*FIT, "--save-head", "head.safetensors")
    shown = output_of("export", "run", "--to", "onnx", "--head", "head.safetensors")
    assert (shown["file"], shown["classes"]) == ("run/classifier.onnx", ["a, b", "path"])
    assert [path.name for path in Path("run").glob("*.onnx*")] == ["classifier.onnx"]
    session = InferenceSession("run/classifier.onnx", providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == ["a, b", "path"]
    assert json.loads(metadata["image_shape"]) == [3, 12, 12]
    assert json.loads(metadata["multi_label"]) is False
    assert len(metadata["encoder_sha256"]) == 64
    network = Classifier(load_encoder("run"), read_head(Path("head.safetensors"))).eval()
    images = torch.rand(7, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    for batch in (images, images[:1]):
        (found,) = session.run(["probabilities"], {"images": batch.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), network(batch), rtol=0, atol=1e-5)
    line = lines_of("predictions.csv")[0]
    pixels = np.asarray(Image.open(Path("scans", line["path"])), np.float32) / 255
    (found,) = session.run(["probabilities"], {"images": pixels.transpose(2, 0, 1)[np.newaxis]})
    assert found[0] == pytest.approx([float(line["p_a, b"]), float(line["p_path"])], abs=1e-5)


@pytest.mark.full
def test_the_script_in_the_documentation_gives_the_same_probabilities(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert script is not None
    Path("images/a").mkdir(parents=True)
    turned = Image.Exif()
    turned[274] = 6
    pixels = np.random.default_rng(1).integers(0, 256, (20, 31)).astype(np.uint8)
    Image.fromarray(pixels).save("images/a/0.tif", exif=turned)
    Path("run").rename("own")
    output_of("classify", "images", "--model", "own", "--labels", "scans", "--save-head", "head.safetensors")
    output_of("export", "own", "--to", "onnx", "--head", "head.safetensors")
    capsys.readouterr()
    exec(script[1].replace("0.png", "0.tif"), {})
    printed = ast.literal_eval(capsys.readouterr().out)
    (line,) = lines_of("predictions.csv")
    assert printed == pytest.approx({name: float(line[f"p_{name}"]) for name in ("a, b", "path")}, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("classify", "scans", "--model", "run"), "either --labels"),
        ((*FIT, "--head", "head.safetensors"), "either --labels"),
        (("classify", "scans", "--model", "run", "--head", "h", "--save-head", "g"), "exists already"),
        ((*FIT, "--save-head", "head.bin"), ".safetensors"),
        (("classify", "scans", "--model", "run", "--head", "nowhere.safetensors"), "nowhere.safetensors"),
        (("classify", "scans", "--model", "run", "--head", "run/encoder.safetensors"), "fedssl classify"),
        (("classify", "scans", "--model", "run", "--labels", "nowhere"), "found no data set at nowhere"),
        (("classify", "scans", "--model", "run", "--labels", "scans/path"), "has no labels"),
        (("classify", "scans", "--model", "run", "--labels", "labels.csv"), "labels.csv, line 2"),
        (("classify", "set.npz", "--model", "run", "--labels", "labels.csv"), "set.npz holds arrays"),
        (("export", "run", "--to", "timm", "--head", "head.safetensors"), "--to onnx"),
    ],
)
def test_impossible_requests_are_refused_with_advice(
    working_folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    Path("labels.csv").write_text("path,label\nelsewhere.png,a\n")
    np.savez("set.npz", images=np.zeros((4, 12, 12, 3), np.uint8))
    assert words in error_of(*arguments)
    assert not Path("predictions.csv").exists()


def test_a_classifier_of_another_encoder_is_refused(working_folder: Path) -> None:
    output_of(*FIT, "--save-head", "head.safetensors")
    Path("predictions.csv").unlink()
    write_encoder_folder(Path("run"), tiny_spec(data=DATA))
    for arguments in (("classify", "scans", "--model", "run"), ("export", "run", "--to", "onnx")):
        assert "fitted to another encoder" in error_of(*arguments, "--head", "head.safetensors")
    assert not Path("predictions.csv").exists()


def test_an_earlier_file_stays_if_no_image_can_be_classified(working_folder: Path) -> None:
    output_of(*FIT, "--save-head", "head.safetensors")
    before = Path("predictions.csv").read_bytes()
    Path("broken").mkdir()
    Path("broken/broken.png").write_bytes(b"no image")
    assert "no image of" in error_of("classify", "broken", "--model", "run", "--head", "head.safetensors")
    assert Path("predictions.csv").read_bytes() == before
    assert not list(Path().glob(".*incoming"))
