"""A folder with an encoder, as `fedssl run pull` writes it."""

from pathlib import Path

import torch

from fedssl.artifacts.tensors import save_tensors
from fedssl.embeddings.encoders import Model, load_model
from fedssl.models import build_encoder
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import write_spec
from support.federation import tiny_spec

SMALL_DATA = {"channels": 3, "image_size": 12, "mean": [0.5, 0.4, 0.3], "std": [0.25, 0.2, 0.3]}


def write_encoder_folder(folder: Path, spec: RunSpec, file: str = "encoder.safetensors") -> torch.nn.Module:
    """Write the folder's files, and return the encoder in it, in eval mode."""
    encoder = build_encoder(spec.model.encoder, spec.data.channels, spec.data.image_size)
    with torch.no_grad():
        for name, buffer in encoder.named_buffers():  # statistics as after training
            if buffer.is_floating_point():
                buffer.uniform_(*(0.5, 1.5) if name.endswith("var") else (-0.1, 0.1))
    write_spec(spec, folder / "spec.yaml")
    save_tensors({f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}, folder / file)
    return encoder.eval()


def make_small_model(folder: Path) -> Model:
    """Create a folder with an encoder for colour images of 12 pixels, and load it."""
    folder.mkdir()
    write_encoder_folder(folder, tiny_spec(data=SMALL_DATA))
    return load_model(folder)
