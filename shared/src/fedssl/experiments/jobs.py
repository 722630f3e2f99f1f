"""Run simulations in their own processes, each with one CPU thread.

    python -m fedssl.experiments.jobs FOLDER

runs the job in `FOLDER/job.json`. It prints a line on standard output for each finished round. If the run fails, the
reason is the last line on standard error.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from fedssl.engine.devices import devices_of
from fedssl.errors import FedSSLError
from fedssl.experiments.runs import Calls, ComputeSettings, run_in_folder
from fedssl.parallel.parent import end_with_parent
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import write_json
from fedssl.wording import reason_of

JOB, LOG = "job.json", "job.log"
_COMMAND = (sys.executable, "-m", "fedssl.experiments.jobs")

FAILURES = (FedSSLError, RuntimeError, ValueError, ArithmeticError, MemoryError)
"""The errors of one run that do not end the others: fedssl's own, torch's, and insufficient memory."""

E = TypeVar("E")


def run_in_processes(
    tasks: Sequence[tuple[E, RunSpec, Path]],
    machine: ComputeSettings,
    num_processes: int,
    on_start: Callable[[E], None] = lambda entry: None,
    on_round: Callable[[E, int], None] = lambda entry, rounds_done: None,
) -> Iterator[tuple[E, str | None]]:
    """Run every task, at most `num_processes` at a time, and yield each when it ends, with the reason if it failed.

    If the machine's device is `cuda`, the processes take turns on all GPUs; several on one GPU share it.
    If the loop is left early, also by Ctrl-C, or this process is killed, the processes end; their checkpoints stay.
    """
    waiting = list(reversed(tasks))
    told: SimpleQueue[tuple[E, subprocess.Popen[str], int | None]] = SimpleQueue()
    going: dict[subprocess.Popen[str], tuple[Path, str]] = {}
    free = devices_of(machine.device, num_processes)
    try:
        while waiting or going:
            while waiting and len(going) < num_processes:
                entry, spec, folder = waiting.pop()
                on_start(entry)
                device = free.pop(0)
                process = _start(spec, folder, device, machine.data_root)
                going[process] = folder, device
                threading.Thread(target=_follow, args=(entry, process, told), daemon=True).start()
            entry, process, rounds_done = told.get()
            if rounds_done is not None:
                on_round(entry, rounds_done)
                continue
            (folder, device), code = going.pop(process), _end_of(process)
            free.append(device)
            yield entry, None if code == 0 else _reason(folder, code)
    finally:
        for process in going:
            process.terminate()
        for process in going:
            _end_of(process)


def _start(spec: RunSpec, folder: Path, device: str, data_root: Path | None) -> "subprocess.Popen[str]":
    folder.mkdir(parents=True, exist_ok=True)
    root = None if data_root is None else str(data_root)
    write_json(folder / JOB, {"spec": spec.model_dump(mode="json"), "device": device, "data_root": root})
    with (folder / LOG).open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            [*_COMMAND, str(folder)],
            stdin=subprocess.PIPE,  # the process ends when this pipe does
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )


def _end_of(process: "subprocess.Popen[str]") -> int:
    code = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return code


def _follow(
    entry: E, process: "subprocess.Popen[str]", told: "SimpleQueue[tuple[E, subprocess.Popen[str], int | None]]"
) -> None:
    assert process.stdout is not None, "it was requested"
    with process.stdout as lines:
        for line in lines:
            if line.strip().isdigit():
                told.put((entry, process, int(line)))
    told.put((entry, process, None))


def _reason(folder: Path, code: int) -> str:
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code < 0:
        memory = ", which is what the system does when memory runs out" if code == -signal.SIGKILL else ""
        return f"the process was ended by {signal.Signals(-code).name}{memory}"
    return lines[-1] if lines else f"the process ended with code {code}"


def main(folder: Path) -> None:
    """Run the job in a folder."""
    import torch

    end_with_parent()
    torch.set_num_threads(1)
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    root = None if job["data_root"] is None else Path(job["data_root"])
    calls = Calls(
        on_resume=lambda done: _tell(done),
        on_round=lambda record: _tell(record.round_number),
    )
    try:
        run_in_folder(
            RunSpec.model_validate(job["spec"]),
            folder,
            machine=ComputeSettings(device=job["device"], data_root=root),
            calls=calls,
        )
    except FAILURES as error:
        sys.exit(reason_of(error))


def _tell(rounds_done: int) -> None:
    sys.stdout.write(f"{rounds_done}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
