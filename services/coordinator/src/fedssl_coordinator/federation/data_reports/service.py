"""Stores the reports of clients about their images, and compares them."""

from sqlalchemy.orm import Session

from fedssl.protocol.data_card import DRIFT_ALARM, DataReport, drift, mean_histogram, moments_of
from fedssl.protocol.views import FederationCardView, SiteCardView
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Client
from fedssl_coordinator.core.problems import AuditEvent, ProblemError
from fedssl_coordinator.federation.data_reports import repository
from fedssl_coordinator.identity import clients

_ROUNDING = 1e-4  # the error of the sum of ten shares, each rounded to six digits


def receive(session: Session, client_id: str, report: DataReport) -> None:
    """Store a report in place of the client's last one. Record an event if its images now differ from the others'.

    Raises ProblemError if it cannot be about the client's images.
    """
    client = clients.locked(session, client_id)
    project = client.project
    _require_possible(client, report)
    if report.card is None:
        repository.put(session, client_id, report)
        return
    before = _drifting(session, project)
    repository.put(session, client_id, report)
    for name, distance in _drifting(session, project).items():
        if name not in before:
            message = (
                f"the images of {name} differ from the federation's: the distance of their intensity histogram to the "
                f"mean is {distance:.2f}, {DRIFT_ALARM} or more"
            )
            record(session, "client.data_drift", message, client_id=name, data={"drift": distance})


def _drifting(session: Session, project: str) -> dict[str, float]:
    """Return the distance to the mean of each client whose images are an alarm."""
    # Only the histograms are read: each client of a large federation reports when its worker starts.
    histograms = repository.histograms(session, project)
    mean = mean_histogram(list(histograms.values()))
    if mean is None:
        return {}
    distances = {name: drift(histogram, mean) for name, histogram in histograms.items()}
    return {name: each for name, each in distances.items() if each is not None and each >= DRIFT_ALARM}


def _require_possible(client: Client, report: DataReport) -> None:
    """Raise ProblemError if a report would count for more images in the comparison than the client has."""
    num_images = max((part.num_images for part in (report.card, report.sums) if part is not None), default=0)
    if num_images > (client.num_images or 0):
        why = f"it is about {num_images} images, and {client.num_images or 'no number of them'} is registered"
    elif report.card is not None and sum(share or 0.0 for share in report.card.histogram) > 1 + _ROUNDING:
        why = "the shares of its histogram add up to more than 1"
    else:
        return
    detail = f"{client.id}: the report about the images cannot be right: {why}"
    raise ProblemError("invalid-request", detail, audit_event=AuditEvent("client.refused", detail, client_id=client.id))


def show(session: Session, project: str) -> FederationCardView:
    """Return what the clients of a project have reported."""
    rows = repository.all_of(session, project)
    reports = {row.client_id: DataReport.model_validate(row.report) for row in rows}
    histograms = [report.card.histogram for report in reports.values() if report.card is not None]
    mean = mean_histogram(histograms)
    sites = []
    for row in rows:
        report = reports[row.client_id]
        distance = None if report.card is None or mean is None else drift(report.card.histogram, mean)
        sites.append(
            SiteCardView(
                client_id=row.client_id,
                reported_at=row.reported_at,
                num_unreadable=report.num_unreadable,
                card=report.card,
                drift=distance,
                is_drifting=distance is not None and distance >= DRIFT_ALARM,
            )
        )
    sums = [report.sums for report in reports.values() if report.sums is not None]
    by_channels = {len(each.means): [one for one in sums if len(one.means) == len(each.means)] for each in sums}
    moments = tuple(moments_of(by_channels[number]) for number in sorted(by_channels) if len(by_channels[number]) > 1)
    return FederationCardView(sites=tuple(sites), histogram=mean, moments=moments)


def show_site(session: Session, client_id: str, project: str) -> SiteCardView | None:
    """Return what one client has reported, or None if it has reported nothing."""
    return next((site for site in show(session, project).sites if site.client_id == client_id), None)
