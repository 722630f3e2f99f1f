"""A site's labels: which class each of its images has, and which images evaluate a classifier rather than train it.

Labels stay at the site. What the sites and the coordinator agree on are the names of the classes, which a run's spec
lists. A site may use other names and rename them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedssl.errors import DataError

UNLABELLED = -1
"""Takes the place of the label of an image that has none."""

_SPLIT_STREAM = 17
_MIXED = -1  # the stratum of a group whose images have different labels
_SHOWN = 5

Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SiteLabels:
    """The labels of a site's images, in the order of the images.

    Attributes:
        labels: one class number per image (N,), or with several labels per image their presence (N, C), of 0 and 1.
            `UNLABELLED` for an image without a label, in the latter case its whole row.
        class_names: the classes by number.
        places: where each class is found first, for messages: `labels.csv, line 7`.
        groups: group numbers (N,), for example one per patient. None if each image stands by itself.
        fixed_test: (N,), true for the images that the site itself has put into the test split; None if a seed decides.
    """

    labels: Labels
    class_names: tuple[str, ...]
    places: tuple[str, ...]
    groups: NDArray[np.int64] | None = None
    fixed_test: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def without(self, positions: Sequence[int]) -> "SiteLabels":
        """Return the labels of the other images, for example of those that can be read."""
        if not positions:
            return self

        def kept(array: NDArray[Any]) -> NDArray[Any]:
            return np.delete(array, list(positions), axis=0)

        return replace(
            self,
            labels=kept(self.labels),
            groups=None if self.groups is None else kept(self.groups),
            fixed_test=None if self.fixed_test is None else kept(self.fixed_test),
        )

    @property
    def is_multi_label(self) -> bool:
        """Return whether an image may have several labels."""
        return self.labels.ndim == 2

    @property
    def is_labelled(self) -> NDArray[np.bool_]:
        """Which images have a label (N,)."""
        is_labelled: NDArray[np.bool_] = self.labels != UNLABELLED
        if self.is_multi_label:
            is_labelled = np.logical_and.reduce(is_labelled, axis=1)
        return is_labelled


@dataclass(frozen=True, slots=True)
class LabelSplit:
    """The sorted positions of the labelled images that train a classifier, and of those that evaluate it."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]


class WithLabels(Protocol):
    """Images, decoded or not, that may have labels."""

    @property
    def labels(self) -> Labels | None: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    @property
    def groups(self) -> NDArray[np.int64] | None: ...


def own_labels(images: WithLabels, where: str) -> SiteLabels:
    """Return a data set's own labels: its folders, or the labels in its file.

    Classes without names are named by their numbers. Raises DataError if there are no labels; `where` is the data set
    in the message.
    """
    if images.labels is None:
        raise DataError(
            f"{where} has no labels: put the images into one folder per class, or give a file of labels (path,label)"
        )
    num_classes = max(len(images.class_names), int(images.labels.max()) + 1 if len(images.labels) else 0)
    names = images.class_names or tuple(map(str, range(num_classes)))
    if len(names) < num_classes:
        raise DataError(f"{where} has a label {num_classes - 1}, but names of only {len(names)} classes")
    return SiteLabels(images.labels, names, tuple(f"{where}, class {name}" for name in names), images.groups)


def with_run_classes(
    labels: SiteLabels, classes: Sequence[str], *, multi_label: bool, renamed: Mapping[str, str] | None = None
) -> SiteLabels:
    """Return the labels as numbers of the classes that a run's spec lists.

    Classes of the run that the site does not have are legal, and have no place (""). Two of the site's names may mean
    one class.

    Args:
        classes: the names in the spec, in its order.
        multi_label: whether the run's images may have several labels.
        renamed: the run's name for each of the site's that differs; an empty name leaves the class without a label.

    Raises:
        DataError: the site has a class that the run does not, or another number of labels per image.
    """
    if labels.is_multi_label != multi_label:
        has, needs = ("several labels", "one label") if labels.is_multi_label else ("one label", "several labels")
        raise DataError(
            f"this site's images have {has} each, but the run's have {needs} (evaluation.sites.multi_label)"
        )
    renamed = renamed or {}
    names = [renamed.get(name, name) for name in labels.class_names]
    used = set(_used(labels).tolist())
    unknown = [number for number in sorted(used) if names[number] and names[number] not in classes]
    if unknown:
        first = unknown[0]
        raise DataError(
            f"{labels.places[first]}: {names[first]!r} is not a class of the run, which has {_listed(classes)}; "
            f"{len(unknown)} of this site's {len(used)} classes are not: correct the labels, or rename the classes in "
            "the file of --label-names"
        )
    numbers = np.array([classes.index(name) if name in classes else UNLABELLED for name in names], np.int64)
    places = tuple(
        next((place for place, own in zip(labels.places, names, strict=True) if own == name), "") for name in classes
    )
    found = _renumbered(labels, numbers, len(classes))
    return replace(labels, labels=found, class_names=tuple(classes), places=places)


