"""Reads the labels of this client's images. Only counts and sums over images leave."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from fedssl.data.label_files import load_site_labels, read_label_names
from fedssl.data.site_labels import SiteLabels, with_run_classes
from fedssl.errors import DataError
from fedssl.methods import METHODS
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.site_labels import SiteLabelsConfig
from fedssl.protocol.methods.supervised import SupervisedConfig

log = structlog.get_logger()


class RunClasses(Protocol):
    """The classes of a run, as its spec names them."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def multi_label(self) -> bool: ...


@dataclass(slots=True)
class OwnLabels:
    """The labels of all images of this client, and the run's names for its classes that differ.

    They are replaced when the images have changed.
    """

    labels: SiteLabels
    renamed: Mapping[str, str]

    def for_run(self, config: RunClasses) -> SiteLabels:
        """Return the labels as numbers of the run's classes. Raises DataError, without names of this machine."""
        try:
            return with_run_classes(self.labels, config.classes, multi_label=config.multi_label, renamed=self.renamed)
        except DataError as error:  # the coordinator must not learn the names of files
            log.error("labels.unusable", reason=str(error))
            raise DataError("this site's labels do not fit the run's classes: see its worker's log") from error


def load_own_labels(data: str, source: str | None, names: Path | None, num_images: int) -> OwnLabels | None:
    """Return the labels of the worker's images, or None if it has none.

    Args:
        data: the images, as the worker reads them.
        source: `own`, or a CSV file of labels.
        names: a CSV file with the run's names for the site's own.
        num_images: how many images there are.

    Raises DataError.
    """
    if source is None:
        if names is not None:
            raise DataError("--label-names renames classes of --labels: give both")
        return None
    labels = load_site_labels(data, source)
    if len(labels) != num_images:
        raise DataError(f"{source} has labels of {len(labels)} images, and {data} has {num_images}: correct the labels")
    log.info("labels.loaded", num_labelled=int(labels.is_labelled.sum()), num_classes=len(labels.class_names))
    return OwnLabels(labels, {} if names is None else read_label_names(names.expanduser()))


def require_class_folders(num_folders: int | None, method: SupervisedConfig) -> None:
    """Raise DataError if a class has no folder: the classes after it would have other numbers than elsewhere.

    `num_folders`: the number of class folders, or None if the labels do not come from folders.
    """
    if num_folders not in (None, method.num_classes):
        raise DataError(
            f"this client's images are not in method.num_classes = {method.num_classes} folders, one per class: "
            "classes are numbered by the names of their folders, which must be the same at all clients; add an "
            "empty folder for each class that this client lacks, or change method.num_classes"
        )


def supported_methods(labels: OwnLabels | None, *, has_labels: bool) -> dict[str, int]:
    """Return the version of each method that this client can train. `has_labels`: the images have class folders.

    Methods that train on labels need those of the class folders; `ridge-probe` and `classifier` need those of --labels.
    """
    found = {}
    for name, method in METHODS.items():
        config = METHOD_CONFIGS[name]
        is_labelled = labels is not None if issubclass(config, SiteLabelsConfig) else has_labels
        trains_on_labels = issubclass(config, ComposedConfig) and "labels" in config.traits
        if not trains_on_labels or is_labelled:
            found[name] = method.version
    return found
