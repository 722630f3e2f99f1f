"""Targets of the Makefile, run with programs that print their arguments in place of the real ones."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("patience", "timeout"), [("1", "300"), ("3", "900"), ("1.5", "450")])
def test_patience_may_be_a_fraction(tmp_path: Path, patience: str, timeout: str) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    command = ["make", "fault", f"PATIENCE={patience}", f"BIN={tmp_path}", "--old-file=.venv/.installed-dev"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"--timeout {timeout} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["release"], "VERSION is not set: make release VERSION=0.2.0"),
        (["release-push", "VERSION=0.2.0"], "REGISTRY is not set: make release-push REGISTRY="),
    ],
)
def test_a_release_reports_missing_arguments(arguments: list[str], message: str) -> None:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("broken", ["", "skopeo", "sums"])
def test_a_push_stops_at_the_first_failure(tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "images.txt").write_text("fedssl-api:1.0.0 sha256:1 a.oci.tar\nfedssl-cli:1.0.0 sha256:2 b.oci.tar\n")
    digest = hashlib.sha256((folder / "images.txt").read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{'0' * 64 if broken == 'sums' else digest}  images.txt\n")
    for program in ("skopeo", "helm"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@"\ncat\nexit {int(program == broken)}\n')
        (tmp_path / program).chmod(0o755)
    command = ["make", "release-push", "VERSION=1.0.0", "REGISTRY=registry.example.org/ml", f"OUT={folder}"]
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # these belong to a make that runs this test
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    copy = "skopeo copy --all --preserve-digests oci-archive:{} docker://registry.example.org/ml/{}"
    if broken:
        assert done.returncode != 0
        assert lines == ([copy.format("a.oci.tar", "fedssl-api:1.0.0")] if broken == "skopeo" else lines)
        assert not any("helm" in line for line in lines)
    else:
        assert done.returncode == 0, done.stderr
        pushed = "helm push fedssl-1.0.0.tgz oci://registry.example.org/ml/charts"
        assert lines == [
            copy.format("a.oci.tar", "fedssl-api:1.0.0"),
            copy.format("b.oci.tar", "fedssl-cli:1.0.0"),
            pushed,
        ]
