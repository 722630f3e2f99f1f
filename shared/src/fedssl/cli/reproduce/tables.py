"""The output of `fedssl reproduce`: the tables and their costs, specs, results and the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fedssl.cli.output import Format, cell, note, show_json, show_table
from fedssl.cli.reproduce.steps import Outcome, size_of
from fedssl.experiments import costs
from fedssl.experiments import report as markdown
from fedssl.experiments.papers import TableCell
from fedssl.experiments.reproduction import CellResult, Difference, Task, read_results
from fedssl.experiments.spread import spread
from fedssl.run_files import spec_as_yaml


def show_list(cells: Sequence[TableCell], output: Format, *, every_column: bool) -> None:
    """Show what each run costs: a line per row of a table, or a line per cell if `every_column`."""
    work = [costs.flops(one.spec, one.public_client) or 0.0 for one in cells]
    if output is Format.JSON:
        keys = ("table", "row", "column", "published")
        show_json(
            [
                {**{key: getattr(one, key) for key in keys}, "flops": each, "gpu_seconds": each / costs.GPU_FLOPS}
                for one, each in zip(cells, work, strict=True)
            ]
        )
        return
    groups: dict[tuple[str, str, str], list[int]] = {}
    for at, one in enumerate(cells):
        groups.setdefault((one.table, one.row, one.column if every_column else ""), []).append(at)
    rows = []
    for (table, row, column), members in groups.items():
        names = [cells[at].column for at in members]
        columns = column or (", ".join(names) if len(names) <= 4 else f"{len(names)}, {names[0]} to {names[-1]}")
        most = max(work[at] for at in members)
        rows.append((table, row, columns, f"{most:.1e}", markdown.rounded_time(most / costs.GPU_FLOPS)))
    show_table(["table", "row", "columns", "#FLOPs per run", "#on an H200"], rows)
    typer.echo(
        "Costs are those of the most expensive column, without evaluation. The time is for "
        f"{costs.GPU_FLOPS / 1e12:.0f} TFLOP/s, measured with a ResNet-18 in bf16 and batches of 512: float32 and "
        "smaller batches take longer. --budget measures this machine first."
    )


def show_specs(tasks: Sequence[Task], output: Format) -> None:
    """Show the specs as YAML or JSON."""
    if output is Format.JSON:
        show_json({task.cell.name: task.spec.model_dump(mode="json") for task in tasks})
        return
    for task in tasks:
        typer.echo(f"# {task.cell.name}\n{spec_as_yaml(task.spec)}", nl=False)


def show_plan(outcome: Outcome, output: Format) -> None:
    """Show what would be run: the cells with their sizes, the seeds, and the estimated time."""
    if output is Format.JSON:
        cells = [
            {
                **{key: getattr(task.cell, key) for key in ("table", "row", "column", "published")},
                "differences": _changes(task.differences),
            }
            for task in outcome.tasks
        ]
        show_json({"dry_run": True, "seeds": outcome.seeds, "seconds": outcome.seconds, "cells": cells})
        return
    show_table(["cell", "size"], [(task.cell.name, size_of(task.spec)) for task in outcome.tasks])
    note(f"dry run: nothing was started; seeds {', '.join(map(str, outcome.seeds))}")


def show_results(results: Sequence[CellResult], output: Format) -> None:
    """Show published and measured numbers, and the settings that differ from the paper's."""
    if output is Format.JSON:
        show_json([_document(result) for result in results])
        return
    rows: list[Sequence[Any]] = []
    for result in results:
        for name, published in result.published.items():
            found = spread(result.measured[name])
            place = (result.table, result.row, result.column)
            numbers = (markdown.printed(published), markdown.shown(found), markdown.difference(published, found))
            rows.append((*place, name, *numbers, cell(len(result.seeds))))
    show_table(["table", "row", "column", "measure", "#published", "#measured", "#difference", "#seeds"], rows)
    for result in results:
        typer.echo(f"{result.table}:{result.row}@{result.column}, settings that differ from the paper's:")
        for each in result.differences:
            typer.echo(f"  {each.key}: {markdown.value(each.paper)} -> {markdown.value(each.here)}")
        if not result.differences:
            typer.echo("  none")
        for text in result.notes:
            typer.echo(f"  note: {text}")
        if (budget := result.budget) is not None:
            measured = f"after measuring for {budget['measuring']:.0f} s"
            typer.echo(f"  scaled to a budget of {budget['budget']:.0f} s, {measured}: training took")
            typer.echo(f"  {budget['training']:.2f} times the first estimate, evaluation {budget['judging']:.2f} times")


def show_report(folder: Path, output: Format) -> None:
    """Show all results in the folder as Markdown or JSON."""
    results = read_results(folder)
    if output is Format.JSON:
        show_json([_document(result) for result in results])
        return
    typer.echo(markdown.render(results), nl=False)


def _document(result: CellResult) -> dict[str, Any]:
    document = {name: getattr(result, name) for name in type(result).__slots__}
    return {**document, "differences": _changes(result.differences)}


def _changes(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    return [{"key": each.key, "paper": each.paper, "here": each.here} for each in differences]
