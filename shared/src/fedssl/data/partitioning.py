"""Partition one data set among clients, in the same way for `fedssl simulate` and `fedssl up`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedssl.data import DATASETS, ImageData, choose_images, keep_share, load_conformed, load_dataset, partition
from fedssl.data.dataset_files import has_digest, read_public
from fedssl.data.datasets import list_images, may_have_labels
from fedssl.data.image_cache.build import CachedData, load_cached
from fedssl.data.image_groups import ImageGroups, first_divided, positions_of
from fedssl.data.images import prepare
from fedssl.data.partition_files import read_partition
from fedssl.data.partitions import stratified_share
from fedssl.data.windowing import WindowMissing
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, PartitionConfig, PublicDataConfig


def client_names(num_clients: int) -> list[str]:
    """Return `client-0`, `client-1`, ..., padded so that name order is number order."""
    width = len(str(num_clients - 1))
    return [f"client-{number:0{width}d}" for number in range(num_clients)]


@dataclass(frozen=True, slots=True)
class Shards:
    """Every client's images, and its number of images of each class: `counts` (K, number of classes)."""

    by_client: dict[str, ImageData]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The assignment of images to clients.

    Attributes:
        by_client: for each client the sorted indices of its images in the training split.
        counts: the number of images of each class, (K, number of classes). Images without labels are one class.
        class_names: the names by number; empty if the data set has no names.
    """

    by_client: dict[str, NDArray[np.int64]]
    counts: NDArray[np.int64]
    class_names: tuple[str, ...]


UNLABELLED = "without label"


def assign_images(
    config: PartitionConfig,
    labels: NDArray[np.int64] | None,
    class_names: tuple[str, ...] = (),
    *,
    groups: NDArray[np.int64] | None = None,
    num_images: int | None = None,
    root: Path | None = None,
) -> PartitionPlan:
    """Assign images to clients by the labels (N,).

    Holds images out, chooses some of the rest, partitions these, and keeps `share` of each part.

    The images of one group (a patient), which have equal numbers in `groups` (N,), are all held out or all remain, and
    go to one client: a group counts as one image, of its most frequent class.

    Images without labels count as one class; `num_images` is their number. A partition's file is searched for as given,
    then in the folder `root`. Raises DataError if the scheme needs labels, or the file cannot be used.
    """
    if labels is None:
        if needs_labels(config) or num_images is None:
            raise _needs_labels(config)
        labels, class_names = np.zeros(num_images, np.int64), (UNLABELLED,)
    names = client_names(1 if config.pooled else config.num_clients)
    pool = remaining_images(config, labels, groups)
    chosen = pool[choose_images(len(pool), config.max_images, config.seed)]
    if config.pooled:
        parts = [np.arange(len(chosen))]
    elif config.scheme == "file":
        by_client = read_partition(_partition_file(config, root), names, len(labels))
        _require_whole_groups(config, by_client, groups)
        names, parts = list(by_client), list(by_client.values())
    elif groups is None:
        parts = _partitioned(config, labels[chosen])
    else:
        units = ImageGroups.of(labels, groups)
        parts = _partitioned_groups(config, units, units.number[chosen])
    parts = [chosen[part] for part in keep_share(parts, config.share, config.seed)]
    num_classes = max(int(labels.max()) + 1, len(class_names))
    counts = np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])
    return PartitionPlan(dict(zip(names, parts, strict=True)), counts, class_names)


def _partitioned(config: PartitionConfig, labels: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    assert config.scheme != "file", "a file has its own parts"
    return partition(labels, config.num_clients, config.scheme, config.seed, config.alpha, config.variant)


def _partitioned_groups(
    config: PartitionConfig, units: ImageGroups, group_of: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Return each client's sorted positions in `group_of` (n,), the group of each image that is partitioned."""
    present = np.unique(group_of)
    try:
        parts = _partitioned(config, units.labels[present])
    except DataError as error:
        raise DataError(
            f"{error}. The images of one group, such as a patient or a NIfTI file, stay together, so {config.dataset} "
            f"counts as {len(present):,} images"
        ) from error
    return positions_of([present[part] for part in parts], group_of)


