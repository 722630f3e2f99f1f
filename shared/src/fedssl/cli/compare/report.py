"""The files and the output of `fedssl compare`."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fedssl.cli.compare.arguments import ResultFormat
from fedssl.cli.dry_run import traffic_of
from fedssl.cli.output import duration, note, show_json, show_pairs, show_table, size
from fedssl.experiments.comparison import ComparisonEntry, Failure, Outcome
from fedssl.experiments.gaps import CONFIDENCE, Interval, gaps
from fedssl.experiments.plots import plot_comparison
from fedssl.experiments.spread import QUALITY, Spread, in_percent, mean_and_deviation
from fedssl.experiments.summary import ACCURACIES, CHANCE, GEOMETRY, TRAFFIC, Line, to_csv, to_document
from fedssl.experiments.variants import CENTRALISED, LOCAL_ONLY, has_traffic
from fedssl.run_files import write_json, write_text

UNTRAINED = "untrained"
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
    write_json(folder / DOCUMENT, _document(lines, entries, settings))
    write_text(folder / TABLE, to_csv(lines))
    kept = {key: outcome for key, outcome in outcomes.items() if not isinstance(outcome, Failure)}
    finished = {line.variant: [kept[line.variant, seed] for seed in line.seeds] for line in lines}
    evaluated = [run for runs in finished.values() for run in runs if run.evaluations]
    if evaluated:
        plot_comparison(folder / PICTURE, finished, "probe" if "probe" in evaluated[0].last else "knn")


def _document(lines: Sequence[Line], entries: Sequence[ComparisonEntry], settings: Settings) -> dict[str, Any]:
    return {**to_document(lines, entries, settings), "gaps": [asdict(gap) for gap in gaps(lines)]}


def show(
    folder: Path, lines: Sequence[Line], entries: Sequence[ComparisonEntry], settings: Settings, output: ResultFormat
) -> None:
    """Show the comparison."""
    if output is ResultFormat.JSON:
        show_json(_document(lines, entries, settings))
        return
    if output is ResultFormat.CSV:
        typer.echo(to_csv(lines), nl=False)
        return
    if any(line.seeds for line in lines):
        _show_tables(lines)
        _show_gaps(lines)
    for line in lines:
        for reason in dict.fromkeys(line.failures.values()):
            failed = [str(seed) for seed, why in line.failures.items() if why == reason]
            typer.echo(f"{line.variant} failed (seed {', '.join(failed)}): {reason}")
    for variant, changed in settings.items():
        typer.echo(f"{variant} has settings of its own: {', '.join(f'{k}={v}' for k, v in changed.items())}")
    files = {"results": DOCUMENT, "table": TABLE, "picture": PICTURE}
    show_pairs({what: str(folder / name) for what, name in files.items() if (folder / name).exists()})


def show_plan(entries: Sequence[ComparisonEntry], output: ResultFormat) -> None:
    """Show the runs that would be made, with the bytes per client and round."""
    rows: list[dict[str, Any]] = []
    for entry in entries:
        traffic = traffic_of(entry.spec) if entry.spec is not None and has_traffic(entry.variant) else None
        rows.append(
            {
                "variant": entry.variant,
                "seed": entry.seed,
                "rounds": None if entry.spec is None else entry.spec.num_rounds,
                "clients": _num_clients(entry),
                "bytes_down_per_client_and_round": None if traffic is None else traffic.down,
                "bytes_up_per_client_and_round": None if traffic is None else traffic.up,
                "problem": entry.problem,
            }
        )
    if output is ResultFormat.JSON:
        show_json({"dry_run": True, "runs": rows})
        return
    if output is ResultFormat.CSV:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        typer.echo(text.getvalue(), nl=False)
        return
    shown = [
        [row["variant"], row["seed"], row["rounds"], row["clients"], *map(_size, _bytes(row)), row["problem"]]
        for row in rows
    ]
    columns = ["method", "#seed", "#rounds", "#clients", "#sent per client and round", "#received", "not possible"]
    show_table(columns, shown)
    note("dry run: nothing was started")


def _bytes(row: Mapping[str, Any]) -> list[int | None]:
    return [row[f"bytes_{way}_per_client_and_round"] for way in ("up", "down")]


def _size(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else size(num_bytes)


def _num_clients(entry: ComparisonEntry) -> int | None:
    if entry.spec is None or entry.spec.partition is None:
        return None
    return 1 if entry.spec.partition.pooled else entry.spec.partition.num_clients


def _show_tables(lines: Sequence[Line]) -> None:
    accuracies = {f"{name}_{which}": QUALITY[name] for name in ACCURACIES for which in ("last", "best")}
    quality = {**accuracies, **{name: QUALITY[name] for name in GEOMETRY}}
    typer.echo(
        "Quality: mean ± standard deviation over seeds, accuracies in %; best rounds are chosen on the test set."
    )
    show_table(
        ["method", "#probe, last", "#best", "#kNN, last", "#best", "#uniformity", "#effective rank", "#seeds"],
        [
            [
                line.variant,
                *(mean_and_deviation(line.spread(column), formatted) for column, formatted in quality.items()),
                f"{len(line.seeds)} of {len(line.seeds) + len(line.failures)}",
            ]
            for line in lines
        ]
        + _baselines(lines),
    )
    typer.echo("untrained: the encoder before the first round; chance: the share of the largest class of the test set")
    cost: dict[str, Callable[[float], str]] = {
        **dict.fromkeys(TRAFFIC, lambda value: size(1e6 * value)),
        "num_images": lambda value: f"{value:,.0f}",
        "seconds": duration,
    }
    typer.echo("Cost: mean over seeds, summed over all clients and rounds.")
    show_table(
        ["method", "#sent by clients", "#received", "#images", "#time"],
        [
            [
                line.variant,
                *(
                    formatted(found.mean) if (found := line.spread(column)) else "-"
                    for column, formatted in cost.items()
                ),
            ]
            for line in lines
        ],
    )


def _show_gaps(lines: Sequence[Line]) -> None:
    """Show the share of the gap between both baselines that each method closes, if both were trained."""
    found = gaps(lines)
    if not {LOCAL_ONLY, CENTRALISED} <= {line.variant for line in lines if line.seeds}:
        return
    typer.echo(
        f"Gap between {LOCAL_ONLY} and {CENTRALISED}: mean ± half of the {CONFIDENCE:.0%} confidence interval over "
        "seeds (Student's), in points and %; step: the difference to the line above, at the same seeds. There is no "
        f"share unless {CENTRALISED} is the better one at each seed."
    )
    show_table(
        ["method", "measure", "#accuracy", "#step", "#share of the gap closed"],
        [
            [gap.variant, gap.measure, *(_interval(each) for each in (gap.accuracy, gap.step, gap.share))]
            for gap in found
        ],
    )


def _interval(found: Interval | None) -> str:
    if found is None:
        return "-"
    return mean_and_deviation(Spread(found.mean, found.half_width), in_percent)


def _baselines(lines: Sequence[Line]) -> list[list[str]]:
    """Return the rows below the methods: the encoders before training, which most methods share, and chance."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        found = tuple(mean_and_deviation(line.spread(f"{name}_untrained"), in_percent) for name in ACCURACIES)
        if found != ("-", "-"):
            groups.setdefault(found, []).append(line.variant)
    rows = []
    for (probe, knn), variants in groups.items():
        name = UNTRAINED if len(groups) == 1 else f"{UNTRAINED} ({', '.join(variants)})"
        rows.append([name, probe, "-", knn, "-", "-", "-", ""])
    if chances := [chance for line in lines if (chance := line.spread(CHANCE))]:
        shown = in_percent(chances[0].mean)
        rows.append([CHANCE, shown, "-", shown, "-", "-", "-", ""])
    return rows
