"""Reads the data owner's images again before they are used if their files have changed (`--rescan`)."""

from collections.abc import Callable

import structlog

from fedssl.errors import DataError
from fedssl_worker.data import OwnImages
from fedssl_worker.labels import OwnLabels, load_own_labels
from fedssl_worker.settings import Settings

log = structlog.get_logger()


class Rescan:
    """Replaces the images and their labels, for everything that has them, and registers the new number."""

    def __init__(
        self, settings: Settings, images: OwnImages, labels: OwnLabels | None, reregister: Callable[[], object]
    ) -> None:
        self._settings = settings
        self._images = images
        self._labels = labels
        self._reregister = reregister

    def __call__(self) -> None:
        """Read again what has changed. Raises DataError, without names of this machine, and what registering raises.

        Images and labels are replaced together: after an error both are unchanged.
        """
        settings = self._settings
        try:
            images = self._images.read_if_changed()
            if images is None:
                return
            labels = load_own_labels(settings.data, settings.labels, settings.label_names, images.num_listed)
        except (DataError, MemoryError) as error:
            log.error("images.rescan_failed", reason=str(error) or type(error).__name__)
            raise DataError(
                "this client's images have changed and cannot be used, or its labels do not fit them: see its worker's "
                "log"
            ) from error
        log.info("images.changed", num_images=len(images), before=len(self._images))
        self._images.replace(images)
        if self._labels is not None and labels is not None:
            self._labels.labels, self._labels.renamed = labels.labels, labels.renamed
        self._reregister()
