"""Download data sets from their authors' servers, and check them against the checksums of the published files."""

import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final

Progress = Callable[[str], None]

_SOCKET_SECONDS = 15.0
_CHUNK_BYTES = 1 << 20
_NUM_REPORTS = 10


@dataclass(frozen=True, slots=True)
class Download:
    """One file of a data set. A file of another length or content is not kept.

    Attributes:
        url: its address on its authors' server.
        num_bytes: its length.
        sha256: the digest of its content.
        folder: the folder in a tar archive that is unpacked; empty if the file is kept as it is.
        members: the files in that folder.
    """

    url: str
    num_bytes: int
    sha256: str
    folder: str = ""
    members: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


# Servers without https are sufficient, because the checksums are those of the published files.
DOWNLOADS: Final[Mapping[str, tuple[Download, ...]]] = MappingProxyType(
    {
        "cifar10": (
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", 170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", "cifar-10-batches-bin",
                (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt"),
            ),
        ),
        "cifar100": (
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", 168_513_733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec", "cifar-100-binary",
                ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
            ),
        ),
        "svhn": (
            Download(
                "http://ufldl.stanford.edu/housenumbers/train_32x32.mat", 182_040_794,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            Download(
                "http://ufldl.stanford.edu/housenumbers/test_32x32.mat", 64_275_384,
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
        "tiny-imagenet": (
            Download(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip", 248_100_043,
                "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            ),
        ),
    }
)  # fmt: skip
"""The downloads by the data set's name. ImageNet's own images are available only after agreeing to its terms."""


def download(name: str, directory: Path, progress: Progress) -> Path | None:
    """Download a data set into `directory/name`. Files appear there only when all have arrived and were checked.

    Args:
        name: one of :data:`DOWNLOADS`.
        directory: the folder of data sets, which is created if it is missing.
        progress: called with a sentence about each step, and with the error if the download fails.

    Returns:
        The folder that holds the files, or None if the download failed.
    """
    target = directory / name
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetching-") as temporary:
        ready = Path(temporary) / "ready"
        ready.mkdir()
        for file in DOWNLOADS[name]:
            arrived = (Path(temporary) if file.folder else ready) / file.name
            wrong = _fetch(file, arrived, progress) or (_unpack(file, arrived, ready) if file.folder else "")
            if wrong:
                progress(f"{file.url}: {wrong}")
                return None
        _publish(ready, target)
    return target


def _fetch(file: Download, path: Path, progress: Progress) -> str:
    """Write the file. Returns what is wrong with it, or ""."""
    progress(f"downloading {file.name} ({file.num_bytes / 1e6:,.0f} MB)")
    try:
        with urllib.request.urlopen(file.url, timeout=_SOCKET_SECONDS) as response, path.open("wb") as out:
            digest = _copy(response, out, file, progress)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return f"the download failed: {error}"
    return "" if digest == file.sha256 else "the downloaded file is not the published one"


def _copy(response: BinaryIO, out: BinaryIO, file: Download, progress: Progress) -> str:
    """Copy the response, at most one chunk beyond the published length. Returns the sha256 of the copy."""
    digest = hashlib.sha256()
    arrived, reported = 0, 0
    while arrived <= file.num_bytes and (chunk := response.read(_CHUNK_BYTES)):
        digest.update(chunk)
        out.write(chunk)
        arrived += len(chunk)
        if reported < (tenth := arrived * _NUM_REPORTS // file.num_bytes) < _NUM_REPORTS:
            reported = tenth
            progress(f"{file.name}: {100 * tenth // _NUM_REPORTS}%")
    return digest.hexdigest()


def _unpack(file: Download, archive: Path, ready: Path) -> str:
    """Unpack only the known files from a tar archive. Returns what is wrong with it, or ""."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for name in file.members:
                content = tar.extractfile(f"{file.folder}/{name}")
                if content is None:
                    return f"{name} in it is not a file"
                with content, (ready / name).open("wb") as out:
                    while chunk := content.read(_CHUNK_BYTES):
                        out.write(chunk)
    except (tarfile.TarError, OSError, EOFError, KeyError, zlib.error) as error:
        return f"it cannot be unpacked: {error}"
    return ""


def _publish(ready: Path, target: Path) -> None:
    """Move all files to their target, one by one, so that each appears whole."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(ready.iterdir()):
        os.replace(path, target / path.name)
