"""Encoders, heads and their initial weights."""

from fedssl.models.complexity import num_multiply_adds
from fedssl.models.encoders import ConvNet, Encoder, ResNet, build_encoder
from fedssl.models.heads import build_mlp
from fedssl.models.initialisation import initialised
from fedssl.models.torchvision_guard import import_torchvision

__all__ = [
    "ConvNet",
    "Encoder",
    "ResNet",
    "build_encoder",
    "build_mlp",
    "import_torchvision",
    "initialised",
    "num_multiply_adds",
]
