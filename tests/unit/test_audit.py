"""Tests of how `.ci/audit` interprets pip-audit's answer. A stand-in writes the answer, so no database is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = Path(__file__).parents[2] / ".ci/audit"
KNOWN = {"name": "celery", "version": "5.7.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "torch could not be looked up"}
BAD = {
    "name": "jinja2",
    "version": "2.4.1",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-2014-0012"], "fix_versions": ["2.7.3"]}],
}


def _audit(folder: Path, *dependencies: dict[str, Any], says: str | None = None) -> subprocess.CompletedProcess[str]:
    answer = json.dumps({"dependencies": dependencies}) if says is None else ""
    (folder / "pip_audit.py").write_text(f"import sys\nprint({answer!r})\nsys.exit({says!r})\n")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, str(COMMAND)], env=environment, capture_output=True, text=True, check=False)


def test_packages_without_known_vulnerabilities_pass(tmp_path: Path) -> None:
    done = _audit(tmp_path, KNOWN)
    assert done.returncode == 0
    assert done.stdout == "1 of 1 pinned versions checked, 0 with known vulnerabilities\n"


def test_known_vulnerabilities_are_named(tmp_path: Path) -> None:
    done = _audit(tmp_path, KNOWN, BAD, UNKNOWN)
    assert done.returncode == 1
    assert "jinja2 2.4.1: PYSEC-1, CVE-2014-0012; fixed in 2.7.3" in done.stdout
    assert "2 of 3 pinned versions checked, 1 with known vulnerabilities" in done.stdout


def test_an_unreachable_service_is_reported_instead_of_a_pass(tmp_path: Path) -> None:
    done = _audit(tmp_path, KNOWN, UNKNOWN)
    assert done.returncode == 2
    assert "has no data on 1 of them (torch): it was not reached" in done.stderr
    done = _audit(tmp_path, says="ConnectionError: no route")
    assert done.returncode == 2
    assert done.stderr == "The service pypi could not be reached, so the result is unknown: ConnectionError: no route\n"
