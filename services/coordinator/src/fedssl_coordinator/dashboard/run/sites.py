"""The panel of a run's page about evaluations at the sites: a row per site, a column per evaluated round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.evaluation.site_results import METRICS
from fedssl.protocol.evaluation import EvaluationConfig, SiteMeasure
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import SiteEvaluationState
from fedssl.protocol.views import CrossSiteCell, SiteEvaluationView, SiteRoundView
from fedssl.wording import plural
from fedssl_coordinator.core import database_clock
from fedssl_coordinator.dashboard.layout import formats
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.federation.rounds.unseen import SEEN_SECONDS
from fedssl_coordinator.federation.site_evaluations import repository, results

SHOWN_SITES = 24
"""Rows of the panel. If there are more sites, it shows those with the lowest newest number."""

SHOWN_JUDGES = 12
"""Sites of the table of classifiers, by name: each is a row and a column."""

_MOST_ROUNDS = 8
_MOST_ANSWERS = 500  # with 100 classes each takes some milliseconds to evaluate
_NAMED_CLASSES = 3

TITLES: Mapping[SiteMeasure, str] = {
    "probe": "linear probe",
    "knn": "kNN",
    "classifier": "classifier of all sites",
    "personal": "classifier of the site",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of one round, or a word in its place. `site` has this number, if the row is of no site."""

    text: str
    value: float | None = None
    site: str = ""


@dataclass(frozen=True, slots=True)
class SiteRow:
    """One site: its cells, and the remark on its newest one."""

    client_id: str
    cells: list[Cell]
    words: str


@dataclass(frozen=True, slots=True)
class CrossSite:
    """The sites' own classifiers of one round: a row per site's classifier, a cell per site that evaluates it."""

    measure: str
    when: str
    judges: list[str]
    rows: list[tuple[str, list[Cell]]]
    num_sites: int


@dataclass(frozen=True, slots=True)
class SitesPanel:
    """The newest evaluated rounds at the sites, newest first. Without any round, no site has been asked yet."""

    measure: str
    rounds: list[int]
    summaries: list[tuple[str, list[Cell]]]
    sites: list[SiteRow]
    num_sites: int
    cross_site: CrossSite | None


def panel(session: Session, run_id: UUID, spec: RunSpec) -> SitesPanel | None:
    """Return the panel, or None if the run's spec has no evaluation at the sites."""
    if (config := spec.site_evaluation) is None:
        return None
    measure = config.site_measures[0]
    views = _newest(session, run_id, spec, measure)
    names = sorted({site.client_id for view in views for site in view.sites})
    seen = {name: at for name, (at, _) in run_queries.presence(session, names).items()}
    result = f"{measure}/{METRICS[0]}"
    rows = [_row(name, views, result, config, seen.get(name)) for name in names]
    if len(rows) > SHOWN_SITES:
        rows.sort(key=_newest_value)
    return SitesPanel(
        measure=f"{TITLES[measure]}, {METRICS[0]}",
        rounds=[view.round_number for view in views],
        summaries=_summaries(views, result) if any(view.mean for view in views) else [],
        sites=rows[:SHOWN_SITES],
        num_sites=len(rows),
        cross_site=_cross_site(session, run_id, config),
    )


def _cross_site(session: Session, run_id: UUID, config: EvaluationConfig) -> CrossSite | None:
    """Return the newest round's table, with the first sites by name if there are many, or None if there is none."""
    if config.site_config.cross_site is None or repository.newest_cross_site(session, run_id) is None:
        return None
    view = results.cross_site(session, run_id, None)
    result = f"{view.measure}/{METRICS[0]}"
    names = sorted({name for cell in view.cells for name in (cell.head_of, cell.client_id)})
    shown = names[:SHOWN_JUDGES]
    found = {(cell.head_of, cell.client_id): _cell(cell, result) for cell in view.cells}
    found |= {(name, name): _number(own[result]) for name, own in view.own.items()}
    owners = {cell.head_of for cell in view.cells}
    return CrossSite(
        measure=f"{TITLES[view.measure]}, {METRICS[0]}",
        when=_when(view.round_number),
        judges=shown,
        rows=[(owner, [found.get((owner, judge), Cell("–")) for judge in shown]) for owner in shown if owner in owners],
        num_sites=len(names),
    )


