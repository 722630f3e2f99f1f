"""Files of weights that can be registered, and the distance between two models."""

import math
from pathlib import Path

from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.models import build_encoder, initialised
from fedssl.protocol.model import EncoderConfig

TINY_ENCODER = EncoderConfig(widths=(4, 8))
"""The encoder of `support.federation.tiny_spec`."""


def encoder_tensors(config: EncoderConfig = TINY_ENCODER, channels: int = 1, seed: int = 9) -> Tensors:
    """Return the tensors of an encoder with random weights, under the names that they have in a model."""
    encoder = initialised(lambda: build_encoder(config, channels), seed)
    return {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}


def encoder_file(folder: Path, config: EncoderConfig = TINY_ENCODER, channels: int = 1, seed: int = 9) -> Path:
    """Write the tensors of an encoder with random weights to a file, and return its path."""
    path = folder / f"encoder-{seed}.safetensors"
    save_tensors(encoder_tensors(config, channels, seed), path)
    return path


def distance(found: Tensors, expected: Tensors, initial: Tensors) -> float:
    """Return the distance between two models' trained weights, relative to how far the expected ones moved."""
    squares = [
        [
            float((one[name].double() - other[name].double()).square().sum())
            for name in expected
            if _is_trained(one, name)
        ]
        for one, other in ((found, expected), (expected, initial))
    ]
    apart, way = (math.sqrt(sum(column)) for column in squares)
    return apart / way


def _is_trained(tensors: Tensors, name: str) -> bool:
    """Return whether a tensor is neither BatchNorm's statistics nor a count."""
    return "running_" not in name and tensors[name].is_floating_point()
