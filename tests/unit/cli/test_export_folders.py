"""The commands `fedssl export --to huggingface` and `--to monai`: other libraries load the same network."""

import csv
import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.classification.head_file import read_head, write_head
from fedssl.embeddings.encoders import load_model
from fedssl.models import import_torchvision, load_encoder
from fedssl.models.classifier import Classifier, Head
from support.commands import error_of, output_of
from support.encoder_folders import write_encoder_folder
from support.federation import tiny_spec

CARD = """---
library_name: fedssl
---

# a run

An encoder.

```python
from fedssl.models import load_encoder

encoder = load_encoder(".")  # this folder
```

## At the sites
"""
MEAN, STD = [0.5, 0.4, 0.3], [0.25, 0.2, 0.3]
CLASSES = ("benign", "ma/lignant")
RESNET = {"name": "resnet18", "stem": "imagenet"}
VIT = {"name": "vit-tiny", "patch_size": 8, "pooling": "mean", "depth": 2}
OF_TIMM = {"name": "timm:test_vit", "timm_version": importlib.metadata.version("timm"), "timm_width": 64}


def _run(folder: Path, encoder: dict[str, Any], channels: int = 3, *, head: bool = True, size: int = 32) -> Path:
    """Write the folder of a run, with a model card and a classifier for its encoder."""
    folder.mkdir()
    data = {"channels": channels, "image_size": size, "mean": MEAN[:channels], "std": STD[:channels]}
    write_encoder_folder(folder, tiny_spec(model={"encoder": encoder}, data=data))
    (folder / "model-card.md").write_text(CARD)
    (folder / "lineage.json").write_text("{}")
    if head:
        model = load_model(folder)
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(len(CLASSES), model.encoder.feature_dim, generator=generator)
        about = {**model.identity(), "fit": {}}
        write_head(Head(weight, torch.tensor([0.3, -0.2]), CLASSES, False, about), folder / "head.safetensors")
    return folder


def _images(channels: int, size: int = 32) -> torch.Tensor:
    return torch.rand(3, channels, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("encoder", "channels"), [(VIT, 1), (RESNET, 3), (OF_TIMM, 3)])
def test_timm_loads_the_folder_with_its_classes_and_normalisation(
    tmp_path: Path, encoder: dict[str, Any], channels: int
) -> None:
    run = _run(tmp_path / "run", encoder, channels)
    found = output_of("export", run, "--to", "huggingface", "--head", run / "head.safetensors")
    folder = Path(found["file"])
    assert folder == run / "huggingface"
    assert found["classes"] == list(CLASSES)
    import_torchvision()  # before timm, which imports torchvision without our guard
    import timm

    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    prepared = timm.data.resolve_model_data_config(theirs)
    assert (list(prepared["mean"]), list(prepared["std"])) == (MEAN[:channels], STD[:channels])
    assert tuple(prepared["input_size"]) == (channels, 32, 32)
    assert list(theirs.pretrained_cfg["label_names"]) == list(CLASSES)
    x = _images(channels)
    mean, std = (torch.tensor(values[:channels]).view(-1, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        ours = Classifier(load_encoder(run), read_head(run / "head.safetensors")).eval()(x)
        torch.testing.assert_close(theirs((x - mean) / std).softmax(dim=1), ours, rtol=1e-4, atol=1e-5)


def _of_timm(name: str, width: int) -> dict[str, Any]:
    return {"name": f"timm:{name}", "timm_version": importlib.metadata.version("timm"), "timm_width": width}


def test_timm_loads_a_classifier_that_is_a_convolution_in_timm(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _of_timm("dla46_c", 256))
    output_of("export", run, "--to", "huggingface", "--head", run / "head.safetensors")
    import timm

    theirs = timm.create_model(f"local-dir:{run / 'huggingface'}", pretrained=True).eval()
    encoder, x = load_encoder(run), _images(3)
    with torch.no_grad():
        logits = theirs((x - encoder.get_buffer("mean")) / encoder.get_buffer("std"))
        ours = Classifier(encoder, read_head(run / "head.safetensors")).eval()(x)
        torch.testing.assert_close(logits.softmax(dim=1), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_a_timm_classifier_of_more_than_one_linear_layer_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _of_timm("efficientvit_m0", 192), size=64)
    words = error_of("export", run, "--to", "huggingface", "--head", run / "head.safetensors")
    assert "is not one linear layer (head.bn.bias, " in words
    assert not (run / "huggingface").exists()


def test_without_a_classifier_timm_returns_representations(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", VIT, head=False)
    assert output_of("export", run, "--to", "huggingface", "--out", tmp_path / "out")["width"] == 192
    import_torchvision()
    import timm

    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    encoder = load_encoder(run)
    x = _images(3)
    with torch.no_grad():
        torch.testing.assert_close(
            theirs((x - encoder.get_buffer("mean")) / encoder.get_buffer("std")), encoder(x), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("channels", [1, 3])
def test_the_code_in_the_model_card_gives_the_same_representations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: int
) -> None:
    run = _run(tmp_path / "run", VIT, channels, head=False)
    folder = Path(output_of("export", run, "--to", "huggingface")["file"])
    (folder / "images").mkdir()
    turned = Image.Exif()
    turned[274] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (41, 75)).astype(np.uint8)
    Image.fromarray(pixels).save(folder / "images" / "0.tif", exif=turned)
    output_of("embed", folder / "images", "--model", run, "--out", tmp_path / "ours.npz")
    monkeypatch.chdir(folder)
    import_torchvision()
    code = Path("README.md").read_text().rpartition("```python\n")[2].removesuffix("```\n")
    names: dict[str, Any] = {}
    exec(code.replace("image.png", "images/0.tif"), names)
    with np.load(tmp_path / "ours.npz") as ours:
        expected = torch.from_numpy(ours["embeddings"])
    torch.testing.assert_close(names["representation"].detach(), expected, rtol=1e-4, atol=1e-5)


def test_huggingface_hub_reads_the_card_and_the_weights(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", VIT)
    output_of("export", run, "--to", "huggingface", "--head", run / "head.safetensors")
    import_torchvision()
    import timm
    from huggingface_hub import ModelCard, load_torch_model

    card = ModelCard.load(run / "huggingface" / "README.md")
    assert card.data.library_name == "timm"
    assert card.data.pipeline_tag == "image-classification"
    assert "## At the sites" in card.text
    assert "load_encoder" not in card.text
    network = timm.create_model(
        "vit_tiny_patch16_224",
        patch_size=8,
        depth=2,
        img_size=32,
        num_classes=2,
        global_pool="avg",
        pretrained=False,
    )
    left = load_torch_model(network, run / "huggingface", strict=True)
    assert (left.missing_keys, left.unexpected_keys) == ([], [])


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("encoder", "words"),
    [
        ({"widths": [4, 8]}, "timm has no convnet 4-8"),
        ({"name": "resnet18"}, "only ResNets with the imagenet stem"),
        ({**RESNET, "norm": "group"}, "timm has no resnet18"),
    ],
)
def test_networks_that_timm_does_not_have_are_refused(tmp_path: Path, encoder: dict[str, Any], words: str) -> None:
    run = _run(tmp_path / "run", encoder, head=False)
    assert words in error_of("export", run, "--to", "huggingface")
    assert not (run / "huggingface").exists()


def test_a_bundle_needs_a_classifier(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {"widths": [4, 8]}, head=False)
    assert "add a classifier by --head" in error_of("export", run, "--to", "monai")
    assert "no place for a classifier" in error_of("export", run, "--to", "timm", "--head", run)


def _bundle(tmp_path: Path, channels: int) -> Path:
    run = _run(tmp_path / "run", {"widths": [4, 8]}, channels, size=12)
    output_of("export", run, "--to", "monai", "--head", run / "head.safetensors")
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 31, 3)).astype(np.uint8)
        path = run / "monai" / "images" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    Image.fromarray(pixels[:, :, 0]).save(path.with_name("turned.tif"), tiffinfo={274: 6})
    Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257).save(path.with_name("16-bits.png"))
    return run


