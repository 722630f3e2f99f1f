from .augment import normalize, random_view, to_float
from .batches import epoch_batches
from .catalogue import KNOWN, KnownDataset, Split
from .datasets import (
    DATA_VARIABLE,
    DATASETS,
    find_dataset,
    find_fashion_mnist,
    how_to_get,
    load_conformed,
    load_dataset,
    load_labels,
)
from .fetch import fetch_fashion_mnist
from .formats import save_npz
from .images import ImageData, conform
from .partition_plot import plot_partition
from .partitions import (
    Scheme,
    Variant,
    choose_images,
    describe_partition,
    effective_classes,
    keep_share,
    partition,
)
from .presets import AUGMENTATIONS, NORMALIZATIONS, PARTITIONS
from .windowing import window

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "DATA_VARIABLE",
    "KNOWN",
    "NORMALIZATIONS",
    "PARTITIONS",
    "ImageData",
    "KnownDataset",
    "Scheme",
    "Split",
    "Variant",
    "choose_images",
    "conform",
    "describe_partition",
    "effective_classes",
    "epoch_batches",
    "fetch_fashion_mnist",
    "find_dataset",
    "find_fashion_mnist",
    "how_to_get",
    "keep_share",
    "load_conformed",
    "load_dataset",
    "load_labels",
    "normalize",
    "partition",
    "plot_partition",
    "random_view",
    "save_npz",
    "to_float",
    "window",
]
