"""Deals one data set out to clients, the same for `fedssl simulate` and `fedssl up`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedssl.data import (
    DATASETS,
    ImageData,
    choose_images,
    conform,
    keep_share,
    load_conformed,
    load_dataset,
    load_labels,
    partition,
)
from fedssl.data.dataset_files import has_digest
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


@dataclass(frozen=True, slots=True)
class Holdings:
    """Which images each client holds.

    Attributes:
        by_client: for each client the sorted indices of its images in the training split.
        counts: (K, number of classes).
        class_names: by number; empty where the data set has none.
    """

    by_client: dict[str, NDArray[np.int64]]
    counts: NDArray[np.int64]
    class_names: tuple[str, ...]


def allot(config: PartitionConfig, labels: NDArray[np.int64] | None, class_names: tuple[str, ...] = ()) -> Holdings:
    """Who holds which images, from the labels (N,) alone: chosen, partitioned, and then cut down to `share`.

    Raises DataError.
    """
    if labels is None:
        raise DataError(
            f"{config.dataset} has no labels: a partition by class needs them, as files or folders by class"
        )
    chosen = choose_images(len(labels), config.max_images, config.seed)
    if config.pooled:
        parts = [np.arange(len(chosen))]
    else:
        parts = partition(labels[chosen], config.num_clients, config.scheme, config.seed, config.alpha, config.variant)
    parts = [chosen[part] for part in keep_share(parts, config.share, config.seed)]
    num_classes = max(int(labels.max()) + 1, len(class_names))
    counts = np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])
    return Holdings(dict(zip(client_names(len(parts)), parts, strict=True)), counts, class_names)


def deal(config: PartitionConfig, data: DataConfig, root: Path | None = None) -> Shards:
    """Load the training images, choose and partition them. Raises DataError.

    `root`: a folder to look for the data set in, before the usual places.
    """
    images = load_conformed(config.dataset, "train", data, root)
    held = allot(config, images.labels, images.class_names)
    return Shards({name: images.subset(part) for name, part in held.by_client.items()}, held.counts)


def require_images(clients: Mapping[str, ImageData], names: Iterable[str]) -> None:
    """Raise DataError where one of these clients was dealt none."""
    for name in names:
        if not len(clients[name]):
            raise DataError(
                f"{name} has no images to train on: another partition.seed, fewer clients or a larger partition.alpha "
                "gives everybody some"
            )


def holdings(config: PartitionConfig, root: Path | None = None) -> Holdings:
    """Who holds which images after :func:`deal`; no image file is decoded for it. Raises DataError."""
    return allot(config, *load_labels(config.dataset, "train", root))


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
        "public data and name it (worker: --public-data FOLDER, coordinator: FEDSSL_PUBLIC_DATA), or register them "
        "(`fedssl public-dataset add`), so that workers fetch them from the coordinator"
    )


def load_public(config: PublicDataConfig, data: DataConfig, root: Path | None = None) -> ImageData:
    """The images that everybody holds, found by name, without labels, in the run's shape. Raises DataError.

    `root`: a folder to look for the data set in, before the usual places.
    """
    images = load_dataset(config.dataset, config.split, root)
    if config.digest is not None and not has_digest(images, config.digest):
        raise DataError(
            f"the {config.split} split of {config.dataset} here is not what was registered with the coordinator under "
            "that name, whose digest the spec names: take public_data.digest out of it to use what is here"
        )
    return choose_public(images, config, data)


def choose_public(images: ImageData, config: PublicDataConfig, data: DataConfig) -> ImageData:
    """Those of a whole set's images that the run uses, without labels, in its shape. Raises DataError."""
    if len(images) < config.num_images:
        raise DataError(
            f"the {config.split} split of {config.dataset} has {len(images)} images here, the run's public_data needs "
            f"{config.num_images}: every machine must hold the same ones"
        )
    chosen = choose_images(len(images), config.num_images, config.seed)
    return conform(ImageData(images.images[chosen]), data)