@pytest.mark.full
@pytest.mark.parametrize("channels", [1, 3])
def test_monai_runs_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    """The probabilities equal those of `fedssl classify`. Both prepare the images from their files."""
    run = _bundle(tmp_path, channels)
    head = run / "head.safetensors"
    output_of("classify", run / "monai" / "images", "--model", run, "--head", head, "--out", tmp_path / "ours.csv")
    shutil.copytree(run / "monai", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    import monai.bundle

    monai.bundle.run(config_file="configs/inference.json", meta_file="configs/metadata.json")
    with Path("eval/predictions.csv").open(newline="") as file:
        theirs = {Path(row[0]).name: [float(value) for value in row[1:]] for row in csv.reader(file)}
    with (tmp_path / "ours.csv").open(newline="") as file:
        ours = {row["path"]: [float(row[f"p_{name}"]) for name in CLASSES] for row in csv.DictReader(file)}
    assert len(ours) == 7
    assert theirs.keys() == ours.keys()
    for name, expected in ours.items():
        assert theirs[name] == pytest.approx(expected, abs=1e-5)
    Image.fromarray(np.full((20, 31), 1e4, np.float32)).save("images/values.tif")
    with pytest.raises(SystemExit, match=r"images/values\.tif: only images with one page of 8 bits"):
        monai.bundle.run(config_file="configs/inference.json", meta_file="configs/metadata.json")


def test_the_bundle_describes_its_network(tmp_path: Path) -> None:
    run = _bundle(tmp_path, 3)
    root = run / "monai"
    about = json.loads((root / "configs" / "metadata.json").read_text())
    pred = about["network_data_format"]["outputs"]["pred"]
    assert pred["channel_def"] == {"0": "benign", "1": "ma/lignant"}
    network = torch.jit.load(root / "models" / "model.ts")
    expected = Classifier(load_encoder(run), read_head(run / "head.safetensors")).eval()
    for x in (_images(3, 12), _images(3, 12)[:1]):
        with torch.no_grad():
            torch.testing.assert_close(network(x), expected(x))
    state = torch.load(root / "models" / "model.pt", weights_only=True)
    network.load_state_dict(state)


@pytest.mark.full
def test_monai_finds_the_described_shapes(tmp_path: Path) -> None:
    import monai.bundle

    root = _bundle(tmp_path, 3) / "monai"
    monai.bundle.verify_net_in_out(
        "network_def",
        meta_file=str(root / "configs" / "metadata.json"),
        config_file=str(root / "configs" / "inference.json"),
        bundle_root=str(root),
        device="cpu",
    )
