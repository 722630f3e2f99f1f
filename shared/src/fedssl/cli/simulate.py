"""`fedssl simulate`: the whole federation in this process, without services."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, console, duration, note, show_json, show_pairs
from fedssl.cli.specs import SetOption, SpecArgument, read_spec
from fedssl.errors import Paused

if TYPE_CHECKING:
    from fedssl.engine import LocalProgress
    from fedssl.experiments.runs import Calls, FinishedRun, Machine
    from fedssl.protocol.runs import RunSpec
    from fedssl.simulation import RoundRecord

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[int, typer.Option(min=1, help="CPU threads; 1 gives a deployed federation's very bits.")]
DataFolderOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of data sets, looked through before FEDSSL_DATA and the user's cache."),
]

# Which of a run's numbers are the accuracies, and what people call them.
ACCURACIES = {"probe": "linear probe", "knn": "kNN"}


def simulate(
    spec: SpecArgument,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.  [default: ./simulated-NAME]")
    ] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    data_folder: DataFolderOption = None,
    *,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, whatever the folder holds of this or another run.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Train a spec in this process, on the images of its [partition]; no servers, the same result as deployed.

    A checkpoint follows every round: interrupted, even by kill -9, the same command goes on where it was, to the same
    bits. Where the spec has an [evaluation], the encoder is judged before training, as often as it says and at the end.

    Writes model.safetensors, initial.safetensors, encoder.safetensors, history.json, result.json and spec.yaml.
    """
    wanted = read_spec(spec, set_)
    if wanted.partition is None:
        raise UsageError(f"{spec} has no [partition], which says whose images to train on: see examples/demo.toml")
    folder = out or Path(f"simulated-{wanted.name.replace(' ', '-')}")
    machine = prepare(device, threads, data_folder, datasets_of(wanted))
    from fedssl.experiments import runs

    if restart:
        runs.clear(folder)
    elif runs.find_finished(wanted, folder) is not None:
        note(f"{folder} holds this very run, finished: nothing is left to do (--restart begins anew)")
    try:
        with display(wanted) as calls:
            finished = runs.run_in_folder(wanted, folder, machine=machine, calls=calls)
    except KeyboardInterrupt:
        note("interrupted: the same command goes on after the last round that was finished")
        raise
    except Paused:
        note("the same command goes on after this round with `--set watch.action=warn`, or with another threshold")
        raise
    _show(finished, folder, output)


def datasets_of(spec: "RunSpec") -> set[str]:
    """The names of the data sets that a simulation reads."""
    found = {spec.partition and spec.partition.dataset, spec.evaluation and spec.evaluation.dataset}
    return {name for name in found if name}


