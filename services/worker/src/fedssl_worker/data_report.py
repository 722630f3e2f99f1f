"""Reports to the coordinator what the data owner lets it know of the images as a whole."""

import structlog

from fedssl.client import ClientError
from fedssl.data.card import ImageStatistics, card_of, measure, sums_of
from fedssl.errors import DataError
from fedssl.protocol.data_card import DataReport
from fedssl_worker.data import UNREADABLE, OwnImages
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import LedgerError
from fedssl_worker.disclosure.policy import PolicyEnforcer
from fedssl_worker.labels import OwnLabels

log = structlog.get_logger()


class DataReporter:
    """Sends the report after each registration, because policy and images may have changed."""

    def __init__(self, egress: Egress, enforcer: PolicyEnforcer, images: OwnImages, labels: OwnLabels | None) -> None:
        self._egress = egress
        self._enforcer = enforcer
        self._images = images
        self._labels = labels
        self._measured: tuple[str, ImageStatistics] | None = None
        self._sent: tuple[str, DataReport] | None = None

    def send(self) -> None:
        """Send the report unless it was sent before. Only logs an error: no round depends on it."""
        try:
            report = self._report()
            if self._sent != (self._enforcer.digest, report):
                self._egress.send_report(report)
                self._sent = (self._enforcer.digest, report)
        except (ClientError, LedgerError, DataError, OSError) as error:
            log.warning("data_report.not_sent", reason=str(error))

    def _report(self) -> DataReport:
        """Return what may leave. Raises DataError."""
        counts = {kind: self._enforcer.images_min_count(kind) for kind in ("statistics", "channel-sums")}
        found = None if set(counts.values()) == {None} else self._statistics()
        card, sums = counts["statistics"], counts["channel-sums"]
        return DataReport(
            num_unreadable=self._images.num_unreadable if self._enforcer.permits_number(UNREADABLE) else None,
            card=None if found is None or card is None else card_of(found, card),
            sums=None if found is None or sums is None else sums_of(found, sums),
        )

    def _statistics(self) -> ImageStatistics:
        if self._measured is None or self._measured[0] != self._images.stamp:
            log.info("data_report.measuring", num_images=len(self._images))
            groups = None if self._labels is None else self._labels.labels.groups
            self._images.require_same_files()
            self._measured = self._images.stamp, measure(self._images.name_or_path, self._images.channels, groups)
        return self._measured[1]
