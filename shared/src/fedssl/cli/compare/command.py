"""`fedssl compare`: several methods on the same clients and budget, over several seeds."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import DataFolderOption, DeviceOption, read_seeds
from fedssl.cli.compare.arguments import ResultFormat, read_rungs, read_variants
from fedssl.cli.destinations import require_folder
from fedssl.cli.dry_run import DryRunOption
from fedssl.cli.errors import UsageError
from fedssl.cli.machine import datasets_of, prepare, require_evaluation_images, require_machine, would_be_downloaded
from fedssl.cli.output import note
from fedssl.experiments.variants import baselines_of
from fedssl.run_files import RESULT


def compare(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="[SPEC]", help="A run spec: a .toml, .yaml or .json file, or - for standard input."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Methods by name; `fedmoco+fedx` is a method with an add-on.  [default: the spec's method]",
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=METHOD[:KEY=VALUE,...]",
            help="A method with other parameters, under a name of its own: `soft=ssd:dsr.alpha=5`. Repeat the option "
            "for more variants.",
        ),
    ] = None,
    ladder: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="In place of SPEC and methods: a ladder of fedssl, in which methods add one change after the other, "
            "with its baselines and seeds. `best` has the candidates for a recipe.",
        ),
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="SETTING", help="The ladder's setting.  [default: its first one]")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="S,...", help="Seeds of the runs and of their partitions.  [default: 0, or the ladder's]"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[METHOD:]KEY=VALUE",
            help="Change a key of the spec, for all methods or for one method or variant: "
            "`--set fedx:training.batch_size=64`. Repeat the option to change several keys.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.  [default: ./compared-NAME]")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of runs at the same time, each in a process with one CPU thread.")
    ] = 1,
    device: DeviceOption = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads per run, if --jobs is 1.")] = 1,
    data_folder: DataFolderOption = None,
    *,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Also train the first method without a federation: `local-only` (each client by itself; the mean of "
            "their encoders) and `centralised` (all images in one place).",
        ),
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start from scratch, and delete the runs that the folder holds.")
    ] = False,
    dry_run: DryRunOption = False,
    output: Annotated[
        ResultFormat, typer.Option("--format", help="`json` and `csv` go to standard output, and nothing else there.")
    ] = ResultFormat.TABLE,
) -> None:
    """Train several methods on the same clients with the same budget, over several seeds, and compare them.

    Example: `fedssl compare examples/demo.toml --methods fedbyol,fedu,fedsimclr --seeds 0,1,2`

    The table shows the encoder before training and chance below the methods; --baselines adds the same method without a
    federation: local-only, which a federation must beat, and centralised, which it cannot be expected to exceed.

    Every method gets the rounds, epochs, batches, model and images of the spec. For each seed, all methods get the same
    partition. In a KEY, the name of an add-on is followed by its parameter (`dsr.alpha`), and the name of a section of
    the spec by its key (`training.batch_size`); any other key is a parameter of the method (`temperature`).

    If the command is interrupted, run it again: it keeps finished runs, and resumes an unfinished one after its last
    completed round. You can add methods or seeds later. If a run fails, its reason is shown and the others continue.

    `fedssl compare --ladder best --on cifar10-class` compares the candidates for a recipe, and shows how much of the
    gap between local-only and centralised each of them closes.

    Writes a folder per run, comparison.json, comparison.csv and comparison.png.
    """
    if ladder is not None:
        if spec is not None or methods is not None or baselines:
            raise UsageError("--ladder brings a spec, methods and baselines: leave out SPEC, --methods and --baselines")
        base, variants, default_seeds = read_rungs(ladder, on, variant or [], set_ or [], data_folder)
    elif spec is None or on is not None:
        raise UsageError("give a SPEC to compare methods on, or --ladder NAME with or without --on SETTING")
    else:
        base, variants = read_variants(spec, methods, variant or [], set_ or [])
        default_seeds = "0"
    if baselines:
        variants += baselines_of(variants[0])
    folder = out or Path(f"compared-{str(base.get('name', 'unnamed')).replace(' ', '-')}")
    from fedssl.cli.compare import report
    from fedssl.cli.compare.progress import comparison_progress
    from fedssl.experiments import comparison, runs, summary

    entries = comparison.plan(base, variants, read_seeds(default_seeds if seeds is None else seeds), folder)
    require_folder("--out", folder)
    for entry in entries:
        if entry.spec is not None and (restart or not (entry.folder / RESULT).exists()):
            require_evaluation_images(entry.spec.central_evaluation, data_folder)
    if not restart:
        comparison.require_own(entries)
    datasets = {name for entry in entries if entry.spec is not None for name in datasets_of(entry.spec)}
    if dry_run:
        require_machine(device)
        would_be_downloaded(datasets, data_folder)
        report.show_plan(entries, output)
        return
    machine = prepare(device, threads, data_folder, datasets)
    with runs.locked_folder(folder):  # a second command would write its own table over this one's
        if restart:
            for entry in entries:
                runs.clear(entry.folder)
        try:
            with comparison_progress(entries) as watcher:
                outcomes = comparison.run_all(entries, machine=machine, jobs=jobs, watcher=watcher)
        except KeyboardInterrupt:
            note("interrupted: run the same command again to keep what is finished and continue with the rest")
            raise
        lines = summary.summarise(entries, outcomes)
        settings = comparison.settings_apart(entries)
        report.write(folder, lines, entries, outcomes, settings)
    report.show(folder, lines, entries, settings, output)
    if not any(line.seeds for line in lines):
        raise typer.Exit(1)