def _require_whole_groups(
    config: PartitionConfig, by_client: Mapping[str, NDArray[np.int64]], groups: NDArray[np.int64] | None
) -> None:
    """Raise DataError if a partition's file assigns images of one group to two clients."""
    if groups is not None and (found := first_divided(by_client, groups)) is not None:
        (name, image), (other, another) = found
        raise DataError(
            f"{config.file} gives image {image} to {name} and image {another} to {other}, but both belong to one group "
            f"of {config.dataset}, such as a patient: give all images of a group to one client"
        )


def partition_dataset(config: PartitionConfig, data: DataConfig, root: Path | None = None) -> Shards:
    """Load the training images, choose and partition them. Raises DataError.

    `root` is a folder in which to search for the data set before the usual places.
    """
    _require_labels(config, root)
    refuse_cache(data)
    images = load_conformed(config.dataset, "train", data, root, leave_out=True)
    parts, counts = _parts(config, images, root)
    return Shards({name: images.subset(part) for name, part in parts.items()}, counts)


def refuse_cache(data: DataConfig) -> None:
    """Raise DataError for a run with a `cache_size`, in places where images become squares of the run's size."""
    if data.cache_size is not None:
        raise DataError(
            "the clients' images become squares of data.image_size here, and data.cache_size needs whole files: leave "
            "it out, or start a worker per folder"
        )


def partition_cached(config: PartitionConfig, data: DataConfig, root: Path | None = None) -> dict[str, CachedData]:
    """Do the same as :func:`partition_dataset` for a run with a `cache_size`: each client's images are in the cache."""
    _require_labels(config, root)
    images = load_cached(config.dataset, data, root)
    parts, _ = _parts(config, images, root)
    return {name: images.subset(part) for name, part in parts.items()}


def partition_images(
    config: PartitionConfig, data: DataConfig, root: Path | None = None
) -> Mapping[str, ImageData | CachedData]:
    """Return each client's images, in memory or, for a run with a `cache_size`, in the cache. Raises DataError."""
    if data.cache_size is not None:
        return partition_cached(config, data, root)
    return partition_dataset(config, data, root).by_client


def _require_labels(config: PartitionConfig, root: Path | None) -> None:
    """Raise DataError if there are no labels and the scheme needs them, before decoding, which may take long."""
    if needs_labels(config) and not may_have_labels(config.dataset, "train", root):
        raise _needs_labels(config)


def _parts(
    config: PartitionConfig, images: ImageData | CachedData, root: Path | None
) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64]]:
    """Return the clients' rows of `images`, and their number of images of each class.

    The plan is drawn over all files. Then the unreadable ones, which it counts, are left out.
    """
    if not images.unreadable:
        held = assign_images(
            config, images.labels, images.class_names, groups=images.groups, num_images=len(images), root=root
        )
        return held.by_client, held.counts
    plan, lost = partition_plan(config, root), np.array(images.unreadable)
    parts, counts = {}, np.zeros_like(plan.counts)
    for row, (name, part) in zip(counts, plan.by_client.items(), strict=True):
        kept = part[~np.isin(part, lost)]
        own = parts[name] = kept - np.searchsorted(lost, kept)
        labels = np.zeros(len(own), np.int64) if images.labels is None else images.labels[own]
        row += np.bincount(labels, minlength=len(row))
    return parts, counts


