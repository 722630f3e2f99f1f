"""Runs the programs that a release needs."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from errors import ReleaseError


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, text: str = "") -> str:
    """Run a program and return its standard output. `env` adds variables, `text` is its standard input.

    Raises ReleaseError with the last lines of its messages if it is missing or fails.
    """
    words = list(map(str, command))
    if shutil.which(words[0]) is None:
        raise ReleaseError(f"the program {words[0]} is not installed, and a release needs it")
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **(env or {})}, input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise ReleaseError(f"`{shlex.join(words)}` failed with exit code {done.returncode}:\n{last}")
    return done.stdout


def git(root: Path, *arguments: str) -> str:
    """Run git in this working tree and return its output without the last line break."""
    return run("git", "-C", root, *arguments).removesuffix("\n")
