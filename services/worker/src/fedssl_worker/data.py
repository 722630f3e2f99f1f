"""The data owner's own images. They are read here and stay in this process; no code of this package sends them.

Some runs also need public images. The worker fetches them from the coordinator by the digest in the run's spec, or
finds them on this machine by the name there.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
import torch

from fedssl.data import ImageData, conform
from fedssl.data.dataset_files import load_own, own_shape
from fedssl.data.partitioning import find_public, load_public, read_registered
from fedssl.errors import DataError
from fedssl.methods.api import ClientData
from fedssl.protocol.data import DataConfig, PublicDataConfig
from fedssl_worker.public_cache import PublicCache

log = structlog.get_logger()

_ABSOLUTE_PATH = re.compile(r"(?<![\w:/])[/~]\S")


@dataclass(frozen=True, slots=True)
class OwnImages:
    """All images of this client, in the memory of the training device. `fingerprint`: sha256 of images and labels."""

    data: ClientData
    channels: Literal[1, 3]
    image_size: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.data)

    def check_fit(self, config: DataConfig) -> None:
        """Raise DataError if a run needs images of another shape."""
        if (self.channels, self.image_size) != (config.channels, config.image_size):
            raise DataError(
                f"the run needs images of {_shape(config.channels, config.image_size)}, but this client's have "
                f"{_shape(self.channels, self.image_size)}: start the worker with --channels {config.channels} "
                f"--image-size {config.image_size}, or change the run's data.channels and data.image_size"
            )


def load_images(
    name_or_path: str, device: torch.device, *, image_size: int | None = None, channels: Literal[1, 3] | None = None
) -> OwnImages:
    """Read the training images and put them on the device.

    Args:
        image_size: the height and width to scale the images to. None keeps their own.
        channels: the number of channels to convert the images to. None keeps their own.

    Raises DataError if there are no images, if they do not fit into memory, or if they are not square or larger than
    512 pixels and no size is given.
    """
    images = load_own(name_or_path, "train", image_size=image_size, channels=channels)
    if not len(images):
        raise DataError(f"{name_or_path} has no images: a worker needs at least one")
    images = _square(images, image_size, channels)
    _, own_channels, size, _ = images.images.shape
    try:
        data = ClientData(
            images=torch.tensor(images.images, device=device),
            labels=None if images.labels is None else torch.tensor(images.labels, device=device),
        )
    except torch.OutOfMemoryError:
        gigabytes = images.images.nbytes / 1e9
        raise DataError(
            f"{gigabytes:.1f} GB of images do not fit on {device}: use --device cpu or fewer images"
        ) from None
    return OwnImages(data, 1 if own_channels == 1 else 3, size, _fingerprint(images))


class PublicImages:
    """The images that every client of a run has. The last ones that were used stay loaded on the device.

    A run's spec names them, and their representations leave this machine. So that a spec cannot name private images,
    only three sources are read: known data sets, `folder`, which the data owner has set aside for this purpose, and
    what `cache` fetches from the coordinator.
    """

    def __init__(self, device: torch.device, folder: Path | None = None, cache: PublicCache | None = None) -> None:
        self._device = device
        self._folder = None if folder is None else folder.expanduser()
        self._cache = cache
        self._loaded: tuple[PublicDataConfig, DataConfig, ClientData] | None = None

    def load(
        self, config: PublicDataConfig | None, data: DataConfig, on_bytes: Callable[[int], None] = lambda count: None
    ) -> ClientData | None:
        """Return a run's public images, or None if it has none.

        `on_bytes` is called while they are fetched, and may raise Cancelled.

        Raises DataError if this machine neither has the images nor may fetch them, ArtifactError and ClientError.
        """
        if config is None:
            return None
        if self._loaded is None or self._loaded[:2] != (config, data):
            self._loaded = None
            found = self._find(config, data, on_bytes)
            try:
                images = torch.tensor(found.images, device=self._device)
            except torch.OutOfMemoryError:
                raise DataError(f"{config.num_images} public images do not fit on {self._device}") from None
            self._loaded = (config, data, ClientData(images))
        return self._loaded[2]

    def _find(self, config: PublicDataConfig, data: DataConfig, on_bytes: Callable[[int], None]) -> ImageData:
        if config.digest is None:
            try:
                return load_public(find_public(config, self._folder), data)
            except DataError as error:
                raise _without_paths(error, config.dataset) from error
        if self._cache is None:
            raise DataError(f"this worker does not fetch the public images that the run needs, {config.dataset}")
        return self._cache.read(config.digest, lambda path: read_registered(path, config, data), on_bytes)


def _without_paths(error: DataError, dataset: str) -> DataError:
    """Return the error for the coordinator: a reason for declining must not name a folder of this machine."""
    if not _ABSOLUTE_PATH.search(str(error)):
        return error
    log.warning("public_images.unusable", reason=str(error))
    return DataError(f"this worker cannot use the run's public images, {dataset}: see its log")


def _square(images: ImageData, image_size: int | None, channels: Literal[1, 3] | None) -> ImageData:
    own_channels, size = own_shape(images, image_size, channels)
    return conform(images, DataConfig(channels=own_channels, image_size=size))


def _fingerprint(images: ImageData) -> str:
    digest = hashlib.sha256(repr(images.images.shape).encode())
    for array in (images.images, images.labels):
        if array is not None:
            for start in range(0, len(array), 4096):  # in parts: the array may be memory-mapped
                digest.update(array[start : start + 4096].tobytes())
    return digest.hexdigest()


def _shape(channels: int, size: int) -> str:
    return f"{channels} channel{'s' * (channels > 1)} and {size} x {size} pixels"
