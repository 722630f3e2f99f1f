"""`fedssl run site-evaluations`, `run evaluate --at sites`: an encoder evaluated by the sites of its run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import connect, find_run
from fedssl.cli.errors import NoSuchJob
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table
from fedssl.cli.site_scores import heading, percent
from fedssl.protocol.views import SiteRoundView


def list_site_evaluations(
    run: RunArgument,
    *,
    round_number: Annotated[
        int | None,
        typer.Option(
            "--round", min=0, help="Show this round; 0: before training.  [default: the newest with an answer]"
        ),
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the results of the sites for one round, of the worst site, their mean and the pooled ones.

    Sites that have not answered have no row and are listed below. JSON has all rounds, or the one of --round.
    """
    with connect(url, token_file) as client:
        rounds = list(client.site_evaluations(find_run(client, run)))
    if round_number is not None:
        rounds = [view for view in rounds if view.round_number == round_number]
        if not rounds:
            raise NoSuchJob(f"the sites were not asked about round {round_number}: leave --round out")
    if output is Format.JSON:
        show_json(rounds)
    elif not rounds:
        note('there are none: the sites evaluate if the run\'s spec has evaluation.at = "sites" or "both"')
    else:
        _show(next((view for view in reversed(rounds) if view.mean), rounds[-1]))


def show_cross_site(
    run: RunArgument,
    *,
    round_number: Annotated[
        int | None,
        typer.Option("--round", min=0, help="Show this round; 0: before training.  [default: the newest with some]"),
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the accuracy of each site's own classifier at every other site.

    A row is the site whose classifier is evaluated, a column the site on whose images. JSON has all results. The run's
    spec needs `evaluation.sites.cross_site`, and the policies of both sites must allow it.
    """
    with connect(url, token_file) as client:
        view = client.cross_site(find_run(client, run), round_number)
    if output is Format.JSON:
        show_json(view)
        return
    name = f"{view.measure}/accuracy"
    found = {(cell.head_of, cell.client_id): cell.results for cell in view.cells} | {
        (site, site): results for site, results in view.own.items()
    }
    owners = sorted({cell.head_of for cell in view.cells})
    judges = sorted({cell.client_id for cell in view.cells} | set(owners))
    rows = [[owner, *(percent((found.get((owner, judge)) or {}).get(name)) for judge in judges)] for owner in owners]
    when = f"round {view.round_number}" if view.round_number else "before training"
    show_table([f"{heading(name)}, {when}, of", *(f"#at {judge}" for judge in judges)], rows)
    for cell in view.cells:
        if cell.results is None:
            note(
                f"{cell.client_id} has no result for the classifier of {cell.head_of}: "
                f"{cell.reason or 'it has not answered yet'}"
            )


def request_at_sites(
    run: str, round_number: int | None, url: str | None, token_file: Path | None, output: Format
) -> None:
    """Ask the sites of a run to evaluate a round's encoder, and show the answers so far."""
    with connect(url, token_file) as client:
        view = client.request_site_evaluations(find_run(client, run), round_number)
    if output is Format.JSON:
        show_json(view)
    else:
        _show(view)


def _show(view: SiteRoundView) -> None:
    names = list(view.mean)
    rows: list[list[object]] = [
        [site.client_id, site.num_test, *_percentages(site.results, names)] for site in view.sites if site.results
    ]
    if rows:
        worst = [view.worst[name].value for name in names]
        rows.append(["worst site", None, *(percent(value) for value in worst)])
        rows.append(["mean", None, *_percentages(view.mean, names)])
        rows.append(["pooled", None, *_percentages(view.pooled, names)])
    when = f"after round {view.round_number}" if view.round_number else "before training"
    show_table([when, "#test images", *(f"#{heading(name)}" for name in names)], rows)
    for site in view.sites:
        if site.results is None:
            note(f"{site.client_id} has no result: {site.reason or 'it has not answered yet'}")
        elif site.reason is not None:
            note(f"{site.client_id}: {site.reason}")


def _percentages(results: dict[str, float | None], names: Sequence[str]) -> list[str]:
    return [percent(results[name]) for name in names]
