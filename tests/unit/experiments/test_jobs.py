"""Simulations in processes of their own. A script that starts at once takes the place of the simulation."""

import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fedssl.errors import MethodError
from fedssl.experiments import jobs
from fedssl.experiments.jobs import run_in_processes
from fedssl.experiments.runs import Calls, ComputeSettings, FinishedRun
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import RoundRecord
from fedssl.wording import reason_of
from support.federation import tiny_spec

JOB = """
import json, os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
job = json.loads((folder / "job.json").read_text())
for line in ("1", "not a round", "2"):
    print(line, flush=True)
match folder.name:
    case "explained":
        print("a warning", file=sys.stderr)
        sys.exit("the encoder diverged")
    case "unexplained":
        os._exit(3)
    case "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    case "endless":
        sys.stdin.read()  # ends if the process that started this one does
"""


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setattr(jobs, "_COMMAND", (sys.executable, "-S", str(tmp_path / "job.py")))


def tasks(root: Path, *names: str) -> list[tuple[str, RunSpec, Path]]:
    return [(name, tiny_spec(), root / name) for name in names]


def test_each_run_ends_with_its_own_reason_and_does_not_end_the_others(tmp_path: Path) -> None:
    started: list[str] = []
    rounds: list[tuple[str, int]] = []
    asked = tasks(tmp_path, "explained", "unexplained", "killed", "good")

    found = dict(
        run_in_processes(
            asked,
            ComputeSettings(data_root=tmp_path),
            2,
            started.append,
            lambda name, done: rounds.append((name, done)),
        )
    )

    assert found == {
        "explained": "the encoder diverged",
        "unexplained": "the process ended with code 3",
        "killed": "the process was ended by SIGKILL, which is what the system does when memory runs out",
        "good": None,
    }
    assert started == ["explained", "unexplained", "killed", "good"]
    assert sorted(rounds) == sorted((name, done) for name in found for done in (1, 2))
    job = json.loads((tmp_path / "good" / "job.json").read_text())
    assert RunSpec.model_validate(job.pop("spec")) == tiny_spec()
    assert job == {"device": "cpu", "data_root": str(tmp_path)}


def test_no_more_processes_run_at_the_same_time_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    start, free = jobs._start, ["cuda:0", "cuda:1"]
    monkeypatch.setattr(jobs, "devices_of", lambda device, count: list(free[:count]))

    def recorded(spec: RunSpec, folder: Path, device: str, root: Path | None) -> "subprocess.Popen[str]":
        devices.append(device)
        return start(spec, folder, device, root)

    monkeypatch.setattr(jobs, "_start", recorded)
    running: set[str] = set()
    most = 0

    def on_start(name: str) -> None:
        nonlocal most
        running.add(name)
        most = max(most, len(running))

    for name, reason in run_in_processes(tasks(tmp_path, *"abcd"), ComputeSettings(device="cuda"), 2, on_start):
        assert reason is None
        running.remove(name)

    assert most == 2
    assert devices[:2] == ["cuda:0", "cuda:1"]
    assert set(devices) == {"cuda:0", "cuda:1"}, "the device of a run that ended is used again"


def test_leaving_early_ends_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[str]] = []
    start = jobs._start
    monkeypatch.setattr(jobs, "_start", lambda *given: processes.append(start(*given)) or processes[-1])

    with closing(run_in_processes(tasks(tmp_path, "good", "endless"), ComputeSettings(), 2)) as ended:
        assert next(ended) == ("good", None)

    assert [process.returncode for process in processes] == [0, -signal.SIGTERM]


def test_a_job_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """This process holds the other end of the job's standard input, so that even `kill -9` closes it."""
    job = jobs._start(tiny_spec(), tmp_path / "endless", "cpu", None)
    assert job.stdin is not None
    assert job.stdout is not None
    with job.stdin, job.stdout:
        assert job.stdout.readline() == "1\n"
        job.stdin.close()
        assert job.wait(20) == 0


def test_a_process_ends_when_its_standard_input_does() -> None:
    code = "import time, fedssl.parallel.parent as p; p.end_with_parent(); print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.close()
        assert process.wait(20) == 1


def test_a_job_runs_the_spec_of_its_file_and_reports_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"spec": tiny_spec().model_dump(mode="json"), "device": "cuda:1", "data_root": str(tmp_path)}
    (tmp_path / "job.json").write_text(json.dumps(given))
    watched: list[bool] = []
    monkeypatch.setattr(jobs, "end_with_parent", lambda: watched.append(True))

    def run(spec: RunSpec, folder: Path, *, machine: ComputeSettings, calls: Calls) -> FinishedRun:
        assert (spec, folder) == (tiny_spec(), tmp_path)
        assert machine == ComputeSettings(device="cuda:1", data_root=tmp_path)
        calls.on_resume(3)
        calls.on_round(RoundRecord(4, {}, {}))
        raise MethodError("the loss is not finite\nin client-1")

    monkeypatch.setattr(jobs, "run_in_folder", run)
    with pytest.raises(SystemExit, match=r"^the loss is not finite$"):
        jobs.main(tmp_path)

    assert capsys.readouterr().out == "3\n4\n"
    assert watched == [True]
    assert reason_of(MemoryError()) == "MemoryError"
