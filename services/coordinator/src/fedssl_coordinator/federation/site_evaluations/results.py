"""The results of a round at all sites, from the counts that they have sent."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.evaluation.site_results import SiteSummary, site_results, summarise_sites
from fedssl.protocol.evaluation import SiteMeasure
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts
from fedssl.protocol.views import (
    CrossSiteCell,
    CrossSiteView,
    Results,
    SiteEvaluationView,
    SiteRoundView,
    WorstSiteView,
)
from fedssl.run_files import finite
from fedssl_coordinator.core.models import Json, SiteEvaluation
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.site_evaluations import repository


def rounds(session: Session, run_id: UUID, limit: int, after: int | None) -> list[SiteRoundView]:
    """Return the evaluated rounds of a run. Raises ProblemError if there is no such run."""
    run = run_rows.require(session, run_id)
    spec = spec_of(run)
    numbers = repository.rounds(session, run_id, limit, after)
    return [view(spec, repository.of_round(session, run_id, number)) for number in numbers]


def of_round(session: Session, run_id: UUID, round_number: int) -> SiteRoundView:
    """Return one round that sites were asked about."""
    spec = spec_of(run_rows.get_one(session, run_id))
    return view(spec, repository.of_round(session, run_id, round_number))


def view(spec: RunSpec, rows: Sequence[SiteEvaluation], measures: Sequence[SiteMeasure] | None = None) -> SiteRoundView:
    """Return one round's evaluations with their results: those of some measures, or of all that the spec names."""
    counts = {row.client_id: SiteCounts.model_validate(row.counts) for row in rows if row.counts is not None}
    config = spec.site_evaluation
    assert config is not None, "only such runs have evaluations at the sites"
    summary = summarise_sites(counts, config.site_config, config.site_measures if measures is None else measures)
    return SiteRoundView(
        run_id=rows[0].run_id,
        round_number=rows[0].round_number,
        model=rows[0].model,
        sites=tuple(_site(row, counts.get(row.client_id), summary) for row in rows),
        mean=finite(summary.mean),
        pooled=finite(summary.pooled),
        worst={
            name: WorstSiteView(client_id=each.client_id, value=finite(each.value))
            for name, each in summary.worst.items()
        },
    )


def cross_site(session: Session, run_id: UUID, round_number: int | None) -> CrossSiteView:
    """Return the sites' classifiers of a round, by default of the newest that has some, at every other site.

    Raises ProblemError if there is no such run, or if it has no such round.
    """
    spec = spec_of(run_rows.require(session, run_id))
    config = None if spec.site_evaluation is None else spec.site_evaluation.sites
    number = repository.newest_cross_site(session, run_id) if round_number is None else round_number
    rows = [] if number is None else repository.cross_site(session, run_id, number)
    if config is None or config.cross_site is None or number is None or not rows:
        detail = (
            f"run {run_id} has no classifiers of sites{'' if round_number is None else f' of round {round_number}'}: "
            "they need evaluation.sites.cross_site in the spec, and two sites that have answered"
        )
        raise ProblemError("not-found", detail)
    measures = [config.cross_site]

    def results(counts: Json | None) -> Results | None:
        if counts is None:
            return None
        return dict(finite(site_results(SiteCounts.model_validate(counts), config, measures)))

    own = {row.client_id: results(row.counts) for row in repository.of_round(session, run_id, number)}
    return CrossSiteView(
        run_id=run_id,
        round_number=number,
        measure=config.cross_site,
        own={name: found for name, found in own.items() if found is not None},
        cells=tuple(
            CrossSiteCell(
                head_of=str(row.head_of),
                client_id=row.client_id,
                state=row.state,
                reason=row.reason,
                num_test=None if row.counts is None else row.counts["num_test"],
                results=results(row.counts),
            )
            for row in rows
        ),
    )


def _site(row: SiteEvaluation, counts: SiteCounts | None, summary: SiteSummary) -> SiteEvaluationView:
    return SiteEvaluationView(
        id=row.id,
        client_id=row.client_id,
        state=row.state,
        reason=row.reason,
        classes=None if counts is None else counts.classes,
        num_train=None if counts is None else counts.num_train,
        num_test=None if counts is None else counts.num_test,
        results=None if counts is None else finite(summary.by_site[row.client_id]),
        created_at=row.created_at,
        ended_at=row.ended_at,
    )
