"""The images that a simulation starts from, and what must hold for them."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from fedssl.data import ImageData
from fedssl.data.datasets import list_files
from fedssl.data.image_cache.build import CachedData
from fedssl.data.partitioning import load_public, partition_images
from fedssl.errors import DataError, SpecError
from fedssl.evaluation.suite import Labelled, load_labelled
from fedssl.methods.api import ClientData
from fedssl.packages import is_installed
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import CohortConfig


def partition(spec: RunSpec, data_root: Path | None) -> Mapping[str, ImageData | CachedData]:
    """Return each client's images as the spec's partition assigns them. Raises SpecError and DataError."""
    if spec.partition is None:
        raise SpecError("a simulation needs images: add a [partition] section to the spec")
    return partition_images(spec.partition, spec.data, data_root)


def public_images(spec: RunSpec, images: ImageData | None, data_root: Path | None, device: str) -> ClientData | None:
    """Return the images that all clients hold, on the device, or None if the spec has none.

    Raises SpecError unless they are as many as the spec states, and DataError.
    """
    if spec.public_data is None:
        return None
    if images is None:
        images = load_public(spec.public_data, spec.data, data_root)
    if len(images) != spec.public_data.num_images:
        raise SpecError(f"public_data.num_images is {spec.public_data.num_images}, but {len(images)} images are given")
    _require_square("the public images", images, spec)
    return ClientData(torch.from_numpy(images.images).to(device))


def evaluation_images(spec: RunSpec, data_root: Path | None) -> Labelled | None:
    """Return the images on which the coordinator would evaluate, or None if the spec has none. Raises DataError."""
    config = spec.central_evaluation
    if config is None:
        return None
    limits = {"max_train": config.max_train, "max_test": config.max_test}
    return load_labelled(config.dataset, spec.data, **limits, seed=spec.seed, root=data_root)


def images_digest(
    spec: RunSpec,
    clients: Mapping[str, ImageData | CachedData] | None = None,
    *,
    public: ImageData | None = None,
    data_root: Path | None = None,
) -> str:
    """Return the digest `images` that the `Result` of a simulation would have now. Raises SpecError and DataError."""
    shards = clients if clients is not None else partition(spec, data_root)
    own = {name: shards[name] for name in participants(spec.cohort, shards)}
    return fingerprint(own, evaluation_images(spec, data_root), public_images(spec, public, data_root, "cpu"))


def files_stamp(spec: RunSpec, data_root: Path | None) -> str:
    """Return a text that changes if a file of the run's images does. Decodes nothing.

    It is "" if some of them are missing or not files in a folder, or if a file assigns them to clients.
    """
    partition, labelled, public = spec.partition, spec.central_evaluation, spec.public_data
    if partition is None or partition.file is not None:
        return ""
    wanted: list[tuple[str, Literal["train", "test"]]] = [(partition.dataset, "train")]
    wanted += [] if labelled is None else [(labelled.dataset, "train"), (labelled.dataset, "test")]
    wanted += [] if public is None else [(public.dataset, public.split)]
    digest = hashlib.sha256()
    try:
        for name_or_path, split in wanted:
            if (files := list_files(name_or_path, split, data_root)) is None:
                return ""
            for name in files.names:
                digest.update(os.fsencode(f"{files.tree.path}\0{name}\0{files.tree.stamp(name)}\0"))
    except DataError:
        return ""
    return digest.hexdigest()


def fingerprint(own: Mapping[str, ImageData | CachedData], labelled: Labelled | None, public: ClientData | None) -> str:
    """Return the sha256 of the clients' and the evaluation's images and labels, and of the public images, in hex."""
    named = dict(own)
    if labelled is not None:
        named |= {"evaluation/train": labelled.train, "evaluation/test": labelled.test}
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(f"{name} {named[name].fingerprint()}\n".encode())
    if public is not None:
        digest.update(public.images[:].cpu().numpy().tobytes())
    return digest.hexdigest()


def require_own_shape(what: str, images: ImageData | CachedData, spec: RunSpec) -> None:
    """Raise DataError unless a client's images have the run's shape, and are in a cache if it needs one."""
    if isinstance(images, CachedData):
        images.require(spec.data)
        return
    if spec.data.cache_size is not None:
        raise DataError(
            f"{what} are squares in memory, and data.cache_size needs whole images: load them with "
            "fedssl.data.image_cache.load_cached(folder, spec.data)"
        )
    _require_square(what, images, spec)


def _require_square(what: str, images: ImageData, spec: RunSpec) -> None:
    """Raise DataError unless the images have the run's channels and size."""
    data, found = spec.data, images.images.shape[1:]
    if found != (data.channels, data.image_size, data.image_size):
        raise DataError(
            f"{what} are {' x '.join(map(str, found))}, but the run's are {data.channels} x {data.image_size} x "
            f"{data.image_size} (data.channels, data.image_size): convert them with "
            "fedssl.data.conform(images, spec.data)"
        )


def participants(cohort: CohortConfig, shards: Mapping[str, ImageData | CachedData]) -> list[str]:
    """Return the names of the run's clients, sorted. Raises SpecError if they cannot form a cohort."""
    names = sorted(shards if cohort.clients is None else cohort.clients)
    if missing := [name for name in names if name not in shards]:
        raise SpecError(f"cohort.clients names {', '.join(missing)}, which have no images here")
    if len(names) < cohort.min_clients:
        raise SpecError(f"cohort.min_clients is {cohort.min_clients}, but there are {len(names)} clients")
    if (cohort.min_updates or 0) > cohort.num_wanted(len(names)):
        raise SpecError(f"cohort.min_updates is {cohort.min_updates}, more than a cohort of these {len(names)} clients")
    return names


def require_masks(spec: RunSpec, num_clients: int) -> None:
    """Raise SpecError if the spec asks for secure aggregation, but no round here could use it."""
    config = spec.secure_aggregation
    if config is None:
        return
    if not is_installed("cryptography"):
        raise SpecError("secure_aggregation needs the package cryptography: pip install 'fedssl[secure]'")
    if (size := spec.cohort.num_wanted(num_clients)) < config.min_cohort:
        raise SpecError(
            f"secure_aggregation.min_cohort is {config.min_cohort}, more than the {size} clients of a cohort of these "
            f"{num_clients}: lower it (to 3 at least), or have more clients"
        )
