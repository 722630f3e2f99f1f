"""The notebook and the documents' commands are carried out, on one federation that `fedssl up` has started."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest

from support.walkthrough import run_cells

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

DOCS = Path(__file__).parents[2] / "docs"
UP = ["fedssl", "up", "--data", "digits", "--clients", "2"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a federation that is up."""
    folder = tmp_path_factory.mktemp("federation")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDSSL_")}
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedssl.cli.main", *UP[1:], "--port", "0", "--format", "json"],
            cwd=folder,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            process_group=0,
        )
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            text = "".join(line for line in iter(lambda: next(lines, "}\n"), "}\n")) + "}"
            assert json.loads(text)["directory"] == str(folder / ".fedssl"), (folder / "stderr").read_text()
            yield folder
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture
def here(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the federation in it, as where a reader has started one."""
    for name in [name for name in os.environ if name.startswith("FEDSSL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".fedssl").symlink_to(federation / ".fedssl")
    return tmp_path


def test_the_notebook(here: Path) -> None:
    notebook = DOCS / "notebooks" / "first-run.ipynb"
    assert " ".join(UP) in notebook.read_text()
    matplotlib.use("Agg")
    space = run_cells(notebook)
    assert space["run"].outcome == "completed"
    assert space["accuracy"] > 0.8
    assert space["points"].shape == (len(space["test"]), 2)
    assert not any(cell.get("outputs") for cell in json.loads(notebook.read_text())["cells"])
