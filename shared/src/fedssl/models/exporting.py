"""Exports a trained encoder for other programs: as an ONNX graph, or as a state dict with another library's names."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from fedssl.artifacts.tensors import save_tensors
from fedssl.errors import ExportError
from fedssl.files import replaced_file
from fedssl.models.classifier import Classifier, Head
from fedssl.models.pretrained import PretrainedEncoder
from fedssl.packages import is_installed

IMAGES, REPRESENTATIONS, PROBABILITIES = "images", "representations", "probabilities"
_NEEDED = ("onnx", "onnxscript")


def export_onnx(encoder: PretrainedEncoder, destination: Path) -> None:
    """Write a graph from `images`, float32 (N, C, S, S) of values 0..1, to `representations`, float32 (N, H).

    N is variable; normalisation is part of the graph. Raises ExportError if onnx and onnxscript are not installed.
    """
    require_onnx()
    with replaced_file(destination) as incoming, _quiet():
        _export(encoder, encoder, REPRESENTATIONS, incoming)


def export_classifier(encoder: PretrainedEncoder, head: Head, destination: Path) -> None:
    """Write a graph from `images`, float32 (N, C, S, S) of values 0..1, to `probabilities`, float32 (N, classes).

    N is variable; normalisation is part of the graph. The model's metadata have `classes`, a JSON list of names,
    `multi_label` (`true` or `false`), `image_shape`, the JSON list [C, S, S], and the `encoder_sha256` of
    encoder.safetensors. Raises ExportError if onnx and onnxscript are not installed.
    """
    require_onnx()
    import onnx

    data = encoder.data
    with replaced_file(destination) as incoming, _quiet():
        _export(Classifier(encoder, head), encoder, PROBABILITIES, incoming)
        graph = onnx.load(incoming)
        metadata = {
            "classes": json.dumps(head.class_names),
            "multi_label": json.dumps(head.multi_label),
            "image_shape": json.dumps([data.channels, data.image_size, data.image_size]),
            "encoder_sha256": str(head.about["encoder"]["sha256"]),
        }
        onnx.helper.set_model_props(graph, metadata)
        onnx.save(graph, incoming)


def require_onnx() -> None:
    """Raise ExportError if onnx and onnxscript are not installed."""
    if missing := [name for name in _NEEDED if not is_installed(name)]:
        raise ExportError(f"{' and '.join(missing)} not installed: pip install 'fedssl[onnx]'")


def _export(network: nn.Module, encoder: PretrainedEncoder, output: str, destination: Path) -> None:
    data = encoder.data
    example = torch.zeros(2, data.channels, data.image_size, data.image_size)
    torch.onnx.export(
        network.eval(),
        (example,),
        destination,
        input_names=[IMAGES],
        output_names=[output],
        dynamic_shapes=({0: torch.export.Dim("N")},),
        dynamo=True,
        external_data=False,  # one file: an encoder is far smaller than the 2 GB that would need more
        verbose=False,
    )


def export_state_dict(encoder: PretrainedEncoder, destination: Path, library: str = "timm") -> None:
    """Write the network's tensors as safetensors with the names of the library, `torchvision` or `timm`.

    They load into that library's network of that name without its classifier (`strict=False`). If the encoder has the
    `cifar` stem or one channel, a ResNet needs the same `conv1`; a ViT the same patch and image size, and pooling.
    Raises ExportError if the library has no such network.
    """
    if library not in encoder.encoder.libraries:
        raise ExportError(
            f"{library} has no such {encoder.config}: load it with fedssl.models.load_encoder, or export it to "
            + (f"{' or '.join(encoder.encoder.libraries)} or ONNX" if encoder.encoder.libraries else "ONNX")
        )
    save_tensors(encoder.encoder.state_dict(), destination)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's warnings about its own implementation."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
