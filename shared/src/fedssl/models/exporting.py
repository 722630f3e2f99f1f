"""Exports a trained encoder for other programs: as an ONNX graph, or as a state dict with another library's names."""

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedssl.artifacts.tensors import save_tensors
from fedssl.errors import ExportError
from fedssl.files import replaced_file
from fedssl.models.pretrained import PretrainedEncoder

IMAGES, REPRESENTATIONS = "images", "representations"
_NEEDED = ("onnx", "onnxscript")


def export_onnx(encoder: PretrainedEncoder, destination: Path) -> None:
    """Write a graph from `images`, float32 (N, C, S, S) of values 0..1, to `representations`, float32 (N, H).

    N is variable; normalisation is part of the graph. Raises ExportError if onnx and onnxscript are not installed.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ExportError(f"{' and '.join(missing)} not installed: pip install 'fedssl[onnx]'")
    data = encoder.data
    example = torch.zeros(2, data.channels, data.image_size, data.image_size)
    with replaced_file(destination) as incoming, _quiet():
        torch.onnx.export(
            encoder.eval(),
            (example,),
            incoming,
            input_names=[IMAGES],
            output_names=[REPRESENTATIONS],
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
