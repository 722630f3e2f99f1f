"""The data owner's own images. They are read here and stay in this process; no code of this package sends them.

Some runs also need public images. The worker fetches them from the coordinator by the digest in the run's spec, or
finds them on this machine by the name there.
"""

import dataclasses
import hashlib
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from fedssl.artifacts.images import MAX_SIZE
from fedssl.data import KNOWN, ImageData, conform
from fedssl.data.dataset_files import load_own, own_shape
from fedssl.data.datasets import find_path, list_files
from fedssl.data.decode_file import shape_of_first
from fedssl.data.decoding import find_unreadable
from fedssl.data.folders import report_left_out
from fedssl.data.formats import prepared_window
from fedssl.data.image_cache.build import CachedData, load_cached
from fedssl.data.image_files import ImageFiles
from fedssl.data.partitioning import find_public, load_public, read_registered
from fedssl.data.reading import Reading, num_tolerated
from fedssl.data.windowing import WindowMissing, prepared_type
from fedssl.engine.devices import memory_errors_as
from fedssl.errors import DataError
from fedssl.methods.api import ClientData
from fedssl.protocol.data import (
    MAX_UNREADABLE,
    DataConfig,
    PublicDataConfig,
    ServedShapes,
    WindowConfig,
    shape_in_words,
)
from fedssl_worker.public_cache import PublicCache

log = structlog.get_logger()

_ABSOLUTE_PATH = re.compile(r"(?<![\w:/])(~|/(?!v1/))\S")  # the coordinator's own paths begin with /v1/

UNREADABLE = "unreadable_images"
"""The metric with the number of files that were left out. Its rule in the policy also applies to that number at
registration."""

_KEPT_SHAPES = 2  # two runs of different shapes may take turns
_KEPT_BYTES = 256 << 20  # larger images are decoded to be registered, and not kept: most runs ask for another shape
_ANY_WINDOW = WindowConfig(percentiles=(0, 100))

_Key = tuple[int, int, WindowConfig | None, int | None]


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """All images of this client in one shape, in the memory of the training device or in a cache.

    `fingerprint`: sha256 of images and labels; for cached images, of their files, the settings and the labels.
    """

    data: ClientData
    channels: int
    image_size: int
    fingerprint: str
    unreadable: tuple[int, ...] = ()

    @property
    def num_listed(self) -> int:
        """The number of images, including those that cannot be read."""
        return len(self.data) + len(self.unreadable)


@dataclass(frozen=True, slots=True)
class _Registered:
    """The images as a worker registers them. `prepared`: the images, unless they take much memory."""

    num_listed: int
    num_unreadable: int
    channels: int
    image_size: int
    has_labels: bool
    prepared: PreparedImages | None


