"""Reads a site's labels from CSV files. Each error names the file and the line."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from fedssl.data.datasets import list_files, load_arrays
from fedssl.data.folders import report_left_out
from fedssl.data.image_files import ImageFiles
from fedssl.data.image_groups import first_divided
from fedssl.data.site_labels import UNLABELLED, SiteLabels, own_labels
from fedssl.errors import DataError

OWN = "own"
"""Takes the place of a file: the labels of the data set itself."""

MAX_LABEL_FILE_BYTES = 1 << 28
MAX_LABEL_CLASSES = 10_000
_SPLITS = {"train": False, "test": True}
_EXTRA = ("path", "group", "split")
_MAPPING = ["own", "federation"]


def load_site_labels(data: str, source: str) -> SiteLabels:
    """Return the labels of the training images of a data set, in the order of the images.

    Args:
        data: the images, as in :func:`fedssl.data.load_dataset`.
        source: `OWN`, or a CSV file of labels as in :func:`read_label_file`.

    Raises DataError.
    """
    files = list_files(data, "train")
    if source == OWN:
        if files is not None:
            report_left_out(files)
        return own_labels(load_arrays(data, "train") if files is None else files, data)
    if files is None:
        raise DataError(
            f"{data} is a file of images, whose images have no paths that {source} could name: put the labels into it, "
            f"and use {OWN} in place of {source}"
        )
    path = Path(source).expanduser()
    return with_groups_of(files, read_label_file(path, files.names), path)


def with_groups_of(files: ImageFiles, labels: SiteLabels, path: Path) -> SiteLabels:
    """Return labels with the groups of the images' files, for example patients, unless they have groups of their own.

    `path` is the file of the labels. Raises DataError if its column `split` divides a group of the files.
    """
    if labels.groups is not None or files.groups is None:
        return labels
    if labels.fixed_test is not None:
        splits = {name: np.flatnonzero(labels.fixed_test == is_test) for name, is_test in _SPLITS.items()}
        if (found := first_divided(splits, files.groups)) is not None:
            (one, first), (other, second) = found
            raise DataError(
                f"{path}: {files.names[first]!r} is in {one} and {files.names[second]!r} in {other}, but they belong "
                "to one patient, or are of one file: put them into one split"
            )
    return replace(labels, groups=files.groups)


def read_label_file(path: Path, image_names: Sequence[str]) -> SiteLabels:
    """Read the labels of images from a CSV file with a header.

    Columns: `path`, relative to the folder of the images; then `label`, or one column per class with 1 if the image has
    this label and 0 if not. Optional: `group`, whose images stay in one split (a patient, for example), and `split`,
    `train` or `test` in every line. An image without a label has a line too, with empty cells.

    Args:
        image_names: the paths of the images, in their order.

    Raises:
        DataError: the file cannot be read; a path is unknown, missing, given twice or with two labels; a cell cannot be
            read; no image has a label; or a group is in both splits.
    """
    table = _Table(path, {name: number for number, name in enumerate(image_names)})
    rows = _rows(path)
    table.read_header(next(rows, (1, []))[1])
    for line, cells in rows:
        table.read_row(line, cells)
    return table.finish(image_names)


def read_label_names(path: Path) -> dict[str, str]:
    """Read the run's names for a site's own from a CSV file with the header `own,federation`.

    An empty name of the run leaves the images of a class without a label. Raises DataError.
    """
    rows = _rows(path)
    if next(rows, (1, []))[1] != _MAPPING:
        raise DataError(f"{path}, line 1: the header must be {','.join(_MAPPING)}")
    found: dict[str, str] = {}
    lines: dict[str, int] = {}
    for line, cells in rows:
        if len(cells) != len(_MAPPING) or not cells[0]:
            raise DataError(f"{path}, line {line}: write the site's own name, a comma, and the run's name")
        own, federation = cells
        if own in found:
            raise DataError(f"{path}, line {line}: {own!r} is renamed in line {lines[own]} already: remove one line")
        found[own], lines[own] = federation, line
    return found


@dataclass(slots=True)
class _Table:
    """A file of labels while it is read."""

    path: Path
    numbers: dict[str, int]
    columns: list[str] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    class_lines: list[int] = field(default_factory=list)
    lines: dict[int, int] = field(default_factory=dict)
    labels: dict[int, tuple[int, ...]] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    is_test: dict[int, bool] = field(default_factory=dict)
    group_splits: dict[str, tuple[bool, int]] = field(default_factory=dict)

    @property
    def is_multi_label(self) -> bool:
        return "label" not in self.columns

    def read_header(self, columns: list[str]) -> None:
        self.columns = columns
        if "path" not in columns:
            self._fail(1, "the header needs a column path, and a column label or one column per class")
        if len(set(columns)) != len(columns) or "" in columns:
            self._fail(1, "each column needs a name of its own")
        if self.is_multi_label:
            names = [name for name in columns if name not in _EXTRA]
            if not names:
                self._fail(1, "there is neither a column label nor a column for a class")
            self._require_few(1, len(names))
            self.classes = {name: number for number, name in enumerate(names)}
            self.class_lines = [1] * len(names)
        elif unknown := [name for name in columns if name not in (*_EXTRA, "label")]:
            self._fail(1, f"there is a column {unknown[0]!r} next to label: expected path, label, group and split")

    def read_row(self, line: int, cells: list[str]) -> None:
        if len(cells) != len(self.columns):
            self._fail(line, f"{len(cells)} cells, but the header has {len(self.columns)}")
        row = dict(zip(self.columns, cells, strict=True))
        name = row["path"].removeprefix("./")
        number = self.numbers.get(name)
        if number is None:
            self._fail(line, f"there is no image {name!r} among the {len(self.numbers):,} images")
        labels = self._labels(line, row)
        if number in self.lines:
            is_same = self.labels[number] == labels
            how = "again" if is_same else "with another label"
            self._fail(line, f"{name!r} is in line {self.lines[number]} and here {how}: keep one line per image")
        self.lines[number], self.labels[number] = line, labels
        self.groups[number] = row.get("group", "")
        if "split" in row:
            self._put_into_split(line, number, row["split"])

    def finish(self, image_names: Sequence[str]) -> SiteLabels:
        missing = [name for number, name in enumerate(image_names) if number not in self.lines]
        if missing:
            raise DataError(
                f"{self.path} lacks {len(missing):,} of {len(image_names):,} images, the first is {missing[0]!r}: add "
                "a line for each, with an empty label if it has none"
            )
        order = range(len(image_names))
        table = np.array([self.labels[number] for number in order], np.int64).reshape(len(image_names), -1)
        found = SiteLabels(
            labels=table if self.is_multi_label else table[:, 0],
            class_names=tuple(self.classes),
            places=tuple(f"{self.path}, line {line}" for line in self.class_lines),
            groups=self._group_numbers(order) if "group" in self.columns else None,
            fixed_test=np.array([self.is_test[number] for number in order]) if "split" in self.columns else None,
        )
        if not found.is_labelled.any():
            raise DataError(f"{self.path} has no label: leave the file out if the images have none")
        return found

    def _labels(self, line: int, row: dict[str, str]) -> tuple[int, ...]:
        if not self.is_multi_label:
            return (self._class_number(line, row["label"]) if row["label"] else UNLABELLED,)
        cells = [row[name] for name in self.classes]
        if not any(cells):
            return (UNLABELLED,) * len(cells)
        for name, cell in zip(self.classes, cells, strict=True):
            if cell not in ("0", "1"):
                self._fail(line, f"{name} is {cell!r}: write 1 if the image has this label and 0 if not")
        return tuple(map(int, cells))

    def _class_number(self, line: int, name: str) -> int:
        if name not in self.classes:
            self._require_few(line, len(self.classes) + 1)
            self.classes[name] = len(self.classes)
            self.class_lines.append(line)
        return self.classes[name]

    def _put_into_split(self, line: int, number: int, split: str) -> None:
        if split not in _SPLITS:
            self._fail(line, f"split is {split!r}: write train or test in every line, or leave the column out")
        is_test, group = _SPLITS[split], self.groups[number]
        self.is_test[number] = is_test
        if not group:
            return
        before, earlier = self.group_splits.setdefault(group, (is_test, line))
        if before != is_test:
            self._fail(line, f"the group {group!r} is in the other split in line {earlier}: put it into one split")

    def _group_numbers(self, order: range) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Return one number per group; an image without a group has its own."""
        numbers: dict[tuple[str, int], int] = {}
        keys = ((group, 0) if (group := self.groups[number]) else ("", number + 1) for number in order)
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)

    def _require_few(self, line: int, num_classes: int) -> None:
        if num_classes > MAX_LABEL_CLASSES:
            self._fail(line, f"there are more than {MAX_LABEL_CLASSES:,} classes: is this the column of the labels?")

    def _fail(self, line: int, message: str) -> NoReturn:
        raise DataError(f"{self.path}, line {line}: {message}")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line that is not empty, and its cells without spaces around them. Raises DataError."""
    try:
        if (size := path.stat().st_size) > MAX_LABEL_FILE_BYTES:
            raise DataError(f"{path} has {size:,} bytes, more than a file of labels can have: is it another file?")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                if cells:
                    yield reader.line_num, [cell.strip() for cell in cells]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text in UTF-8: save it as CSV in UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from None
