"""The results of evaluations at the sites (each, the worst, the mean, the pooled one), as a table or as JSON."""

import math
from collections.abc import Mapping

from fedssl.cli.output import note, show_table
from fedssl.evaluation.site_results import METRICS, SiteSummary, site_results, summarise_sites
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.site_evaluation import SiteCounts

Answers = Mapping[str, SiteCounts | str]
"""Each site's counts, or the reason why it has none."""


def summary_of(answers: Answers, config: EvaluationConfig) -> SiteSummary:
    """Return the results of the sites that have counts."""
    counts = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
    return summarise_sites(counts, config.site_config, config.site_measures)


def show_sites(answers: Answers, config: EvaluationConfig) -> None:
    """Print the last round's results, in percent."""
    summary = summary_of(answers, config)
    names = [f"{measure}/{metric}" for measure in config.site_measures for metric in METRICS]
    rows = [[site, *(percent(results[name]) for name in names)] for site, results in summary.by_site.items()]
    if summary.by_site:
        rows.append(["worst site", *(percent(summary.worst[name].value) for name in names)])
        rows.append(["mean", *(percent(summary.mean[name]) for name in names)])
        rows.append(["pooled", *(percent(summary.pooled[name]) for name in names)])
    show_table(["after the last round", *(f"#{heading(name)}" for name in names)], rows)
    for site, answer in sorted(answers.items()):
        if isinstance(answer, str):
            note(f"{site} has no result: {answer}")


def sites_as_json(answers: Answers, config: EvaluationConfig) -> dict[str, object]:
    """Return one round's results; a number that is not defined is NaN."""
    summary = summary_of(answers, config)
    return {
        "sites": summary.by_site,
        "worst": {name: {"client": each.client_id, "value": each.value} for name, each in summary.worst.items()},
        "mean": summary.mean,
        "pooled": summary.pooled,
        "without_result": {site: answer for site, answer in answers.items() if isinstance(answer, str)},
    }


def show_cross_site(heads: Mapping[str, Answers], own: Answers, config: EvaluationConfig) -> None:
    """Print the accuracies of each site's classifier at every site, in percent.

    Args:
        heads: by the site that a classifier is from, the counts of the other sites.
        own: the sites' evaluations of their own classifiers, for the diagonal.
    """
    assert config.site_config.cross_site is not None, "no other spec has such counts"
    name = f"{config.site_config.cross_site}/accuracy"
    judges = sorted({judge for sites in heads.values() for judge in sites} | heads.keys())
    rows = []
    for owner, answers in sorted(heads.items()):
        results = summary_of({**answers, owner: own.get(owner, "")}, config).by_site
        rows.append([owner, *(percent(results.get(judge, {}).get(name)) for judge in judges)])
    show_table([f"{heading(name)} of", *(f"#at {judge}" for judge in judges)], rows)
    for owner, answers in sorted(heads.items()):
        for judge, answer in sorted(answers.items()):
            if isinstance(answer, str):
                note(f"{judge} has no result for the classifier of {owner}: {answer}")


def cross_site_as_json(heads: Mapping[str, Answers], config: EvaluationConfig) -> dict[str, object]:
    """Return one round's results by the site that a classifier is from, and by the site that has evaluated it."""
    assert config.site_config.cross_site is not None, "no other spec has such counts"
    measures = [config.site_config.cross_site]
    return {
        owner: {
            judge: answer if isinstance(answer, str) else site_results(answer, config.site_config, measures)
            for judge, answer in answers.items()
        }
        for owner, answers in heads.items()
    }


def heading(name: str) -> str:
    """Return the heading of a result's column, such as `probe macro f1`."""
    return name.replace("_", " ").replace("/", " ")


def percent(value: float | None) -> str:
    """Return a share, 0..1, in percent, or a dash if it is not defined."""
    return f"{100 * value:.2f} %" if value is not None and math.isfinite(value) else "-"
