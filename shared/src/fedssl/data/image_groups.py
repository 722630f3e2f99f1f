"""Groups of images, such as those of a patient, a video or a slide, which no partition or split divides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ImageGroups:
    """The groups of N images, which are drawn as if each group were one image.

    Attributes:
        number: the group of each image, counted from 0, (N,).
        labels: the most frequent class of each group, or the lowest of several such classes, (number of groups,).
    """

    number: Indices
    labels: Indices

    @classmethod
    def of(cls, labels: Indices, groups: Indices) -> "ImageGroups":
        """Return the groups of images with these labels (N,), by equal numbers in `groups` (N,)."""
        number = np.unique(groups, return_inverse=True)[1]
        pairs, sizes = np.unique(np.stack([number, labels]), axis=1, return_counts=True)
        order = np.lexsort((pairs[1], -sizes, pairs[0]))  # in each group, its most frequent class comes first
        first = np.unique(pairs[0][order], return_index=True)[1]
        return cls(number, pairs[1][order][first])


def positions_of(parts: Sequence[Indices], number: Indices) -> list[Indices]:
    """Return the sorted positions of each part's images.

    Args:
        parts: K arrays of group numbers, disjoint.
        number: the group of each image (N,).
    """
    part_of = np.full(int(number.max(initial=-1)) + 1, len(parts), np.int64)  # an image may belong to no part
    for position, part in enumerate(parts):
        part_of[part] = position
    found = part_of[number]
    ends = np.bincount(found, minlength=len(parts))[: len(parts)].cumsum()
    return np.split(np.argsort(found, kind="stable"), ends)[: len(parts)]


def first_divided(by_client: Mapping[str, Indices], groups: Indices) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return two clients with an image of one group each, as (client, image) pairs, or None if no group is divided.

    Args:
        by_client: for each client the indices of its images.
        groups: (N,), equal for the images of one group.
    """
    first: dict[int, tuple[str, int]] = {}
    for name, part in by_client.items():
        for group, image in zip(groups[part].tolist(), part.tolist(), strict=True):
            earlier = first.setdefault(group, (name, image))
            if earlier[0] != name:
                return earlier, (name, image)
    return None
