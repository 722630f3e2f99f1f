"""Downloads from a real HTTP server that serves correct or wrong files."""

import functools
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedssl.data import KNOWN
from fedssl.data.download import DOWNLOADS, Download, download
from support.listening import FileHandler, LoopbackServer

MEMBERS = {"data_batch_1.bin": b"one" * 100, "test_batch.bin": b"test"}


def _archive(members: dict[str, bytes], folder: str = "set-bin") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


@pytest.fixture
def url(served: Path) -> Iterator[str]:
    with LoopbackServer(functools.partial(FileHandler, directory=str(served))) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server.url
        server.shutdown()


def _offer(monkeypatch: pytest.MonkeyPatch, *files: Download) -> None:
    monkeypatch.setattr("fedssl.data.download.DOWNLOADS", {"set": files})


def _file(url: str, name: str, content: bytes, **more: object) -> Download:
    return Download(f"{url}/{name}", len(content), hashlib.sha256(content).hexdigest(), **more)  # type: ignore[arg-type]


def _download(directory: Path) -> tuple[Path | None, str]:
    said: list[str] = []
    return download("set", directory, said.append), "\n".join(said)


def test_an_archive_is_unpacked_and_plain_files_are_kept(
    served: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, plain = _archive(MEMBERS | {"readme.html": b"not wanted"}), bytes(3 << 20)
    (served / "set.tar.gz").write_bytes(archive)
    (served / "plain.mat").write_bytes(plain)
    _offer(
        monkeypatch,
        _file(url, "set.tar.gz", archive, folder="set-bin", members=tuple(MEMBERS)),
        _file(url, "plain.mat", plain),
    )
    place, said = _download(tmp_path / "data")
    assert place == tmp_path / "data" / "set"
    assert {path.name: path.read_bytes() for path in place.iterdir()} == MEMBERS | {"plain.mat": plain}
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["set"], "nothing else is left behind"
    assert "downloading set.tar.gz" in said
    assert "plain.mat: 60%" in said


@pytest.mark.parametrize("wrong", ["content", "longer", "shorter", "missing", "member"])
def test_nothing_is_kept_unless_all_files_are_correct(
    served: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    archive, plain = _archive({} if wrong == "member" else MEMBERS), b"x" * 1000
    (served / "set.tar.gz").write_bytes(archive)
    arrives = {"content": b"y" * 1000, "longer": plain + b"x" * (4 << 20), "shorter": plain[:-1]}.get(wrong, plain)
    if wrong != "missing":
        (served / "plain.mat").write_bytes(arrives)
    _offer(
        monkeypatch,
        _file(url, "set.tar.gz", archive, folder="set-bin", members=tuple(MEMBERS)),
        _file(url, "plain.mat", plain),
    )
    place, said = _download(tmp_path / "data")
    assert place is None
    assert ("cannot be unpacked" if wrong == "member" else "plain.mat: ") in said
    assert list((tmp_path / "data").iterdir()) == []


def test_an_endless_answer_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            nonlocal read
            read += size
            return bytes(size)

    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Endless())
    _offer(monkeypatch, Download("http://nowhere/plain.mat", 100, "0" * 64))
    place, _ = _download(tmp_path)
    assert place is None
    assert read <= 2 << 20


def test_an_unreachable_server_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, Download("http://127.0.0.1:9/plain.mat", 1, "0" * 64))
    place, said = _download(tmp_path)
    assert place is None
    assert "the download failed" in said


def test_every_download_belongs_to_a_known_data_set_marked_as_fetchable() -> None:
    fetchable = {name for name, known in KNOWN.items() if known.fetchable}
    assert fetchable == {"fashion-mnist", *DOWNLOADS}
    for name, files in DOWNLOADS.items():
        assert name in KNOWN[name].folders, "it is unpacked to where it is looked for"
        assert all(len(file.sha256) == 64 and file.num_bytes > 1e6 for file in files)
