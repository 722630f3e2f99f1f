"""Deals one data set out to clients, the same for `fedssl simulate` and `fedssl up`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedssl.data import DATASETS, ImageData, choose_images, conform, load_dataset, partition
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, PartitionConfig, PublicDataConfig


def client_names(num_clients: int) -> list[str]:
    """`client-0`, `client-1`, ..., padded so that name order is number order."""
    width = len(str(num_clients - 1))
    return [f"client-{number:0{width}d}" for number in range(num_clients)]


@dataclass(frozen=True, slots=True)
class Shards:
    """Every client's images, and how many of each class it has: `counts` (K, number of classes)."""

    by_client: dict[str, ImageData]
    counts: NDArray[np.int64]


def deal(config: PartitionConfig, data: DataConfig, root: Path | None = None) -> Shards:
    """Load the training images, choose and partition them. Raises DataError.

    `root`: a folder to look for the data set in, before the usual places.
    """
    images = conform(load_dataset(config.dataset, "train", root), data)
    if images.labels is None:
        raise DataError(
            f"{config.dataset} has no labels: a partition by class needs them, as files or folders by class"
        )
    chosen = choose_images(len(images.images), config.max_images, config.seed)
    labels = images.labels[chosen]
    if config.pooled:
        parts = [np.arange(len(chosen))]
    else:
        parts = partition(labels, config.num_clients, config.scheme, config.seed, config.alpha)
    shards = {
        name: ImageData(images.images[chosen[part]], labels[part], images.class_names)
        for name, part in zip(client_names(len(parts)), parts, strict=True)
    }
    num_classes = int(labels.max()) + 1
    counts = np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])
    return Shards(shards, counts)


def find_public(config: PublicDataConfig, folder: Path | None) -> PublicDataConfig:
    """The same config with the images' place on this machine: a known data set, or what lies in `folder`.

    A run's spec comes from elsewhere: it must not be able to name any other file. Raises DataError.
    """
    if config.dataset in DATASETS:
        return config
    if folder is not None:
        path = (folder / config.dataset).resolve()
        if path.exists() and path.is_relative_to(folder.resolve()):
            return config.model_copy(update={"dataset": str(path)})
    raise DataError(
        f"the run's public images are {config.dataset}, which this machine does not hold: put them into a folder of "
        "public data and name it (worker: --public-data FOLDER, coordinator: FEDSSL_PUBLIC_DATA)"
    )


def load_public(config: PublicDataConfig, data: DataConfig, root: Path | None = None) -> ImageData:
    """The images that everybody holds, without labels, in the run's shape. Raises DataError.

    `root`: a folder to look for the data set in, before the usual places.
    """
    images = load_dataset(config.dataset, config.split, root)
    if len(images) < config.num_images:
        raise DataError(
            f"the {config.split} split of {config.dataset} has {len(images)} images here, the run's public_data needs "
            f"{config.num_images}: every machine must hold the same ones"
        )
    chosen = choose_images(len(images), config.num_images, config.seed)
    return conform(ImageData(images.images[chosen]), data)
