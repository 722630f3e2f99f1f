"""A user's own labelled images, to which a classifier is fitted."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedssl.data.catalogue import KNOWN
from fedssl.data.datasets import find_path, list_files, load_arrays
from fedssl.data.label_files import read_label_file, with_groups_of
from fedssl.data.site_labels import SiteLabels, own_labels
from fedssl.embeddings.sources import ArraySource, FileSource, Source
from fedssl.errors import DataError


@dataclass(frozen=True, slots=True)
class Labelled:
    """Images, each with a label, in one order."""

    source: Source
    labels: SiteLabels


def open_labelled(name_or_path: str, root: Path | None) -> Labelled:
    """Return the images of a folder with one sub-folder per class, of an `.npz` file, or of a known data set.

    If a data set has splits, only its training images are returned. Raises DataError if they have no labels.
    """
    title = name_or_path if name_or_path in KNOWN else str(find_path(name_or_path, root).absolute())
    files = list_files(title, "train", root)
    if files is not None:
        return Labelled(FileSource(files, title, "train"), own_labels(files, title))
    arrays = load_arrays(title, "train", root)
    return Labelled(ArraySource(arrays, title, "train"), own_labels(arrays, title))


def label_images(images: Source, label_file: Path) -> Labelled:
    """Return the images that have a label in a CSV file. Its paths are those of the source. Raises DataError."""
    if not isinstance(images, FileSource):
        raise DataError(f"{images.title} holds arrays, whose images have no paths that {label_file} could name")
    labels = read_label_file(label_file, images.names(0, len(images)))
    labels = with_groups_of(images.files, labels, label_file)
    kept = np.flatnonzero(labels.is_labelled)
    names = tuple(images.files.names[position] for position in kept)
    chosen = replace(images.files, names=names, labels=None, groups=None)
    return Labelled(replace(images, files=chosen), labels.without(np.flatnonzero(~labels.is_labelled).tolist()))
