"""Fetch Fashion-MNIST, 31 MB, and check it against the checksums of the published files."""

import gzip
import hashlib
import http.client
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

from fedssl.data.datasets import DATA_VARIABLE, find_fashion_mnist

Progress = Callable[[str], None]

# Length and sha256 of the files' decompressed content, because Debian compresses the same content with another header.
_FILES = {
    "train-images-idx3-ubyte": (47_040_016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    "train-labels-idx1-ubyte": (60_008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    "t10k-images-idx3-ubyte": (7_840_016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    "t10k-labels-idx1-ubyte": (10_008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
}
_PACKAGE = "dataset-fashion-mnist"
# The authors' server, which torchvision uses too. It has no https, so the checksums protect the files.
_SERVER = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_APT_SECONDS = 45.0
_SOCKET_SECONDS = 15.0
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 32 << 20  # the longest of the four files has 26.4 MB compressed


def fetch_fashion_mnist(directory: Path, progress: Progress) -> Path | None:
    """Ensure that Fashion-MNIST is on this machine and intact.

    Searches `directory` and the other places of :func:`~fedssl.data.load_dataset`. If it is not there, asks apt for the
    Debian package, which is unpacked but not installed and needs no root, and otherwise downloads the files from the
    authors' server. They are moved to `directory/fashion-mnist` when all four are complete and their checksums match.

    Args:
        directory: the folder of data sets, which is created if it is missing.
        progress: called with a sentence about each step, and with instructions if all of them fail.

    Returns:
        The folder that holds the files, or None. No step waits for longer than a minute: without a network it fails
        within seconds, and if packets are dropped silently, within about two minutes.
    """
    target = directory / "fashion-mnist"
    found = find_fashion_mnist(directory)
    if found is not None and not damaged_files(found):
        progress(f"Fashion-MNIST is in {found}")
        return found
    if found is not None and found != target:
        progress(f"the files in {found} are damaged ({', '.join(damaged_files(found))}): remove them and try again")
        return None
    directory.mkdir(parents=True, exist_ok=True)
    for fetch in (_from_debian, _from_server):
        with tempfile.TemporaryDirectory(dir=directory, prefix=".fetching-") as name:
            fetched = fetch(Path(name), progress)
            if fetched is None:
                continue
            damaged = damaged_files(fetched)
            if not damaged:
                _publish(fetched, target)
                progress(f"Fashion-MNIST is in {target}")
                return target
            progress(f"the fetched files are damaged ({', '.join(damaged)})")
    progress(
        f"could not fetch Fashion-MNIST. By hand: put {', '.join(f'{name}.gz' for name in _FILES)} into {target}, "
        f"or into any folder and set {DATA_VARIABLE} to it; the Debian package {_PACKAGE} installs them too"
    )
    return None


def damaged_files(folder: Path) -> list[str]:
    """Return the names of Fashion-MNIST's files that `folder` lacks, or whose content is not the published one."""
    return [name for name, (length, digest) in _FILES.items() if _content_digest(folder / name, length) != digest]


def _content_digest(path: Path, length: int) -> str | None:
    """Return the sha256 of the content of `path` or `path`.gz, or None if it is unreadable or has another length."""
    zipped = path.with_name(f"{path.name}.gz")
    try:
        with gzip.open(zipped) if zipped.is_file() else path.open("rb") as file:
            content = file.read(length + 1)  # bounded, because a damaged header may announce gigabytes
    except (OSError, EOFError, zlib.error):
        return None
    return hashlib.sha256(content).hexdigest() if len(content) == length else None


def _publish(fetched: Path, target: Path) -> None:
    """Move the files to their target. Each appears whole, and fewer than four are never taken for the set."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        os.replace(fetched / f"{name}.gz", target / f"{name}.gz")


def _from_debian(folder: Path, progress: Progress) -> Path | None:
    """Download and unpack the Debian package, if apt provides it."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    progress(f"asking apt for {_PACKAGE}")
    if not _download_package(folder, []):
        # The package lists may be old or empty: read new ones into this folder, and leave the machine's own unchanged.
        private = [f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache"]
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        progress("reading new package lists")
        if not _apt(["update"], folder, private) or not _download_package(folder, private):
            progress(f"apt does not provide {_PACKAGE} on this machine")
            return None
    for package in folder.glob(f"{_PACKAGE}*.deb"):
        if _run(["dpkg-deb", "-x", str(package), str(folder / "unpacked")], folder):
            return folder / "unpacked" / "usr" / "share" / "datasets" / "fashion-mnist"
    return None


def _download_package(folder: Path, options: list[str]) -> bool:
    return _apt(["download", _PACKAGE], folder, options) and any(folder.glob(f"{_PACKAGE}*.deb"))


def _apt(arguments: list[str], folder: Path, options: list[str]) -> bool:
    # apt's own download user could not write to this folder, so apt keeps the user of this process.
    timeouts = [f"Acquire::{scheme}::Timeout={_SOCKET_SECONDS:.0f}" for scheme in ("http", "https")]
    options = ["APT::Sandbox::User=root", "Acquire::Retries=0", *timeouts, *options]
    return _run(["apt-get", "-q", *(part for option in options for part in ("-o", option)), *arguments], folder)


def _run(command: list[str], folder: Path) -> bool:
    """Return whether the command succeeded in time. Its output is discarded: a child could keep a pipe open."""
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_APT_SECONDS, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return False
    return done.returncode == 0


def _from_server(folder: Path, progress: Progress) -> Path | None:
    """Download the four files from the authors' server."""
    for name in _FILES:
        progress(f"downloading {name}.gz")
        try:
            with (
                urllib.request.urlopen(f"{_SERVER}/{name}.gz", timeout=_SOCKET_SECONDS) as response,
                (folder / f"{name}.gz").open("wb") as file,
            ):
                while chunk := response.read(_CHUNK_BYTES):
                    if file.tell() + len(chunk) > _MOST_BYTES:
                        raise ValueError(f"{name}.gz is longer than the published file")
                    file.write(chunk)
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            progress(f"the download failed: {error}")
            return None
    return folder
