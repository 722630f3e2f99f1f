"""The rules for both Dockerfiles, read without an engine. `make lint` runs hadolint over them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COORDINATOR, WORKER = (ROOT / "services" / name / "Dockerfile" for name in ("coordinator", "worker"))


def _shared(path: Path) -> str:
    """Return the part of a Dockerfile from `ARG PYTHON` up to the sources of one service."""
    text = path.read_text()
    return text[text.index("ARG PYTHON") : text.index("COPY services/")]


def test_the_training_layers_are_the_same_in_both_dockerfiles() -> None:
    assert _shared(COORDINATOR) == _shared(WORKER)


@pytest.mark.parametrize("path", [COORDINATOR, WORKER], ids=lambda path: path.parent.name)
def test_final_stages_run_unprivileged_and_have_a_health_check(path: Path) -> None:
    stages = re.split(r"^FROM ", path.read_text(), flags=re.MULTILINE)
    final = [stage for stage in stages if "ENTRYPOINT" in stage]
    assert len(final) == (3 if path == COORDINATOR else 1)
    for stage in final:
        assert "USER 10001:10001" in stage
        assert "HEALTHCHECK" in stage


def test_requirements_are_those_of_the_projects_distributions() -> None:
    command = [sys.executable, "deploy/requirements.py", "services/coordinator", "services/worker"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {"torch~=2.13.0", "celery~=5.7.0"} <= set(lines)
    assert not [line for line in lines if line.startswith("fedssl")]
    api = subprocess.run([*command[:2], "services/coordinator"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "torch" not in api.stdout
