"""Fixtures for the tests of the local servers and of the supervisor, which use real processes."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.waiting import wait_until

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def until() -> Until:
    """Return a function that waits until a condition is true, for at most 10 s."""
    return functools.partial(wait_until, seconds=10)


@pytest.fixture
def processes_with() -> Callable[[str], list[int]]:
    """Return a function that finds all processes, except this one, with a text in their command line or environment."""

    def find(text: str) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                everything = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in everything and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        return found

    return find


class Program:
    """A Python program that runs as a process in its own process group, as in a terminal."""

    def __init__(self, source: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)], stdout=subprocess.PIPE, text=True, process_group=0
        )

    def line(self) -> str:
        """Return the next line that the program prints, stripped of white space."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, signum: int) -> tuple[int, str]:
        """Send a signal to the process group, as Ctrl-C does. Return the exit status and the rest of the output."""
        os.killpg(self.process.pid, signum)
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """Yield a function that starts programs. Those still running at the end are killed."""
    started: list[Program] = []

    def start(source: str, *arguments: object) -> Program:
        started.append(Program(source, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()
