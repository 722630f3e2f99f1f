"""Data sets, their partition among clients, batches and augmented views."""

from fedssl.data.augment import normalize, random_view, to_float
from fedssl.data.batches import epoch_batches
from fedssl.data.datasets import DATA_VARIABLE, DATASETS, Split, find_fashion_mnist, load_dataset
from fedssl.data.fetch import fetch_fashion_mnist
from fedssl.data.formats import save_npz
from fedssl.data.images import ImageData, conform
from fedssl.data.partitions import Scheme, Variant, choose_images, describe_partition, partition
from fedssl.data.presets import AUGMENTATIONS, NORMALIZATIONS

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "DATA_VARIABLE",
    "NORMALIZATIONS",
    "ImageData",
    "Scheme",
    "Split",
    "Variant",
    "choose_images",
    "conform",
    "describe_partition",
    "epoch_batches",
    "fetch_fashion_mnist",
    "find_fashion_mnist",
    "load_dataset",
    "normalize",
    "partition",
    "random_view",
    "save_npz",
    "to_float",
]
