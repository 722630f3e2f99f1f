"""Images that are stored as files, in a fixed order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedssl.data.contents import Contents
from fedssl.data.reading import AS_STORED, Reading, num_tolerated
from fedssl.data.trees import Tree


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Images that are stored as files and not decoded yet.

    Attributes:
        title: their name in messages.
        tree: the folder or archive that holds them.
        names: the files, in the order of the images.
        labels: int64 class numbers (N,), or None.
        class_names: the classes by number.
        contents: what else the folder holds, if it was searched for images.
        reading: how the files become pixels.
        groups: int64 numbers (N,), equal for the images of one patient, if the files name patients (DICOM); or None.
    """

    title: str
    tree: Tree
    names: tuple[str, ...]
    labels: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()
    contents: Contents | None = None
    reading: Reading = AS_STORED
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_tolerated(self) -> int:
        """The number of files that may be unreadable."""
        return num_tolerated(self.reading.max_unreadable, len(self.names))
