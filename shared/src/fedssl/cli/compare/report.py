"""What `fedssl compare` writes and shows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from fedssl.cli.compare.arguments import ResultFormat
from fedssl.cli.output import duration, show_json, show_pairs, show_table
from fedssl.experiments.comparison import ComparisonEntry, Failure, Outcome
from fedssl.experiments.files import finite, write_json, write_text
from fedssl.experiments.plots import plot_comparison
from fedssl.experiments.summary import Line, Spread, to_csv, to_document

DOCUMENT, TABLE, PICTURE = "comparison.json", "comparison.csv", "comparison.png"

Settings = Mapping[str, Mapping[str, Any]]


def write(
    folder: Path,
    lines: Sequence[Line],
    entries: Sequence[ComparisonEntry],
    outcomes: Mapping[tuple[str, int], Outcome],
    settings: Settings,
) -> None:
    """Write the comparison as JSON, as CSV and as a picture. `settings` are those that differ between the methods."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DOCUMENT, to_document(lines, entries, settings))
    write_text(folder / TABLE, to_csv(lines))
    kept = {key: outcome for key, outcome in outcomes.items() if not isinstance(outcome, Failure)}
    finished = {line.variant: [kept[line.variant, seed] for seed in line.seeds] for line in lines}
    evaluated = [run for runs in finished.values() for run in runs if run.evaluations]
    if evaluated:
        plot_comparison(folder / PICTURE, finished, "probe" if "probe" in evaluated[0].last else "knn")


def show(
    folder: Path, lines: Sequence[Line], entries: Sequence[ComparisonEntry], settings: Settings, output: ResultFormat
) -> None:
    """Show the comparison."""
    if output is ResultFormat.JSON:
        show_json(finite(to_document(lines, entries, settings)))
        return
    if output is ResultFormat.CSV:
        typer.echo(to_csv(lines), nl=False)
        return
    _show_tables(lines)
    for line in lines:
        for reason in dict.fromkeys(line.failures.values()):
            failed = [str(seed) for seed, why in line.failures.items() if why == reason]
            typer.echo(f"{line.variant} failed (seed {', '.join(failed)}): {reason}")
    for variant, changed in settings.items():
        typer.echo(f"{variant} has settings of its own: {', '.join(f'{k}={v}' for k, v in changed.items())}")
    show_pairs({"results": str(folder / DOCUMENT), "table": str(folder / TABLE), "picture": str(folder / PICTURE)})


def _show_tables(lines: Sequence[Line]) -> None:
    quality: dict[str, Callable[[float], str]] = {
        **dict.fromkeys(("probe_last", "probe_best", "knn_last", "knn_best"), lambda value: f"{100 * value:.2f}"),
        "uniformity": lambda value: f"{value:.3f}",
        "effective_rank": lambda value: f"{value:.1f}",
    }
    typer.echo(
        "Quality: mean ± standard deviation over seeds, accuracies in %; best rounds are chosen on the test set."
    )
    show_table(
        ["method", "#probe, last", "#best", "#kNN, last", "#best", "#uniformity", "#effective rank", "#seeds"],
        [
            [
                line.variant,
                *(_mean_and_deviation(line.spread(column), formatted) for column, formatted in quality.items()),
                f"{len(line.seeds)} of {len(line.seeds) + len(line.failures)}",
            ]
            for line in lines
        ],
    )
    cost: dict[str, Callable[[float], str]] = {
        **dict.fromkeys(("megabytes_up", "megabytes_down"), lambda value: f"{value:,.1f}"),
        "num_images": lambda value: f"{value:,.0f}",
        "seconds": duration,
        "points_per_gigabyte": lambda value: f"{value:,.1f}",
    }
    typer.echo("Cost: mean over seeds, summed over all clients and rounds.")
    show_table(
        ["method", "#MB up", "#MB down", "#images", "#time", "#probe % per GB"],
        [
            [
                line.variant,
                *(
                    "-" if not (found := line.spread(column)) else formatted(found.mean)
                    for column, formatted in cost.items()
                ),
            ]
            for line in lines
        ],
    )


def _mean_and_deviation(found: Spread | None, formatted: Callable[[float], str]) -> str:
    if found is None:
        return "-"
    if found.deviation is None:
        return formatted(found.mean)
    return f"{formatted(found.mean)} ± {formatted(found.deviation)}"