def remaining_images(
    config: PartitionConfig, labels: NDArray[np.int64], groups: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return the sorted indices of the images that are not held out. Raises DataError if none are left."""
    everything = np.arange(len(labels), dtype=np.int64)
    if not config.hold_out:
        return everything
    rest = np.setdiff1d(everything, held_out_images(config, labels, groups=groups), assume_unique=True)
    if not len(rest):
        raise DataError(f"partition.hold_out = {config.hold_out:g} leaves no image of {config.dataset}: hold out fewer")
    return rest


def held_out_images(
    config: PartitionConfig,
    labels: NDArray[np.int64],
    share: float | None = None,
    groups: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the sorted indices of the images that no client gets because they are held out.

    Args:
        labels: class numbers (N,) of the whole training split.
        share: if given, only this share of each class, which must not exceed `hold_out`.
        groups: (N,), equal for the images of one group, which are held out together: the share is then of the groups.
    """
    share = config.hold_out if share is None else share
    assert 0 < share <= config.hold_out, "only a part of what is held out"
    if groups is None:
        return stratified_share(labels, share, config.seed)
    units = ImageGroups.of(labels, groups)
    return np.flatnonzero(np.isin(units.number, stratified_share(units.labels, share, config.seed)))


def needs_labels(config: PartitionConfig) -> bool:
    """Return whether the partition depends on the images' classes."""
    return config.hold_out > 0 or (not config.pooled and config.scheme not in ("iid", "file"))


def _partition_file(config: PartitionConfig, root: Path | None) -> Path:
    assert config.file is not None, "the scheme file has one"
    path = Path(config.file).expanduser()
    return path if path.exists() or root is None else root / path


def _needs_labels(config: PartitionConfig) -> DataError:
    if config.hold_out:
        return DataError(
            f"{config.dataset} has no labels, which partition.hold_out needs for its share of each class: leave it out"
        )
    return DataError(
        f"{config.dataset} has no labels, which the partition scheme {config.scheme} needs: set partition.scheme to "
        '"iid" (`--scheme iid`), or give files with labels or one folder per class'
    )


def require_images(clients: Mapping[str, ImageData | CachedData], names: Iterable[str]) -> None:
    """Raise DataError if one of these clients has no images."""
    for name in names:
        if not len(clients[name]):
            raise DataError(
                f"{name} has no images to train on: try another partition.seed, fewer clients or a larger "
                "partition.alpha"
            )


def partition_plan(config: PartitionConfig, root: Path | None = None) -> PartitionPlan:
    """Return the assignment that :func:`partition_dataset` makes, without decoding images. Raises DataError."""
    found = list_images(config.dataset, "train", root)
    return assign_images(config, found.labels, found.class_names, groups=found.groups, num_images=len(found), root=root)


def find_public(config: PublicDataConfig, folder: Path | None) -> PublicDataConfig:
    """Return the config with the images' place on this machine: a known data set, or a path in `folder`.

    A run's spec comes from another party, so it must not be able to name any other file. Raises DataError.
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
    """Load the public images, found by name, without labels, in the run's shape. Raises DataError.

    `root` is a folder in which to search for the data set before the usual places.
    """
    try:
        images = load_dataset(config.dataset, config.split, root)
    except WindowMissing as error:
        raise DataError(
            f"the run's public images, {config.dataset}, have more than 8 bits per value: public images must have 8, "
            "so convert them, for example with fedssl.data.window"
        ) from error
    if config.digest is not None and not has_digest(images, config.digest):
        raise DataError(
            f"the {config.split} split of {config.dataset} here is not what was registered with the coordinator under "
            "that name, whose digest is in the spec: take public_data.digest out of the spec to use the images here"
        )
    return choose_public(images, config, data)


def choose_public(images: ImageData, config: PublicDataConfig, data: DataConfig) -> ImageData:
    """Return the images of a whole set that the run uses, without labels, in its shape. Raises DataError."""
    return prepare(ImageData(images.images[_chosen_public(len(images), config)]), data)


def read_registered(path: Path, config: PublicDataConfig, data: DataConfig) -> ImageData:
    """Return the images that the run uses from the file of a registered set, whose digest is in the config.

    Raises ArtifactDamaged unless the digest is the file's, ArtifactError if it is not a public set, and DataError.
    """
    assert config.digest is not None, "a registered set has a digest"
    return prepare(read_public(path, config.digest, lambda count: _chosen_public(count, config)), data)


def _chosen_public(num_images: int, config: PublicDataConfig) -> NDArray[np.int64]:
    if num_images < config.num_images:
        raise DataError(
            f"the {config.split} split of {config.dataset} has {num_images} images here, but the run's public_data "
            f"needs {config.num_images}: every machine must hold the same images"
        )
    return choose_images(num_images, config.num_images, config.seed)