def prepare(device: str, threads: int, data_folder: Path | None, datasets: set[str]) -> "Machine":
    """Fetch what can be fetched, and make torch ready. Raises UsageError where the device cannot be used."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)  # before torch is imported
    from fedssl.cli.datasets import commands as places

    for name in sorted(datasets) if data_folder is None else ():
        places.ensure(name, note)
    import torch

    from fedssl.experiments.runs import Machine

    torch.set_num_threads(threads)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from None
    return Machine(device=device, data_root=data_folder or places.data_folder())


def measured(values: dict[str, float]) -> str:
    """The accuracies among some measures, in a few words.

    >>> measured({"probe": 0.8132, "uniformity": 3.1})
    'linear probe 81.32 %'
    """
    return ", ".join(f"{text} {100 * values[name]:.2f} %" for name, text in ACCURACIES.items() if name in values)


class _Display(Protocol):
    def on_round(self, record: "RoundRecord") -> None: ...
    def on_progress(self, number: int, client: str, progress: "LocalProgress") -> None: ...
    def on_step(self, number: int, text: str) -> None: ...


class _Bar:
    """A bar on a terminal."""

    def __init__(self, progress: Any, spec: "RunSpec") -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=spec.num_rounds, what="")
        self._num_rounds = spec.num_rounds

    def on_round(self, record: "RoundRecord") -> None:
        loss = "" if record.loss is None else f"loss {record.loss:.4f}"
        self._progress.update(self._task, completed=record.round_number, what=loss)

    def on_progress(self, number: int, client: str, progress: "LocalProgress") -> None:
        self.on_step(number, f"{client}, {progress.images_per_second:,.0f} images/s")

    def on_step(self, number: int, text: str) -> None:
        self._progress.update(self._task, description=f"round {number} of {self._num_rounds}: {text}")


class _Lines:
    """A line for each round, where output is piped."""

    def __init__(self, spec: "RunSpec") -> None:
        from fedssl.cli.run.progress import Clock

        self._clock = Clock()
        self._clock.seconds_left(0.0)
        self._num_rounds = spec.num_rounds

    def on_round(self, record: "RoundRecord") -> None:
        left = self._clock.seconds_left(record.round_number / self._num_rounds)
        ending = "" if not left else f", {duration(left)} left"
        loss = "no loss" if record.loss is None else f"loss {record.loss:.4f}"
        note(f"round {record.round_number} of {self._num_rounds}: {loss}{ending}")

    def on_progress(self, number: int, client: str, progress: "LocalProgress") -> None:
        pass

    def on_step(self, number: int, text: str) -> None:
        pass


@contextmanager
def display(spec: "RunSpec") -> "Iterator[Calls]":
    """What shows a run's progress on standard error while it lasts."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _calls(_Lines(spec))
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TextColumn("{task.fields[what]}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        yield _calls(_Bar(progress, spec))


def _calls(shown: _Display) -> "Calls":
    from fedssl.experiments.runs import Calls

    def on_round(record: "RoundRecord") -> None:
        shown.on_round(record)
        if record.alarms:
            more = f", and {len(record.alarms) - 1} more like it" if len(record.alarms) > 1 else ""
            note(f"warning: after round {record.round_number}, {record.alarms[0]}{more}")

    return Calls(
        on_resume=lambda done: note(f"going on after round {done}, which an earlier start of this run had finished"),
        on_round=on_round,
        on_progress=shown.on_progress,
        on_distillation=lambda number, p: shown.on_step(number, f"distilling, epoch {p.epoch} of {p.num_epochs}"),
        on_judging=lambda number, what, share: shown.on_step(number, f"judging, {what}"),
        on_evaluation=lambda number, values: note(f"after round {number}: {measured(values)}"),
    )


def _show(finished: "FinishedRun", folder: Path, output: Format) -> None:
    from fedssl.experiments import files

    names = {"model": files.MODEL, "encoder": files.ENCODER, "history": files.HISTORY, "spec": files.SPEC}
    paths = {what: str(folder / name) for what, name in names.items()}
    if output is Format.TABLE:
        show_pairs({**paths, **_pairs(finished)})
        return
    best = {name: finished.best(name) for name in ACCURACIES if name in finished.last}
    document = {
        "rounds": finished.num_rounds,
        "losses": finished.losses,
        "last": finished.last,
        "best": {name: {"round": found[0], "value": found[1]} for name, found in best.items() if found},
        "best_chosen_on": "test",
        "evaluations": finished.evaluations,
        **{name: getattr(finished, name) for name in ("bytes_down", "bytes_up", "num_images", "seconds")},
        "files": paths,
    }
    show_json(files.finite(document))


def _pairs(finished: "FinishedRun") -> dict[str, object]:
    last = finished.losses[-1] if finished.losses else None
    pairs: dict[str, object] = {"rounds": finished.num_rounds, "last loss": None if last is None else f"{last:.4f}"}
    for name, text in ACCURACIES.items():
        if name in finished.last and (best := finished.best(name)):
            chosen = f"best of all rounds, chosen on the test set: {100 * best[1]:.2f} % after round {best[0]}"
            pairs[text] = f"{100 * finished.last[name]:.2f} % after the last round ({chosen})"
    for name in ("uniformity", "effective_rank"):
        if name in finished.last:
            pairs[name.replace("_", " ")] = f"{finished.last[name]:.4g}"
    return {
        **pairs,
        "images trained on": finished.num_images,
        "sent by clients": f"{finished.bytes_up / 1e6:,.1f} MB",
        "received by clients": f"{finished.bytes_down / 1e6:,.1f} MB",
        "time": duration(finished.seconds),
    }
