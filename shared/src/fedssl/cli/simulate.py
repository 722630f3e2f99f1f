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

if TYPE_CHECKING:
    from fedssl.engine import LocalProgress
    from fedssl.protocol.runs import RunSpec
    from fedssl.simulation import Result, RoundRecord


def simulate(
    spec: SpecArgument,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.  [default: ./simulated-NAME]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; 1 gives a deployed federation's very bits.")] = 1,
    output: FormatOption = Format.TABLE,
) -> None:
    """Train a spec in this process, on the images of its [partition]; no servers, the same result as deployed.

    Writes model.safetensors, initial.safetensors, encoder.safetensors, history.json and spec.yaml.
    """
    wanted = read_spec(spec, set_)
    if wanted.partition is None:
        raise UsageError(f"{spec} has no [partition], which says whose images to train on: see examples/demo.toml")
    folder = out or Path(f"simulated-{wanted.name.replace(' ', '-')}")
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)  # before torch is imported
    from fedssl.cli.datasets import data_folder, ensure

    ensure(wanted.partition.dataset, note)
    import torch

    from fedssl.simulation import simulate as run

    torch.set_num_threads(threads)
    _require_device(device)
    with _display(wanted) as display:
        result = run(
            wanted, data_root=data_folder(), device=device, on_round=display.on_round, on_progress=display.on_progress
        )
    files = _write(result, folder)
    losses = [record.loss for record in result.history]
    if output is Format.JSON:
        show_json({"rounds": len(losses), "losses": losses, "files": files})
        return
    last = losses[-1] if losses else None
    show_pairs({**files, "rounds": len(losses), "last loss": None if last is None else f"{last:.4f}"})


class _Display(Protocol):
    def on_round(self, record: "RoundRecord") -> None: ...
    def on_progress(self, number: int, client: str, progress: "LocalProgress") -> None: ...


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
        text = f"round {number} of {self._num_rounds}: {client}, {progress.images_per_second:,.0f} images/s"
        self._progress.update(self._task, description=text)


class _Lines:
    """A line for each round, where output is piped."""

    def __init__(self, spec: "RunSpec") -> None:
        from fedssl.cli.progress import Clock

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


@contextmanager
def _display(spec: "RunSpec") -> Iterator[_Display]:
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _Lines(spec)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TextColumn("{task.fields[what]}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        yield _Bar(progress, spec)


def _require_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from None


def _write(result: "Result", folder: Path) -> dict[str, str]:
    import json

    from fedssl.artifacts.tensors import save_tensors
    from fedssl.cli import export

    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(result.model, folder / export.MODEL)
    save_tensors(result.initial, folder / export.INITIAL)
    export.export_encoder(folder / export.MODEL, folder / export.ENCODER)
    export.write_spec(result.spec, folder / export.SPEC)
    history = [
        {
            "round": record.round_number,
            "loss": record.loss,
            "clients": record.clients,
            "num_examples": record.num_examples,
        }
        for record in result.history
    ]
    (folder / "history.json").write_text(json.dumps(history, indent=2) + "\n", encoding="utf-8")
    names = {"model": export.MODEL, "encoder": export.ENCODER, "history": "history.json", "spec": export.SPEC}
    return {what: str(folder / name) for what, name in names.items()}
