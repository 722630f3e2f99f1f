"""`fedssl simulate`: the whole federation on this machine, without services."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedssl import run_files as files
from fedssl.cli.accuracies import ACCURACIES
from fedssl.cli.arguments import DataFolderOption, DeviceOption, JobsOption, SetOption, SpecArgument, ThreadsOption
from fedssl.cli.datasets.fetching import data_folder as default_folder
from fedssl.cli.destinations import require_folder
from fedssl.cli.dry_run import DryRunOption, Participant, document_of, show_dry_run
from fedssl.cli.machine import (
    datasets_of,
    prepare,
    require_evaluation_images,
    require_machine,
    show_start,
    would_be_downloaded,
)
from fedssl.cli.output import Format, FormatOption, duration, note, show_json, show_pairs, size
from fedssl.cli.scores import baselines_as_json, show_scores
from fedssl.cli.site_scores import cross_site_as_json, show_cross_site, show_sites, sites_as_json
from fedssl.cli.specs import read_spec, require_partition
from fedssl.errors import Paused
from fedssl.packages import is_installed
from fedssl.protocol.runs import RunSpec

if TYPE_CHECKING:
    from fedssl.experiments.runs import FinishedRun
    from fedssl.protocol.data import PartitionConfig


def simulate(
    spec: SpecArgument,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.  [default: ./simulated-NAME]")
    ] = None,
    device: DeviceOption = "cpu",
    jobs: JobsOption = "1",
    threads: ThreadsOption = 1,
    data_folder: DataFolderOption = None,
    *,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start from scratch, and delete any run that the folder holds.")
    ] = False,
    keep_clients: Annotated[
        bool,
        typer.Option(
            "--keep-clients", help="Also keep the model that each client of the last round trained, in DIR/clients."
        ),
    ] = False,
    dry_run: DryRunOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Train a spec on this machine, on the images of its [partition]. The result is that of a deployed federation.

    Example: `fedssl simulate examples/demo.toml --set num_rounds=3`

    A checkpoint is written after every round. If the command is interrupted, even by kill -9, run it again: it resumes
    and ends with the same bits. If the spec has an [evaluation], the encoder is evaluated before training, as often as
    the spec asks, and at the end; with `evaluation.at = "sites"` or "both" also by each client, on its own images.

    Writes model.safetensors, initial.safetensors, encoder.safetensors, history.json, result.json and spec.yaml; with
    --keep-clients also clients/CLIENT.safetensors.
    """
    wanted = read_spec(spec, set_)
    config = require_partition(wanted, spec)
    show_start(wanted)
    folder = out or Path(f"simulated-{wanted.name.replace(' ', '-')}")
    require_folder("--out", folder)
    if dry_run:
        require_machine(device, jobs)
        _require_possible(wanted, folder, restart=restart, keep_clients=keep_clients)
        require_evaluation_images(wanted.central_evaluation, data_folder)
        missing = would_be_downloaded(datasets_of(wanted), data_folder)
        clients = _participants(config, data_folder, is_missing=config.dataset in missing)
        show_dry_run(document_of(wanted, clients), output)
        return
    machine = prepare(device, threads, data_folder, datasets_of(wanted), jobs)
    from fedssl.cli.simulation_progress import simulation_progress
    from fedssl.experiments import runs

    if restart:
        runs.clear(folder)
    was_finished = runs.find_finished(wanted, folder) is not None
    try:
        with simulation_progress(wanted) as calls:
            finished = runs.run_in_folder(wanted, folder, machine=machine, calls=calls, keep_clients=keep_clients)
    except KeyboardInterrupt:
        note("interrupted: run the same command again to resume after the last completed round")
        raise
    except Paused:
        note("to continue after this round, add `--set watch.action=warn` to the command, or change the threshold")
        raise
    if was_finished:
        note(f"{folder} holds this run, finished: nothing to do (--restart runs it again)")
    _show(finished, wanted, folder, output)


def _require_possible(spec: RunSpec, folder: Path, *, restart: bool, keep_clients: bool) -> None:
    """Raise what the run would raise at its start, as far as that is known without torch."""
    if not is_installed("torch"):
        return
    from fedssl.experiments import runs

    if keep_clients:
        runs.require_weights(spec)
    if not restart:
        runs.require_own(spec, folder)


def _participants(config: "PartitionConfig", root: Path | None, *, is_missing: bool) -> list[Participant]:
    """Return the clients of a partition with their numbers of images. Reads the labels only.

    If the data set `is_missing` and its labels determine these numbers, they are unknown.
    """
    from fedssl.data import KNOWN
    from fedssl.data.partitioning import assign_images, client_names, needs_labels, partition_plan

    if is_missing and needs_labels(config):
        return [Participant(name) for name in client_names(1 if config.pooled else config.num_clients)]
    if is_missing:
        num_images = KNOWN[config.dataset].num_train
        held = assign_images(config, None, num_images=num_images, root=default_folder()).by_client
    else:
        held = partition_plan(config, root or default_folder()).by_client
    return [Participant(name, len(part), "" if len(part) else "has no images") for name, part in held.items()]


def _show(finished: "FinishedRun", spec: RunSpec, folder: Path, output: Format) -> None:
    names = {"model": files.MODEL, "encoder": files.ENCODER, "history": files.HISTORY, "spec": files.SPEC}
    if (folder / files.CLIENTS).is_dir():
        names["clients"] = files.CLIENTS
    paths = {what: str(folder / name) for what, name in names.items()}
    best = {name: finished.best(name) for name in ACCURACIES if name in finished.last}
    if output is Format.TABLE:
        show_pairs({**paths, **_pairs(finished)})
        if finished.evaluations or not spec.site_evaluation:
            title, initial = "after the last round", spec.model.initial
            show_scores(title, finished.last, finished.untrained, finished.chance, best=best, initial=initial)
        if spec.site_evaluation and finished.site_evaluations:
            last = finished.site_evaluations[max(finished.site_evaluations)]
            show_sites(last, spec.site_evaluation)
        if spec.site_evaluation and finished.cross_site:
            at = max(finished.cross_site)
            show_cross_site(finished.cross_site[at], finished.site_evaluations[at], spec.site_evaluation)
        return
    document = {
        "rounds": finished.num_rounds,
        "losses": finished.losses,
        "last": finished.last,
        "best": {name: {"round": found[0], "value": found[1]} for name, found in best.items() if found},
        "best_chosen_on": "test",
        "baselines": baselines_as_json(finished.untrained, finished.chance),
        "evaluations": finished.evaluations,
        **{name: getattr(finished, name) for name in ("bytes_down", "bytes_up", "num_images", "seconds")},
        "files": paths,
    }
    if config := spec.site_evaluation:
        document["site_evaluations"] = {
            str(at): sites_as_json(answers, config) for at, answers in finished.site_evaluations.items()
        }
        document["cross_site"] = {
            str(at): cross_site_as_json(heads, config) for at, heads in finished.cross_site.items()
        }
    show_json(document)


def _pairs(finished: "FinishedRun") -> dict[str, object]:
    last = finished.losses[-1] if finished.losses else None
    pairs: dict[str, object] = {"rounds": finished.num_rounds, "last loss": None if last is None else f"{last:.4f}"}
    for name in ("uniformity", "effective_rank"):
        if name in finished.last:
            pairs[name.replace("_", " ")] = f"{finished.last[name]:.4g}"
    return {
        **pairs,
        "images trained on": finished.num_images,
        "sent by clients": size(finished.bytes_up),
        "received by clients": size(finished.bytes_down),
        "time": duration(finished.seconds),
    }
