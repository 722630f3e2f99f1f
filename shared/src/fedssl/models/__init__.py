"""Encoders, heads and their initial weights."""

from fedssl.models.complexity import num_multiply_adds
from fedssl.models.convnet import ConvNet
from fedssl.models.encoders import Encoder, build_encoder
from fedssl.models.freezing import freeze, frozen_tensors
from fedssl.models.heads import build_mlp
from fedssl.models.initial import LoadingTable, load_initial
from fedssl.models.initialisation import initialised
from fedssl.models.lora import LoRALinear, add_adapters, merged
from fedssl.models.pretrained import PretrainedEncoder, encoder_of, load_encoder, loaded
from fedssl.models.resnet import ResNet
from fedssl.models.torchvision_guard import import_torchvision
from fedssl.models.vision_transformer import VisionTransformer

__all__ = [
    "ConvNet",
    "Encoder",
    "LoRALinear",
    "LoadingTable",
    "PretrainedEncoder",
    "ResNet",
    "VisionTransformer",
    "add_adapters",
    "build_encoder",
    "build_mlp",
    "encoder_of",
    "freeze",
    "frozen_tensors",
    "import_torchvision",
    "initialised",
    "load_encoder",
    "load_initial",
    "loaded",
    "merged",
    "num_multiply_adds",
]
