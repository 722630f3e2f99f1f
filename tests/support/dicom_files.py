"""DICOM files for tests, written by pydicom."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, generate_uid

CT_IMAGE = "1.2.840.10008.5.1.4.1.1.2"
REPORT = "1.2.840.10008.5.1.4.1.1.88.11"


def dataset(pixels: NDArray[Any] | None, *, bits: int | None = None, frames: bool = False, **elements: Any) -> Dataset:
    """Return a dataset of values (H, W), (frames, H, W) or (H, W, 3), uncompressed; without pixels it is a report."""
    found = Dataset()
    found.file_meta = FileMetaDataset()
    found.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    found.SOPClassUID = found.file_meta.MediaStorageSOPClassUID = REPORT if pixels is None else CT_IMAGE
    found.SOPInstanceUID = found.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    if pixels is not None:
        is_colour = pixels.ndim == 3 and not frames
        found.Rows, found.Columns = pixels.shape[1:3] if frames else pixels.shape[:2]
        if frames:
            found.NumberOfFrames = len(pixels)
        found.SamplesPerPixel = 3 if is_colour else 1
        found.PhotometricInterpretation = "RGB" if is_colour else "MONOCHROME2"
        if is_colour:
            found.PlanarConfiguration = 0
        found.BitsAllocated = 8 * pixels.dtype.itemsize
        found.BitsStored = bits or found.BitsAllocated
        found.HighBit = found.BitsStored - 1
        found.PixelRepresentation = int(pixels.dtype.kind == "i")
        found.PixelData = pixels.tobytes()
        found["PixelData"].VR = "OB" if pixels.dtype.itemsize == 1 else "OW"
    for keyword, value in elements.items():
        setattr(found, keyword, value)
    return found


def write_dicom(path: Path, pixels: NDArray[Any] | None, **options: Any) -> Path:
    """Write values as :func:`dataset` describes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset(pixels, **options).save_as(path, enforce_file_format=True)
    return path


def write_compressed(path: Path, frames: list[NDArray[np.uint8]], kind: str, **elements: Any) -> Path:
    """Write grey frames of 8 bits, each compressed by PIL as JPEG or JPEG 2000 without loss."""
    found = dataset(np.stack(frames), frames=True, **elements)
    parts = []
    for frame in frames:
        part = io.BytesIO()
        if kind == "JPEG":
            Image.fromarray(frame).save(part, "JPEG", quality=100)
        else:
            Image.fromarray(frame).save(part, "JPEG2000", no_jp2=True)
        parts.append(part.getvalue())
    found.file_meta.TransferSyntaxUID = JPEGBaseline8Bit if kind == "JPEG" else JPEG2000Lossless
    found.PixelData = encapsulate(parts)
    found["PixelData"].VR = "OB"
    found["PixelData"].is_undefined_length = True
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save_as(path, enforce_file_format=True)
    return path


def item(**elements: Any) -> Sequence:
    """Return a sequence of one item."""
    found = Dataset()
    for keyword, value in elements.items():
        setattr(found, keyword, value)
    return Sequence([found])
