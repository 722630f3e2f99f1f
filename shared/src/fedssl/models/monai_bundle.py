"""Writes an encoder and its classifier as a MONAI bundle, which runs without fedssl.

A bundle is a folder (https://docs.monai.io/en/stable/mb_specification.html): `configs/metadata.json` describes the
network, `configs/inference.json` how it is applied, `models/model.ts` is the network in TorchScript and
`models/model.pt` its state dict, and `docs/README.md` is the model card.

The network takes images of values 0..1 and gives probabilities: normalisation is part of it. `inference.json` prepares
image files by PIL in the same way as fedssl does, and stops at files that PIL would read differently. PIL gets
the bytes of a file and not its path: it would map some TIFF files into memory, and scramble those that it turns.
"""

import io
import json
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.errors import ExportError
from fedssl.files import write_atomically
from fedssl.models.classifier import Classifier, Head
from fedssl.models.pretrained import PretrainedEncoder

_SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
_MONAI = "1.6.1"  # the release that the tests use
_READ = (
    "getattr(image, 'n_frames', 1) == 1 and (image.mode in ('1', 'L', 'LA', 'P', 'PA', 'RGB', 'RGBA', 'CMYK', 'YCbCr', "
    "'LAB') or (image.format, image.mode) == ('PNG', 'I;16'))"
)
_NOT_READ = ": only images with one page of 8 bits, and grey PNG files of 16 bits, are read as in the training"
_COLOURS = {1: {"0": "image"}, 3: {"0": "R", "1": "G", "2": "B"}}


def export_monai_bundle(encoder: PretrainedEncoder, head: Head, card: str | None, folder: Path) -> None:
    """Write the bundle. `card` is the model card of the run's folder, or None if there is none.

    Raises ExportError if the run's images are not files of 8 bits with one or three channels.
    """
    require_monai(encoder)
    for name in ("configs", "models", "docs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    network = Classifier(encoder, head).eval()
    script, state = _traced(network, encoder)
    write_atomically(folder / "models" / "model.ts", script)
    write_atomically(folder / "models" / "model.pt", state)
    write_atomically(folder / "configs" / "metadata.json", json.dumps(_metadata(encoder, head), indent=2) + "\n")
    write_atomically(folder / "configs" / "inference.json", json.dumps(_inference(encoder), indent=2) + "\n")
    write_atomically(folder / "docs" / "README.md", card or f"# {encoder.config}\n")


def require_monai(encoder: PretrainedEncoder) -> None:
    """Raise ExportError unless `inference.json` can prepare the run's images."""
    if encoder.data.window is not None or encoder.data.channels not in _COLOURS:
        raise ExportError(
            "a bundle prepares images of 8 bits with 1 or 3 channels, and the run has others (data.window, "
            "data.channels): export it with --to onnx, and prepare the images yourself"
        )


def _traced(network: Classifier, encoder: PretrainedEncoder) -> tuple[bytes, bytes]:
    """Return the network as TorchScript, and its weights as a state dict."""
    data = encoder.data
    example = torch.zeros(2, data.channels, data.image_size, data.image_size)
    script, state = io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch prefers another format, which MONAI does not read
        traced = torch.jit.trace(network, example)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, script)
    torch.save(traced.state_dict(), state)
    return script.getvalue(), state.getvalue()


def _metadata(encoder: PretrainedEncoder, head: Head) -> dict[str, Any]:
    data, classes = encoder.data, head.class_names
    several = "several of them are possible" if head.multi_label else "exactly one of them is right"
    return {
        "schema": _SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": "exported by fedssl"},
        "monai_version": _MONAI,
        "pytorch_version": torch.__version__.split("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {"pillow": _installed("pillow")},
        "name": "fedssl classifier",
        "task": "image classification",
        "description": f"Probabilities of {len(classes)} classes ({several}): {', '.join(classes)}",
        "authors": "the data owners of the run; see docs/README.md",
        "copyright": "the data owners of the run; see docs/README.md",
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "magnitude",
                    "format": "RGB" if data.channels == 3 else "magnitude",
                    "modality": "n/a",
                    "num_channels": data.channels,
                    "spatial_shape": [data.image_size, data.image_size],
                    "dtype": "float32",
                    "value_range": [0, 1],
                    "is_patch_data": False,
                    "channel_def": _COLOURS[data.channels],
                }
            },
            "outputs": {
                "pred": {
                    "type": "probabilities",
                    "format": "classes",
                    "num_channels": len(classes),
                    "spatial_shape": [1, len(classes)],
                    "dtype": "float32",
                    "value_range": [0, 1],
                    "is_patch_data": False,
                    "channel_def": {str(number): name for number, name in enumerate(classes)},
                }
            },
        },
    }


def _inference(encoder: PretrainedEncoder) -> dict[str, Any]:
    channels, size = encoder.data.channels, encoder.data.image_size
    mode = "L" if channels == 1 else "RGB"
    fitted = f"ImageOps.fit(image.convert('{mode}'), ({size}, {size}), method=Image.Resampling.BILINEAR)"
    steps = (
        f"name: (lambda image: image if {_READ} else sys.exit(name + '{_NOT_READ}'))"
        "(Image.open(io.BytesIO(pathlib.Path(name).read_bytes())))",
        "image: ImageOps.exif_transpose(image)",
        "image: Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode == 'I;16' else image",
        f"image: np.asarray({fitted}, np.float32).reshape({size}, {size}, {channels}).transpose(2, 0, 1) / 255",
    )
    return {
        "imports": [
            "$import glob",
            "$import io",
            "$import pathlib",
            "$import sys",
            "$import numpy as np",
            "$import torch",
            "$from PIL import Image",
            "$from PIL import ImageOps",
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "files": "$sorted(glob.glob(@dataset_dir + '/*'))",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": {
            "_target_": "torch.jit.load",
            "f": "$@bundle_root + '/models/model.ts'",
            "map_location": "@device",
        },
        "network": "$@network_def.to(@device).eval()",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [
                *({"_target_": "Lambdad", "keys": "image", "func": f"$lambda {step}"} for step in steps),
                {"_target_": "EnsureTyped", "keys": "image"},
            ],
        },
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': name, 'file': name} for name in @files]",
            "transform": "@preprocessing",
        },
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "batch_size": 16,
            "shuffle": False,
            "num_workers": 0,
        },
        "inferer": {"_target_": "SimpleInferer"},
        "handlers": [
            {
                "_target_": "ClassificationSaver",
                "output_dir": "@output_dir",
                "filename": "predictions.csv",
                "batch_transform": "$lambda batch: [{'filename_or_obj': item['file']} for item in batch]",
                "output_transform": "$lambda output: [item['pred'] for item in output]",
            }
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "val_handlers": "@handlers",
        },
        "run": ["$@evaluator.run()"],
    }


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "any"