def _newest(session: Session, run_id: UUID, spec: RunSpec, measure: SiteMeasure) -> list[SiteRoundView]:
    """Return the newest rounds, as many as the page can compute quickly."""
    views: list[SiteRoundView] = []
    num_answers = 0
    for number in repository.newest_rounds(session, run_id, _MOST_ROUNDS):
        rows = repository.of_round(session, run_id, number)
        num_answers += len(rows)
        if views and num_answers > _MOST_ANSWERS:
            break
        views.append(results.view(spec, rows, [measure]))
    return views


def _summaries(views: Sequence[SiteRoundView], result: str) -> list[tuple[str, list[Cell]]]:
    worst = [view.worst.get(result) for view in views]
    return [
        ("Worst site", [Cell("–") if one is None else _number(one.value, one.client_id) for one in worst]),
        ("Mean", [_number(view.mean[result]) if view.mean else Cell("–") for view in views]),
        ("Pooled", [_number(view.pooled[result]) if view.mean else Cell("–") for view in views]),
    ]


def _row(
    client_id: str,
    views: Sequence[SiteRoundView],
    result: str,
    config: EvaluationConfig,
    seen_at: datetime | None,
) -> SiteRow:
    found = [next((site for site in view.sites if site.client_id == client_id), None) for view in views]
    number, newest = next((view.round_number, site) for view, site in zip(views, found, strict=True) if site)
    words = _words(newest, result, config, seen_at)
    is_older = bool(words) and number != views[0].round_number
    return SiteRow(
        client_id=client_id,
        cells=[_cell(site, result) for site in found],
        words=f"{_when(number)}: {words}" if is_older else words,
    )


def _cell(site: SiteEvaluationView | CrossSiteCell | None, result: str) -> Cell:
    if site is None:
        return Cell("not asked")
    if site.results is not None:
        return _number(site.results[result])
    words = {SiteEvaluationState.OFFERED: "no answer yet", SiteEvaluationState.REFUSED: "declined"}
    return Cell(words.get(site.state, site.state.value))


def _number(value: float | None, site: str = "") -> Cell:
    return Cell("diverged" if value is None else formats.percent(value), value, site)


def _words(site: SiteEvaluationView, result: str, config: EvaluationConfig, seen_at: datetime | None) -> str:
    """Return why a site has no number, or which classes its number leaves out."""
    match site.state:
        case SiteEvaluationState.COMPLETED:
            assert site.results is not None
            if site.results[result] is None:
                return "the encoder's outputs are not all finite numbers, so its training has diverged"
            return "; ".join(filter(None, (_left_out(site, config), site.reason)))
        case SiteEvaluationState.OFFERED:
            if seen_at is not None and database_clock.now() - seen_at <= timedelta(seconds=SEEN_SECONDS):
                return "has not answered yet"
            return "offline: it answers when it is back, and nothing waits for it"
        case SiteEvaluationState.REFUSED:
            return f"declined: {site.reason}"
        case _:
            return f"{site.state}: {site.reason}"


def _left_out(site: SiteEvaluationView, config: EvaluationConfig) -> str:
    names = [name for number, name in enumerate(config.site_config.classes) if number not in (site.classes or ())]
    if not names:
        return ""
    hidden = len(names) - _NAMED_CLASSES
    shown = ", ".join(names[:_NAMED_CLASSES])
    more = f" and {plural(hidden, 'more class', 'more classes')}" if hidden > 0 else ""
    return f"without {shown}{more}: too few images at this site"


def _newest_value(row: SiteRow) -> float:
    return next((cell.value for cell in row.cells if cell.value is not None), 2.0)


def _when(round_number: int) -> str:
    """Return the name of an evaluated round."""
    return f"Round {round_number}" if round_number else "Before training"