class OwnImages:
    """This client's images. They are read again for each shape that a run asks for, and the last shapes are kept.

    Attributes:
        channels, image_size: the shape that the worker registers with.
        serves: the shapes that a run may ask for.
        num_listed: the number of images, including those that cannot be read.
        num_unreadable: the number of images that cannot be read.
        has_labels: whether the images come with labels of their own.
        num_class_folders: the number of folders by which classes are numbered, or None if there are none.
        stamp: a text that changes when a file of the images is added, removed or changed.
    """

    def __init__(
        self,
        name_or_path: str,
        device: torch.device,
        *,
        image_size: int | None = None,
        channels: int | None = None,
        max_unreadable: float = MAX_UNREADABLE,
        allows_cache: bool = True,
    ) -> None:
        """Read the training images and put them on the device, in the shape that the worker registers with.

        Args:
            image_size: the registered height and width, and the largest that a run may ask for. None registers their
                own, and a run may ask for any.
            channels: the registered number of channels, and the largest that a run may ask for. None as above.
            allows_cache: whether a run may keep decoded images on this machine's disk.

        Raises DataError if there are no images, if they do not fit into memory, or if they are not square or larger
        than 512 pixels and no size is given.
        """
        self.name_or_path = name_or_path
        self._device = device
        self._image_size, self._channels = image_size, channels
        self._allows_cache = allows_cache
        self.stamp = _stamp_of(name_or_path)  # before reading, so that a rescan finds what is added meanwhile
        files = _files_of(name_or_path)
        self._listing = self.stamp if files is None else _names_digest(files)
        window = _prepared_window(name_or_path)
        try:
            registered = _register(name_or_path, files, device, image_size, channels, Reading(window, max_unreadable))
        except WindowMissing as error:
            # Runs choose the window. To register, only the number and the shape of the images count.
            log.warning("images.need_window", reason=str(error))
            window = _ANY_WINDOW
            registered = _register(name_or_path, files, device, image_size, channels, Reading(window, max_unreadable))
        self.channels, self.image_size = registered.channels, registered.image_size
        most = channels or (3 if registered.channels in (1, 3) else registered.channels)
        self.serves = ServedShapes(max_image_size=image_size or MAX_SIZE, max_channels=most)
        self.num_listed, self.num_unreadable = registered.num_listed, registered.num_unreadable
        self.has_labels = registered.has_labels
        self.num_class_folders = None if files is None or files.labels is None else len(files.class_names)
        self._config = DataConfig(
            channels=self.channels, image_size=self.image_size, window=window, max_unreadable=max_unreadable
        )
        self._kept: OrderedDict[_Key, PreparedImages] = OrderedDict()
        if registered.prepared is not None:
            self._kept[_key(self._config)] = registered.prepared

    def __len__(self) -> int:
        return self.num_listed - self.num_unreadable

    def read_if_changed(self) -> "OwnImages | None":
        """Return the images as they are now, or None if no file was added, removed or changed. Raises DataError."""
        if _stamp_of(self.name_or_path) == self.stamp:
            return None
        return OwnImages(
            self.name_or_path,
            self._device,
            image_size=self._image_size,
            channels=self._channels,
            max_unreadable=self._config.max_unreadable,
            allows_cache=self._allows_cache,
        )

    def replace(self, images: "OwnImages") -> None:
        """Replace the images in this object, so that all of its users have the new ones."""
        self.__dict__.update(vars(images))

    @property
    def data(self) -> ClientData:
        """The images in the registered shape."""
        return self.prepared(self._config).data

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the images in the registered shape."""
        return self.prepared(self._config).fingerprint

    def check_fit(self, config: DataConfig) -> None:
        """Raise DataError if this worker does not serve the shape that a run needs."""
        if (why := self.serves.refusal(config)) is not None:
            raise DataError(why)
        if config.cache_size is not None and not self._allows_cache:
            raise DataError(
                "this client's owner does not allow a cache of its images, which data.cache_size needs: leave it out "
                "of the spec, or start the worker without --no-image-cache"
            )
        if config.cache_size is not None and not _is_folder(self.name_or_path):
            raise DataError(
                "this client's images are not files in a folder, which data.cache_size needs: leave it out of the spec"
            )

    def prepared(self, config: DataConfig) -> PreparedImages:
        """Return the images in the shape that a run needs. Raises DataError."""
        self.check_fit(config)
        key = _key(config)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._within(self._kept[key], config)
        log.info("images.preparing", channels=config.channels, image_size=config.image_size)
        while len(self._kept) >= _KEPT_SHAPES:
            self._kept.popitem(last=False)
        try:
            found = self._read(config)
        except WindowMissing as error:
            log.error("images.unusable", reason=str(error))
            raise DataError(
                "this client's images have more than 8 bits per value: set [data.window] in the run's spec"
            ) from error
        except (DataError, MemoryError) as error:  # the coordinator must not learn the names of files
            log.error("images.unusable", reason=str(error) or type(error).__name__)
            wanted = shape_in_words(config.channels, config.image_size)
            raise DataError(f"this client's images cannot be prepared with {wanted}: see its worker's log") from error
        if found.num_listed != self.num_listed:
            log.error("images.changed", num_images=found.num_listed, num_registered=self.num_listed)
            raise DataError(
                f"this client's images have changed: {self.num_listed} were registered, and now there are "
                f"{found.num_listed}; restart the worker"
            )
        self.require_same_files()
        self._kept[key] = found
        return found

    def require_same_files(self) -> None:
        """Raise DataError if other files are listed than when the images were registered.

        Labels and groups were read then, and are matched to the images by their positions.
        """
        if (stamp := _stamp_of(self.name_or_path)) == self.stamp:
            return
        files = _files_of(self.name_or_path)
        if self._listing != (stamp if files is None else _names_digest(files)):
            log.error("images.changed", reason="files were added, removed or renamed since they were registered")
            raise DataError("this client's images have changed since they were registered; restart the worker")

    @staticmethod
    def _within(found: PreparedImages, config: DataConfig) -> PreparedImages:
        """Return the images. Raises DataError if more were left out than the run allows."""
        if len(found.unreadable) > num_tolerated(config.max_unreadable, found.num_listed):
            raise DataError(
                "more of this client's images cannot be read than the run allows: at most "
                f"{100 * config.max_unreadable:g} % (data.max_unreadable)"
            )
        return found

    def _read(self, config: DataConfig) -> PreparedImages:
        tolerated = min(config.max_unreadable, self._config.max_unreadable)
        if config.cache_size is not None:
            for key in [key for key in self._kept if key[-1] is None]:
                del self._kept[key]  # a run with a cache is one whose images should not be in memory
            return _from_cache(load_cached(self.name_or_path, config, max_unreadable=tolerated), self._device)
        images = load_own(
            self.name_or_path,
            "train",
            image_size=config.image_size,
            channels=config.channels,
            reading=Reading(config.window, tolerated),
        )
        images = conform(images, config)
        try:
            return _on_device(images, self._device)
        except DataError:
            self._kept.clear()  # images in another shape take the memory
            return _on_device(images, self._device)


def _files_of(name_or_path: str) -> ImageFiles | None:
    """Return the images if they are files of a folder, or None for all others. Raises DataError."""
    return None if name_or_path in KNOWN else list_files(name_or_path, "train")


def _names_digest(files: ImageFiles) -> str:
    return hashlib.sha256(b"\0".join(map(os.fsencode, files.names))).hexdigest()


def _register(
    name_or_path: str,
    files: ImageFiles | None,
    device: torch.device,
    image_size: int | None,
    channels: int | None,
    reading: Reading,
) -> _Registered:
    """Decode all images in the shape that the worker registers with. Raises DataError."""
    if files is not None and (found := _register_large(files, image_size, channels, reading)) is not None:
        return found
    images = load_own(name_or_path, "train", image_size=image_size, channels=channels, reading=reading)
    if not len(images):
        raise DataError(f"{name_or_path} has no images: a worker needs at least one")
    prepared = _on_device(_square(images, image_size, channels), device)
    return _Registered(
        prepared.num_listed,
        len(prepared.unreadable),
        prepared.channels,
        prepared.image_size,
        images.labels is not None,
        prepared,
    )


def _register_large(
    files: ImageFiles, image_size: int | None, channels: int | None, reading: Reading
) -> _Registered | None:
    """Do the same for a folder whose images take much memory, which are not kept. Returns None for all others."""
    files = dataclasses.replace(files, reading=reading)
    own_channels, size = shape_of_first(files, image_size, channels)
    num_bytes = len(files) * own_channels * size**2 * prepared_type(reading.window).itemsize
    if num_bytes <= _KEPT_BYTES or size > MAX_SIZE:
        return None
    unreadable = find_unreadable(files, own_channels, size)
    report_left_out(files)
    return _Registered(len(files), len(unreadable), own_channels, size, files.labels is not None, None)


def _stamp_of(name_or_path: str) -> str:
    """Return a text that changes when a file of the images is added, removed or changed. Raises DataError."""
    if name_or_path in KNOWN:
        return ""
    digest, seen, folders = hashlib.sha256(), set(), [find_path(name_or_path, None)]
    while folders:
        folder = folders.pop()
        try:
            paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        except OSError:
            continue  # it is not readable, or has vanished: reading the images reports it, unless it is hidden
        for path in paths:
            try:
                status = path.stat()
            except OSError:
                continue  # reading reports it
            if not stat.S_ISDIR(status.st_mode):
                stamp = f" {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n"
                digest.update(os.fsencode(path) + stamp.encode())
            elif (identity := (status.st_dev, status.st_ino)) not in seen:  # links may form a loop
                seen.add(identity)
                folders.append(path)
    return digest.hexdigest()


def _prepared_window(name_or_path: str) -> WindowConfig | None:
    """Return the window of an `.npz` file whose images are prepared already."""
    if name_or_path in KNOWN or (path := find_path(name_or_path, None)).is_dir():
        return None
    return prepared_window(path)


def _key(config: DataConfig) -> _Key:
    return config.channels, config.image_size, config.window, config.cache_size


def _on_device(images: ImageData, device: torch.device) -> PreparedImages:
    """Return square images on the device. Raises DataError if it has too little memory."""
    _, channels, size, _ = images.images.shape
    gigabytes = images.images.nbytes / 1e9
    too_large = f"{gigabytes:.1f} GB of images do not fit on {device}: use --device cpu or fewer images"
    with memory_errors_as(DataError(too_large)):
        data = ClientData(
            images=torch.tensor(images.images, device=device),
            labels=None if images.labels is None else torch.tensor(images.labels, device=device),
            groups=None if images.groups is None else torch.from_numpy(images.groups),
        )
    return PreparedImages(data, channels, size, images.fingerprint(), images.unreadable)


def _from_cache(images: CachedData, device: torch.device) -> PreparedImages:
    """Return images for training on the device. They stay in their cache, or on the device if it has the memory."""
    own = images.images
    labels = None if images.labels is None else torch.tensor(images.labels, device=device)
    data = ClientData(own.to(device), labels, groups=None if images.groups is None else torch.from_numpy(images.groups))
    return PreparedImages(data, own.channels, own.image_size, images.fingerprint(), images.unreadable)


def _is_folder(name_or_path: str) -> bool:
    known = KNOWN.get(name_or_path)
    return find_path(name_or_path, None).is_dir() if known is None else known.listing is not None


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
            with memory_errors_as(DataError(f"{config.num_images} public images do not fit on {self._device}")):
                images = torch.tensor(found.images, device=self._device)
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


def names_a_path(error: Exception) -> bool:
    """Return whether an error's message names a file or a folder of this machine."""
    return _ABSOLUTE_PATH.search(str(error)) is not None


def _without_paths(error: DataError, dataset: str) -> DataError:
    """Return the error for the coordinator: a reason for declining must not name a folder of this machine."""
    if not names_a_path(error):
        return error
    log.warning("public_images.unusable", reason=str(error))
    return DataError(f"this worker cannot use the run's public images, {dataset}: see its log")


def _square(images: ImageData, image_size: int | None, channels: int | None) -> ImageData:
    own_channels, size = own_shape(images, image_size, channels)
    return conform(images, DataConfig(channels=own_channels, image_size=size))
