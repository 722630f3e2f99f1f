"""The instructions in docs/adding-a-method.md work in a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(python|diff)\n# (\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_page_adds_a_method_that_keeps_the_contract(tmp_path: Path) -> None:
    for folder in ("shared/src", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    blocks = _BLOCK.findall((ROOT / "docs/adding-a-method.md").read_text())
    assert [kind for kind, _, _ in blocks] == ["python", "python", "diff", "diff", "python"]
    for kind, name, text in blocks:
        path = tmp_path / name
        if kind == "python":
            assert not path.exists(), f"{name} is there already: the page must add something new"
            path.write_text(text)
        else:
            path.write_text(_applied(path.read_text(), text))
    files = ("tests/unit/methods/objectives/test_spectral.py", "tests/contract/test_methods.py")
    _pytest(tmp_path, *files, "-k", "spectral", "--full")


def _applied(source: str, diff: str) -> str:
    """Insert every `+` line after the line of context before it."""
    lines = source.splitlines()
    position = -1
    for line in diff.splitlines():
        if line.startswith("+"):
            position += 1
            lines.insert(position, line[1:])
        else:
            position = lines.index(line[1:], position + 1)
    return "\n".join(lines) + "\n"


def _pytest(root: Path, *arguments: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", root)
    paths = [str(root / "shared/src"), str(root / "tests"), str(ROOT / "services/coordinator/src")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b1[0-9] passed", done.stdout), done.stdout