def require_columns(labels: SiteLabels) -> None:
    """Raise DataError if a table of several labels has no column of a class.

    Whether images have that class is not known then, and a classifier must not learn that none has it.

    Args:
        labels: as :func:`with_run_classes` returns them.
    """
    missing = [name for name, place in zip(labels.class_names, labels.places, strict=True) if not place]
    if labels.is_multi_label and missing:
        raise DataError(
            f"this site's table of labels has no column of {_listed(missing)}, and a missing label is not known to be "
            "absent: add a column of each class of the run, of zeros if no image has it"
        )


def _used(labels: SiteLabels) -> NDArray[np.int64]:
    """Return the numbers of the classes that the site's labels name: in a table of labels, all its columns."""
    if labels.is_multi_label:
        return np.arange(len(labels.class_names))
    return np.unique(labels.labels[labels.is_labelled])


def _renumbered(labels: SiteLabels, numbers: NDArray[np.int64], num_classes: int) -> Labels:
    if not labels.is_multi_label:
        padded = np.append(numbers, UNLABELLED)  # so that UNLABELLED, the last index, stays unlabelled
        return padded[labels.labels]
    found = np.zeros((len(labels), num_classes), np.int64)
    for column, number in enumerate(numbers):
        if number != UNLABELLED:
            found[:, number] |= labels.labels[:, column] == 1
    found[~labels.is_labelled] = UNLABELLED
    return found


def split_labels(labels: SiteLabels, test_share: float, seed: int) -> LabelSplit:
    """Divide the labelled images into those that train a classifier and those that evaluate it.

    A group is never divided. If all images of a group have the same label, groups of this label are drawn by
    themselves, so that each class is in both splits if it has enough groups. Equal arguments give equal splits.

    Args:
        test_share: the share of the test images, 0..1, of each label; groups that would exceed it train.
        seed: the seed of the draw. It is not used if the site has fixed the splits.
    """
    labelled = np.flatnonzero(labels.is_labelled)
    if labels.fixed_test is not None:
        is_test = labels.fixed_test[labelled]
        return LabelSplit(labelled[~is_test], labelled[is_test])
    groups = np.arange(len(labelled)) if labels.groups is None else labels.groups[labelled]
    _, unit_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    is_test_unit = np.zeros(len(sizes), np.bool_)
    strata = _strata(labels, labelled, unit_of, len(sizes))
    for stratum in np.unique(strata):
        units = np.flatnonzero(strata == stratum)
        rng = np.random.default_rng([seed, _SPLIT_STREAM, int(stratum) + 1])
        wanted = round(test_share * int(sizes[units].sum()))
        for unit in rng.permutation(units):
            if sizes[unit] <= wanted:
                is_test_unit[unit] = True
                wanted -= int(sizes[unit])
    is_test = is_test_unit[unit_of]
    return LabelSplit(labelled[~is_test], labelled[is_test])


def _strata(
    labels: SiteLabels, labelled: NDArray[np.int64], unit_of: NDArray[np.int64], num_units: int
) -> NDArray[np.int64]:
    """Return the label of each unit (U,) if all its images have it, else `_MIXED`."""
    if labels.is_multi_label:
        return np.full(num_units, _MIXED, np.int64)
    own = labels.labels[labelled]
    lowest, highest = np.full(num_units, np.iinfo(np.int64).max), np.full(num_units, _MIXED)
    np.minimum.at(lowest, unit_of, own)
    np.maximum.at(highest, unit_of, own)
    return np.where(lowest == highest, lowest, _MIXED)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
