"""Fetching without internet access: scripts stand in for apt, and a local HTTP server for that of the authors."""

import functools
import gzip
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedssl.data import DATA_VARIABLE, fetch_fashion_mnist
from fedssl.data.fetch import damaged_files
from support.listening import FileHandler, LoopbackServer

CONTENT = {
    f"{stem}-{kind}-ubyte": f"{stem} {kind}".encode() * 50
    for stem in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
}
APT_SERVES = """#!/bin/sh
case "$*" in
*download*) cp "{source}/fake.deb" "dataset-fashion-mnist_1_all.deb" ;;
*) exit 1 ;;
esac
"""
APT_NEEDS_LISTS = """#!/bin/sh
case "$*" in
*update*) touch "{source}/updated" ;;
*Dir::State::Lists=*download*) cp "{source}/fake.deb" "dataset-fashion-mnist_1_all.deb" ;;
*) exit 100 ;;
esac
"""
APT_FAILS = "#!/bin/sh\nexit 100\n"
APT_HANGS = "#!/bin/sh\nexec sleep 60\n"
DPKG = """#!/bin/sh
mkdir -p "$3/usr/share/datasets/fashion-mnist" && cp "{source}"/*.gz "$3/usr/share/datasets/fashion-mnist/"
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of small files that stand in for the four that are fetched. The expected checksums are theirs."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    (folder / "fake.deb").write_bytes(b"")
    known = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in CONTENT.items()}
    monkeypatch.setattr("fedssl.data.fetch._FILES", known)
    monkeypatch.setattr("fedssl.data.datasets._SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setattr("fedssl.data.fetch._SERVER", "http://127.0.0.1:9")  # no server listens there
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    return folder


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that comes first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
def server(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with LoopbackServer(functools.partial(FileHandler, directory=str(source))) as http_server:
        threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        monkeypatch.setattr("fedssl.data.fetch._SERVER", http_server.url)
        yield
        http_server.shutdown()


def _install(programs: Path, source: Path, apt: str) -> None:
    for name, script in (("apt-get", apt), ("dpkg-deb", DPKG)):
        (programs / name).write_text(script.replace("{source}", str(source)))
        (programs / name).chmod(0o755)


def _fetch(directory: Path) -> tuple[Path | None, str]:
    said: list[str] = []
    return fetch_fashion_mnist(directory, said.append), "\n".join(said)


def _assert_complete(directory: Path) -> None:
    assert sorted(path.name for path in directory.iterdir()) == ["fashion-mnist"], "nothing else is left behind"
    assert damaged_files(directory / "fashion-mnist") == []


def test_complete_files_are_not_fetched_again(source: Path, programs: Path) -> None:
    _install(programs, source, APT_FAILS)
    found, said = _fetch(source)
    assert found == source
    assert "apt" not in said
    assert not (source / "fashion-mnist").exists()


@pytest.mark.parametrize("apt", [APT_SERVES, APT_NEEDS_LISTS])
def test_the_debian_package_is_unpacked(source: Path, programs: Path, tmp_path: Path, apt: str) -> None:
    _install(programs, source, apt)
    found, _ = _fetch(tmp_path / "data")
    assert found == tmp_path / "data" / "fashion-mnist"
    _assert_complete(tmp_path / "data")
    assert (source / "updated").exists() == (apt == APT_NEEDS_LISTS)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("apt", [APT_FAILS, APT_HANGS])
def test_the_server_is_used_if_apt_fails(
    source: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apt: str
) -> None:
    monkeypatch.setattr("fedssl.data.fetch._APT_SECONDS", 0.3)
    _install(programs, source, apt)
    found, said = _fetch(tmp_path / "data")
    assert found == tmp_path / "data" / "fashion-mnist"
    assert "downloading" in said
    _assert_complete(tmp_path / "data")


@pytest.mark.usefixtures("server")
def test_a_server_that_sends_too_much_or_invalid_http_is_refused(
    source: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedssl.data.fetch._APT_SECONDS", 0.3)
    _install(programs, source, APT_FAILS)
    monkeypatch.setattr("fedssl.data.fetch._MOST_BYTES", 10)
    found, said = _fetch(tmp_path / "data")
    assert found is None
    assert "longer than the published file" in said
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr("fedssl.data.fetch._SERVER", f"http://127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=_answer_nonsense, args=(listener,), daemon=True).start()
        found, said = _fetch(tmp_path / "data")
    assert found is None
    assert "the download failed" in said


def _answer_nonsense(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"nonsense\r\n\r\n")


def test_if_every_way_fails_manual_instructions_are_given(source: Path, programs: Path, tmp_path: Path) -> None:
    _install(programs, source, APT_FAILS)
    found, said = _fetch(tmp_path / "data")
    assert found is None
    assert "By hand" in said
    assert DATA_VARIABLE in said
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.usefixtures("server")
def test_a_damaged_download_is_never_installed(source: Path, programs: Path, tmp_path: Path) -> None:
    _install(programs, source, APT_SERVES)
    damaged = gzip.compress(CONTENT["t10k-labels-idx1-ubyte"][:-1] + b"!")
    (source / "t10k-labels-idx1-ubyte.gz").write_bytes(damaged)
    found, said = _fetch(tmp_path / "data")
    assert found is None
    assert said.count("damaged (t10k-labels-idx1-ubyte)") == 2
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.usefixtures("server")
def test_damaged_files_of_an_earlier_fetch_are_replaced(source: Path, programs: Path, tmp_path: Path) -> None:
    _install(programs, source, APT_FAILS)
    target, _ = _fetch(tmp_path / "data")
    assert target is not None
    (target / "train-images-idx3-ubyte.gz").write_bytes(b"cut short")
    assert _fetch(tmp_path / "data")[0] == target
    _assert_complete(tmp_path / "data")


def test_damaged_files_in_another_folder_are_not_modified(source: Path, programs: Path) -> None:
    _install(programs, source, APT_SERVES)
    (source / "train-images-idx3-ubyte.gz").write_bytes(b"cut short")
    found, said = _fetch(source)
    assert found is None
    assert "remove them" in said


@pytest.mark.parametrize(
    "content",
    [b"", b"plain", gzip.compress(b"short"), gzip.compress(b"x" * 10_000), gzip.compress(b"a" * 100)[:-5]],
    ids=("empty", "plain", "short", "long", "cut"),  # gzip data contains the time
)
def test_damaged_files_are_detected(source: Path, content: bytes) -> None:
    (source / "train-images-idx3-ubyte.gz").write_bytes(content)
    assert damaged_files(source) == ["train-images-idx3-ubyte"]


def test_uncompressed_files_are_accepted(source: Path) -> None:
    for name, content in CONTENT.items():
        (source / f"{name}.gz").unlink()
        (source / name).write_bytes(content)
    assert damaged_files(source) == []
