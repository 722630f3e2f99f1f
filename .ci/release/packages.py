"""The wheels and the chart. The same commit gives the same bytes."""

import gzip
import io
import sys
import tarfile
from pathlib import Path

import helm_python as helm
from commands import run

_DISTRIBUTIONS = ("shared", "services/coordinator", "services/worker", "services/local")


def build_wheels(tree: Path, folder: Path, epoch: int) -> None:
    """Build the wheel of each distribution. `epoch` is the time in seconds that its files get."""
    for distribution in _DISTRIBUTIONS:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
        run(*command, cwd=tree / distribution, env={"SOURCE_DATE_EPOCH": str(epoch)})


def build_chart(tree: Path, folder: Path, epoch: int) -> None:
    """Package the chart with its files instead of links, and with the time `epoch` instead of the present one."""
    archive = Path(helm.package(tree / "helm" / "fedssl", destination=folder))
    with tarfile.open(archive) as packed:
        files = {member.name: packed.extractfile(member).read() for member in packed if member.isfile()}  # type: ignore[union-attr]
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as packed,
    ):
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(content), epoch, 0o644
            packed.addfile(member, io.BytesIO(content))
