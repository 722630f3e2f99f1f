"""Reports to the coordinator what the data owner discloses about the images as a whole."""

from pathlib import Path

import structlog
from pydantic import ValidationError

from fedssl.client import ClientError
from fedssl.data.card import ImageStatistics, card_of, measure, sums_of
from fedssl.errors import DataError
from fedssl.files import write_private
from fedssl.protocol.base import StrictModel
from fedssl.protocol.data_card import DataReport
from fedssl_worker.data import UNREADABLE, OwnImages
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import LedgerError
from fedssl_worker.disclosure.policy import PolicyEnforcer
from fedssl_worker.labels import OwnLabels

log = structlog.get_logger()


class _Reported(StrictModel):
    """The file of earlier reports.

    `num_units`: the number of images, or of groups, of each report, by the fingerprint of its images. `kinds`: the
    kinds of artifacts in the newest report.
    """

    num_units: dict[str, int] = {}
    kinds: tuple[str, ...] = ()


class DataReporter:
    """Sends the report after each registration, because policy and images may have changed.

    The difference between two reports discloses statistics of the images in which they differ. So a report about other
    images than an earlier one is only sent if their numbers differ by at least `min_count`: `record` is the file of
    earlier ones.
    """

    def __init__(
        self, egress: Egress, enforcer: PolicyEnforcer, images: OwnImages, labels: OwnLabels | None, record: Path
    ) -> None:
        self._egress = egress
        self._enforcer = enforcer
        self._images = images
        self._labels = labels
        self._record = record
        self._measured: tuple[str, ImageStatistics] | None = None
        self._sent: tuple[str, DataReport] | None = None

    def send(self) -> None:
        """Send the report unless it was sent before. Only logs an error: no round depends on it."""
        try:
            report = self._report()
            if report is not None and self._sent != (self._enforcer.digest, report):
                self._egress.send_report(report)
                self._sent = (self._enforcer.digest, report)
        except (ClientError, LedgerError, DataError, OSError) as error:
            log.warning("data_report.not_sent", reason=str(error))

    def _report(self) -> DataReport | None:
        """Return what may leave, or None if the coordinator should keep the earlier report. Raises DataError."""
        counts = {kind: self._enforcer.images_min_count(kind) for kind in ("statistics", "channel-sums")}
        card, sums = counts["statistics"], counts["channel-sums"]
        allowed = {kind: count for kind, count in counts.items() if count is not None}
        found, earlier = None, _Reported()
        if allowed:
            found, earlier = self._statistics(), self._earlier()
            if _tells_of_few(found, earlier, max(allowed.values())):
                log.warning("data_report.kept", reason="since an earlier one, too few images or groups have changed")
                if allowed.keys() >= set(earlier.kinds):
                    return None
                found = None
        report = DataReport(
            num_unreadable=self._images.num_unreadable if self._enforcer.permits_number(UNREADABLE) else None,
            card=None if found is None or card is None else card_of(found, card),
            sums=None if found is None or sums is None else sums_of(found, sums),
        )
        if allowed:
            self._write(report, found, earlier)
        return report

    def _earlier(self) -> _Reported:
        try:
            return _Reported.model_validate_json(self._record.read_bytes())
        except FileNotFoundError:
            return _Reported()
        except ValidationError as error:
            raise DataError(f"{self._record.name}, the record of earlier reports, is damaged: delete it") from error

    def _write(self, report: DataReport, found: ImageStatistics | None, earlier: _Reported) -> None:
        parts = {"statistics": report.card, "channel-sums": report.sums}
        kinds = tuple(kind for kind, part in parts.items() if part is not None)
        num_units = dict(earlier.num_units)
        if found is not None and kinds:
            num_units[found.fingerprint] = found.num_units
        newest = _Reported(num_units=num_units, kinds=kinds)
        if newest != earlier:
            write_private(self._record, newest.model_dump_json())

    def _statistics(self) -> ImageStatistics:
        if self._measured is None or self._measured[0] != self._images.stamp:
            log.info("data_report.measuring", num_images=len(self._images))
            groups = None if self._labels is None else self._labels.labels.groups
            self._images.require_same_files()
            self._measured = self._images.stamp, measure(self._images.name_or_path, self._images.channels, groups)
        return self._measured[1]


def _tells_of_few(found: ImageStatistics, earlier: _Reported, min_count: int) -> bool:
    """Return whether the images differ from those of an earlier report by fewer than this number."""
    num_units, own = found.num_units, found.fingerprint
    return any(each != own and abs(num_units - known) < min_count for each, known in earlier.num_units.items())
