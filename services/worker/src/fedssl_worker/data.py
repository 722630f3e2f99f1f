"""The data owner's own images. They are read here, stay in this process, and nothing in this package sends them.

Public images, which some runs need beside them, are fetched from the coordinator by the digest in the run's spec, or
found on this machine by the name there.
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
from fedssl.errors import DataError
from fedssl.image_files import load_own, open_public, own_shape
from fedssl.methods.api import ClientData
from fedssl.protocol.data import DataConfig, PublicDataConfig
from fedssl.shards import choose_public, find_public, load_public
from fedssl_worker.public_cache import PublicCache

log = structlog.get_logger()

_ABSOLUTE_PATH = re.compile(r"(?<![\w:/])[/~]\S")


@dataclass(frozen=True, slots=True)
class OwnImages:
    """All images of this client, in memory on the device that trains. `fingerprint`: sha256 of images and labels."""

    data: ClientData
    channels: Literal[1, 3]
    image_size: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.data)

    def check_fit(self, config: DataConfig) -> None:
        """Raise DataError where a run wants images of another shape."""
        if (self.channels, self.image_size) != (config.channels, config.image_size):
            raise DataError(
                f"the run wants images of {_shape(config.channels, config.image_size)}, this client's are of "
                f"{_shape(self.channels, self.image_size)}: start the worker with --channels {config.channels} "
                f"--image-size {config.image_size}, or change the run's data.channels and data.image_size"
            )


def load_images(
    name_or_path: str, device: torch.device, *, image_size: int | None = None, channels: Literal[1, 3] | None = None
) -> OwnImages:
    """Read the training images and put them on the device.

    `image_size` and `channels` bring them to that shape; None keeps what they have. Raises DataError when there are
    none, when they are not square or above 512 pixels and no size is given, or when they do not fit into memory.
    """
    images = load_own(name_or_path, "train", image_size=image_size, channels=channels)
    if not len(images):
        raise DataError(f"{name_or_path} holds no images: a worker needs at least one")
    images = _square(images, image_size, channels)
    _, own_channels, size, _ = images.images.shape
    try:
        data = ClientData(
            images=torch.tensor(images.images, device=device),
            labels=None if images.labels is None else torch.tensor(images.labels, device=device),
        )
    except torch.OutOfMemoryError:
        gigabytes = images.images.nbytes / 1e9
        raise DataError(f"{gigabytes:.1f} GB of images do not fit into {device}: take --device cpu, or fewer") from None
    return OwnImages(data, 1 if own_channels == 1 else 3, size, _fingerprint(images))


class PublicImages:
    """The images that everybody in a run holds, on the device; those of the last run that asked stay loaded.

    Their representations leave this machine, and the run's spec names them. So that it cannot name private images, only
    known data sets are read, what lies in `folder`, which the data owner has set aside for that, and what `cache`
    fetches from the coordinator.
    """

    def __init__(self, device: torch.device, folder: Path | None = None, cache: PublicCache | None = None) -> None:
        self._device = device
        self._folder = None if folder is None else folder.expanduser()
        self._cache = cache
        self._loaded: tuple[PublicDataConfig, DataConfig, ClientData] | None = None

    def load(
        self, config: PublicDataConfig | None, data: DataConfig, on_bytes: Callable[[int], None] = lambda count: None
    ) -> ClientData | None:
        """None where the run has none. `on_bytes` is called while they are fetched, and may raise Cancelled.

        Raises DataError where this machine neither holds them nor fetches them, ArtifactError and ClientError.
        """
        if config is None:
            return None
        if self._loaded is None or self._loaded[:2] != (config, data):
            self._loaded = None
            found = self._find(config, data, on_bytes)
            try:
                images = torch.tensor(found.images, device=self._device)
            except torch.OutOfMemoryError:
                raise DataError(f"{config.num_images} public images do not fit into {self._device}") from None
            self._loaded = (config, data, ClientData(images))
        return self._loaded[2]

    def _find(self, config: PublicDataConfig, data: DataConfig, on_bytes: Callable[[int], None]) -> ImageData:
        if config.digest is None:
            try:
                return load_public(find_public(config, self._folder), data)
            except DataError as error:
                raise _without_paths(error, config.dataset) from error
        if self._cache is None:
            raise DataError(f"the run's public images are the registered {config.dataset}, which are not fetched here")
        return choose_public(open_public(self._cache.path(config.digest, on_bytes)), config, data)


def _without_paths(error: DataError, dataset: str) -> DataError:
    """The error as the coordinator may be told it: the reason for declining names no folder of this machine."""
    if not _ABSOLUTE_PATH.search(str(error)):
        return error
    log.warning("public images cannot be used", reason=str(error))
    return DataError(f"the run's public images are {dataset}, which cannot be used here: the worker's log says why")


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
