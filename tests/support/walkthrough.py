"""A document's commands and a notebook's cells, run in order."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from fedssl.cli.main import app

_BLOCK = re.compile(r"^```(console|toml|toml policy|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\S+\.(?:toml|py))\n")

Other = Callable[[list[str]], None]
"""Runs a command of a program other than `fedssl`."""


class Walkthrough:
    """Runs a document in the working folder: writes its named files, and runs its commands.

    RUN stands for the run that was submitted last; `stands_for` replaces other words.
    """

    def __init__(self, stands_for: dict[str, str], other: Other) -> None:
        self._stands_for = dict(stands_for)
        self._other = other
        self.num_commands = 0

    def follow(self, document: Path) -> None:
        for kind, text in _BLOCK.findall(document.read_text()):
            if kind != "console":
                if named := _FILE.match(text):
                    Path(named[1]).write_text(self._filled(text) if kind == "toml policy" else text)
                continue
            for line in text.splitlines():
                if line.startswith("$ "):
                    self._run(line[2:])

    def _filled(self, text: str) -> str:
        for word, meaning in self._stands_for.items():
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", meaning, text)
        return text

    def _run(self, line: str) -> None:
        line = self._filled(line)
        words = shlex.split(line, comments=True)
        self.num_commands += 1
        if words[0] != "fedssl" or words[1] == "up":
            self._other(words)
            return
        result = invoke(*words[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
        if submitted := re.match(r"run ([0-9a-f-]{36}) (submitted|created)", result.stderr):
            self._stands_for["RUN"] = submitted[1]
        if asked := re.match(r"evaluation ([0-9a-f]{8}) of", result.stderr):
            self._stands_for["EVALUATION"] = asked[1]


def invoke(*words: str) -> Result:
    """Run a `fedssl` command in this process, and return its result."""
    return CliRunner().invoke(app, list(words))


def run_cells(notebook: Path) -> dict[str, Any]:
    """Run a notebook's cells in order in one namespace, and return the namespace."""
    space: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}:{cell['id']}", "exec"), space)
    return space
