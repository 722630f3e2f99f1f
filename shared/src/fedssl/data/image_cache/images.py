"""Read the images of a cache while a model is trained on them."""

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.batches import on_device
from fedssl.data.image_cache.entries import digest_of
from fedssl.data.images import square
from fedssl.data.windowing import FULL
from fedssl.errors import DataError

_CPU = torch.device("cpu")
_SHARE_OF_FREE = 0.25
_COPIED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Some images that may differ in size.

    Attributes:
        pixels: uint8 or int16 (B, C, H, W).
        sizes: float32 (B, 2), the height and width of each image, which is in the upper left corner of its part of
            `pixels`, whose rest is 0; None if all images are squares that fill it.
    """

    pixels: Tensor
    sizes: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)


class CachedImages:
    """Images in the file of a cache, which are read when they are needed, so they take no memory.

    As an array it has the shape (N, C, S, S): indexing gives the images' middle squares in the run's size. `batch` and
    `batches` give whole images, for random crops.

    Args:
        path: the file of pixels.
        offsets: int64 (N,), where each image begins, in bytes.
        sizes: int64 (N, 2), the height and width of each image in pixels.
        digests: int64 (N,), the digest of each image's pixels, which is compared when it is first read.
        channels: of each image.
        image_size: the run's S.
        dtype: uint8 or int16.
        device: where batches are needed.
        resident: the pixels of all images on the device, one after the other in the order of `offsets`, in place of the
            file.

    Raises DataError, here and when images are read, if the file is damaged.
    """

    def __init__(
        self,
        path: Path,
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        digests: NDArray[np.int64],
        *,
        channels: int,
        image_size: int,
        dtype: np.dtype[Any],
        device: torch.device = _CPU,
        resident: Tensor | None = None,
        file: "_PixelFile | None" = None,
    ) -> None:
        self.offsets, self.sizes, self.digests = offsets, sizes, digests
        self._is_checked = np.zeros(len(offsets), np.bool_)
        self.channels, self.image_size, self.dtype = channels, image_size, dtype
        self.device = device
        self._resident = resident
        self._lengths = channels * sizes.prod(axis=1)  # in values
        self._file = file or _PixelFile(path)

    @property
    def path(self) -> Path:
        """The file of pixels."""
        return self._file.path

    ROWS: ClassVar[tuple[str, ...]] = ("offsets", "sizes", "digests")
    """The names of the tensors of :meth:`parts`."""

    def parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what another process needs to read the same images: values for JSON, and tensors by name."""
        values = {
            "path": str(self.path),
            "identity": self._file.identity,
            "channels": self.channels,
            "image_size": self.image_size,
            "dtype": self.dtype.name,
        }
        return values, {name: torch.from_numpy(getattr(self, name)) for name in self.ROWS}

    @classmethod
    def from_parts(cls, values: Mapping[str, Any], rows: Mapping[str, Tensor]) -> "CachedImages":
        """Return the images of :meth:`parts`.

        Raises DataError if the file cannot be read, or is another one now.
        """
        images = cls(
            Path(values["path"]),
            rows["offsets"].numpy(),
            rows["sizes"].numpy(),
            rows["digests"].numpy(),
            channels=values["channels"],
            image_size=values["image_size"],
            dtype=np.dtype(values["dtype"]),
        )
        if images._file.identity != values["identity"]:  # its offsets would be those of other images
            raise DataError(f"the cached images in {images.path.parent} were made again: start again")
        return images

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, indices: slice | Tensor) -> Tensor:
        """Return the middle squares (n, C, S, S) of some images, on the device."""
        if isinstance(indices, slice):
            return self.squares(np.arange(len(self))[indices])
        return self.squares(indices.cpu().numpy())

    def index_select(self, dim: int, indices: Tensor) -> Tensor:
        """Return the middle squares (n, C, S, S) of some images, on the device."""
        assert dim == 0, "the first dimension counts the images"
        return self[indices]

    def squares(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the middle squares (n, C, S, S) of some images, on the device."""
        size, full = self.image_size, FULL[self.dtype]
        found = torch.empty((len(indices), self.channels, size, size), dtype=self._torch_type, device=self.device)
        for row, index in zip(found, indices.tolist(), strict=True):
            image = self._image(index).to(self.device)
            if min(image.shape[1:]) == size:  # exact, without rounding
                row.copy_(square(image[None], size)[0])
            else:
                row.copy_(square(image[None].to(torch.float32), size)[0].round().clamp(0, full))
        return found

    def subset(self, indices: NDArray[np.int64]) -> "CachedImages":
        """Return the images at `indices`, in that order. Nothing is read."""
        assert self._resident is None, "before the images are on a device"
        return self._with(self.offsets[indices], self.sizes[indices], self.digests[indices], self.device, None)

    def to(self, device: torch.device | str) -> "CachedImages":
        """Return images for batches on `device`. Their pixels are put there if it is a GPU with enough free memory."""
        device = torch.device(device)
        if device.type != "cuda":
            return self._with(self.offsets, self.sizes, self.digests, device, None)
        free, _ = torch.cuda.mem_get_info(device)
        fits = self.num_bytes <= _SHARE_OF_FREE * free
        return self.resident(device) if fits else self._with(self.offsets, self.sizes, self.digests, device, None)

    @property
    def num_bytes(self) -> int:
        """The size of all pixels."""
        return int(self._lengths.sum()) * self.dtype.itemsize

    def resident(self, device: torch.device) -> "CachedImages":
        """Return images whose pixels are in the memory of `device`."""
        ends = self._lengths.cumsum()
        pixels = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=self._torch_type, device=device)
        starts = ends - self._lengths
        for first in range(0, len(self), _COPIED_AT_ONCE):
            last = min(first + _COPIED_AT_ONCE, len(self))
            part = torch.cat([self._image(index).reshape(-1) for index in range(first, last)])
            pixels[int(starts[first]) : int(ends[last - 1])] = part.to(device)
        return self._with(starts * self.dtype.itemsize, self.sizes, self.digests, device, pixels)

    def batch(self, indices: Tensor) -> ImageBatch:
        """Return whole images, on the device. `indices` are on the CPU."""
        return self._on_device(*self._gathered(indices))

    def batches(self, each: Iterable[Tensor]) -> Iterator[ImageBatch]:
        """Yield whole images for each tensor of indices; the next ones are read while some are used."""
        if self._resident is not None:
            yield from map(self.batch, each)
            return
        with ThreadPoolExecutor(1) as reader:
            upcoming = None
            for indices in each:
                current, upcoming = upcoming, reader.submit(self._gathered, indices)
                if current is not None:
                    yield self._on_device(*current.result())
            if upcoming is not None:
                yield self._on_device(*upcoming.result())

    def _gathered(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images in the upper left corners of the smallest array that holds them, and their sizes."""
        rows = indices.tolist()
        sizes = self.sizes[indices.numpy()]
        height, width = sizes.max(axis=0).tolist()
        place = _CPU if self._resident is None else self.device
        shape = (len(rows), self.channels, height, width)
        pixels = torch.zeros(shape, dtype=self._torch_type, device=place)
        for canvas, row, (own_height, own_width) in zip(pixels, rows, sizes.tolist(), strict=True):
            canvas[:, :own_height, :own_width] = self._image(row)
        return pixels, torch.from_numpy(sizes.astype(np.float32))

    def _on_device(self, pixels: Tensor, sizes: Tensor) -> ImageBatch:
        return ImageBatch(on_device(pixels, self.device), on_device(sizes, self.device))

    def _image(self, index: int) -> Tensor:
        """Return one image, (C, h, w)."""
        (height, width), length = self.sizes[index].tolist(), int(self._lengths[index])
        offset = int(self.offsets[index])
        shape = (self.channels, height, width)
        if self._resident is not None:
            start = offset // self.dtype.itemsize
            return self._resident[start : start + length].view(shape)
        wanted = length * self.dtype.itemsize
        content = self._file.read(wanted, offset)
        if not self._is_checked[index]:  # checked once: later epochs mostly read from memory
            if digest_of(content) != self.digests[index].tobytes():
                raise self._file.damaged()
            self._is_checked[index] = True
        return torch.frombuffer(content, dtype=self._torch_type).view(shape)

    @property
    def _torch_type(self) -> torch.dtype:
        return torch.uint8 if self.dtype == np.uint8 else torch.int16

    def _with(
        self,
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        digests: NDArray[np.int64],
        device: torch.device,
        resident: Tensor | None,
    ) -> "CachedImages":
        return CachedImages(
            self.path,
            offsets,
            sizes,
            digests,
            channels=self.channels,
            image_size=self.image_size,
            dtype=self.dtype,
            device=device,
            resident=resident,
            file=self._file,
        )


class _PixelFile:
    """The open file of pixels, which the parts of a data set share.

    It is read, not mapped: if a mapped file was cut short, the kernel kills the process that reads it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._error(error) from error
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def identity(self) -> str:
        """The file's number, which no other file on this machine has as long as this one is open anywhere."""
        status = os.fstat(self._descriptor)
        return f"{status.st_dev} {status.st_ino}"

    def read(self, num_bytes: int, offset: int) -> bytearray:
        """Return some bytes. Raises DataError if the file cannot be read, or ends before."""
        content = bytearray(num_bytes)
        try:
            num_read = os.preadv(self._descriptor, [content], offset)
        except OSError as error:
            raise self._error(error) from error
        if num_read != num_bytes:
            raise self.damaged()
        return content

    def damaged(self) -> DataError:
        """Return the error for images that are not what was cached."""
        return DataError(f"the cached images in {self.path.parent} are damaged: remove this folder and start again")

    def _error(self, error: OSError) -> DataError:
        return DataError(f"cannot read the cached images in {self.path}: {error.strerror}")
