"""Processes that train clients, forked from one that has imported the libraries, which takes most of their time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedssl.parallel import pool
from support.preloaded import Forked, preloaded


@contextmanager
def forked_processes() -> Iterator[list[Forked]]:
    """Fork the processes of `fedssl.parallel` within the block, and collect them in the list."""
    started: list[Forked] = []

    def start(command: list[str], pass_fds: list[int], env: dict[str, str], **options: Any) -> Forked:
        assert command == [sys.executable, "-m", "fedssl.parallel", *map(str, pass_fds)]
        assert options == {"stdin": subprocess.PIPE, "process_group": 0}
        with open(os.dup(2), "wb") as log:
            process = preloaded().start("fedssl.parallel", [], env, log, descriptors=pass_fds, has_input=True)
        started.append(process)
        return process

    own = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "subprocess", own)
        yield started


def processes_of(pid: int | str = "self") -> set[int]:
    """Return the processes that a process has started and that have not ended."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()}
