"""The encoder that makes the representations, and what identifies it."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedssl.client.model_files import export_encoder
from fedssl.data import ImageData
from fedssl.data.decoding import decode_to_memory
from fedssl.data.image_files import ImageFiles
from fedssl.data.reading import Reading
from fedssl.data.trees import FolderTree
from fedssl.errors import DataError, SpecError
from fedssl.evaluation import extract_features
from fedssl.models import PretrainedEncoder, load_encoder
from fedssl.models.pretrained import weights_file

BATCH_SIZE = 512
"""Images per call of the encoder: that of the evaluation, since another one may change the last bits."""


@dataclass(frozen=True, slots=True)
class Model:
    """An encoder. `sha256` is the digest of encoder.safetensors, which `lineage.json` and the model card list."""

    encoder: PretrainedEncoder
    sha256: str

    def identity(self) -> dict[str, Any]:
        """Return what determines the representation of an image, for a file's metadata."""
        data = self.encoder.data
        return {
            "encoder": {"sha256": self.sha256, "network": str(self.encoder.config), "width": self.encoder.feature_dim},
            "preprocessing": {
                "channels": data.channels,
                "image_size": data.image_size,
                "mean": None if data.mean is None else list(data.mean),
                "std": None if data.std is None else list(data.std),
                **(
                    {}
                    if data.window is None
                    else {"window": data.window.model_dump(mode="json", exclude_defaults=True)}
                ),
            },
        }

    def represent(self, images: ImageData, device: torch.device | str) -> torch.Tensor:
        """Return float32 (N, H) on the CPU, with the bits of the evaluation's representations.

        The encoder must already be on `device`. Raises DataError if they are not finite.
        """
        network, data = self.encoder.encoder, self.encoder.data
        h_NH = extract_features(network, images, data, device, batch_size=BATCH_SIZE).cpu()
        if not bool(h_NH.isfinite().all()):
            raise DataError(
                "the encoder gives representations that are not finite, because its training has diverged: take the "
                "model of another run"
            )
        return h_NH


def represent_file(model: Model, image: Path, device: torch.device | str) -> torch.Tensor:
    """Return the representation (H,) of an image file. Raises DataError if it cannot be decoded."""
    data = model.encoder.data
    files = ImageFiles(str(image), FolderTree(image.parent), (image.name,), reading=Reading.of(data))
    model.encoder.to(device)
    pixels, _ = decode_to_memory(files, data.channels, data.image_size)
    return model.represent(ImageData(pixels), device)[0]


def load_model(path: Path) -> Model:
    """Load the encoder of a folder that `fedssl run pull` or `fedssl simulate` wrote, or of a file in it.

    Raises SpecError, ArtifactError.
    """
    if path.suffix == ".onnx":
        raise SpecError(f"{path} is an exported graph: give the folder of `fedssl run pull` from which it was made")
    encoder = load_encoder(path)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder, "encoder.safetensors")
        export_encoder(weights_file(path), exported)
        with exported.open("rb") as file:
            return Model(encoder, hashlib.file_digest(file, "sha256").hexdigest())
