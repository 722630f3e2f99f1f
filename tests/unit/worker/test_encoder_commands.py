"""`fedssl-worker embed` and `classify` write the same files as `fedssl`, without opening a connection."""

import socket
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedssl.cli.main import app as fedssl
from fedssl_worker.main import app as worker
from support.encoder_folders import write_encoder_folder
from support.federation import tiny_spec

DATA = {"channels": 3, "image_size": 12}


def done(app: Any, *arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(worker, [str(argument) for argument in arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with an encoder and a site's images of two classes. Any attempt to connect fails."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("this opens a connection")

    for name in ("connect", "connect_ex", "sendto", "sendmsg"):
        monkeypatch.setattr(socket.socket, name, refuse, raising=False)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_WORKER_COORDINATOR", "http://127.0.0.1:1")
    monkeypatch.setenv("FEDSSL_WORKER_DATA", "scans")
    Path("run").mkdir()
    write_encoder_folder(Path("run"), tiny_spec(data=DATA))
    rng = np.random.default_rng(0)
    for number in range(16):
        name, colour = (("ill", (200, 60, 60)), ("well", (60, 60, 200)))[number % 2]
        path = Path("scans", name, f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((np.array(colour) + rng.integers(-50, 50, (12, 12, 3))).astype(np.uint8)).save(path)
    return tmp_path


def test_a_site_embeds_its_images_without_a_connection(site: Path) -> None:
    done(worker, "embed", "--model", "run", "--out", "site.npz")
    done(fedssl, "embed", "scans", "--model", "run", "--out", "own.npz")
    assert Path("site.npz").read_bytes() == Path("own.npz").read_bytes()


def test_a_site_classifies_its_images_without_a_connection(site: Path) -> None:
    done(
        worker, "classify", "--model", "run", "--labels", "own", "--save-head", "head.safetensors", "--out", "site.csv"
    )
    done(fedssl, "classify", "scans", "--model", "run", "--labels", "scans", "--out", "own.csv")
    assert Path("site.csv").read_bytes() == Path("own.csv").read_bytes()
    assert len(Path("site.csv").read_text().splitlines()) == 17
    done(worker, "classify", "--model", "run/encoder.safetensors", "--head", "head.safetensors", "--out", "again.csv")
    assert Path("again.csv").read_bytes() == Path("site.csv").read_bytes()
    lines = [f"{path.relative_to('scans')},{path.parent.name}" for path in Path("scans").rglob("*.png")]
    Path("labels.csv").write_text("\n".join(["path,label", *lines]))
    done(worker, "classify", "--model", "run", "--labels", "labels.csv", "--out", "by-file.csv")
    assert "p_well" in Path("by-file.csv").read_text()


def test_nothing_is_recorded_in_the_workers_state(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_WORKER_STATE", str(site / "state"))
    before = {path.name for path in site.iterdir()}
    done(worker, "classify", "--model", "run", "--labels", "own")
    assert {path.name for path in site.iterdir()} == {*before, "predictions.csv"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("embed", "--model", "1a2b3c4d", "--out", "a.npz"), "fedssl run pull"),
        (("embed", "--model", "run", "--out", "a.csv"), ".parquet or .npz"),
        (("embed", "--data", "nowhere", "--model", "run", "--out", "a.npz"), "found no data set at nowhere"),
        (("embed", "--model", "run", "--out", "scans/ill/0.png/a.npz"), "scans/ill/0.png"),
        (("classify", "--model", "run"), "either --labels"),
        (("classify", "--model", "run", "--labels", "own", "--out", "scans/ill/0.png/a.csv"), "scans/ill/0.png"),
        (("classify", "--model", "run", "--labels", "nowhere.csv"), "nowhere.csv"),
        (("classify", "--model", "run", "--head", "run/encoder.safetensors"), "fedssl classify"),
    ],
)
@pytest.mark.usefixtures("site")
def test_invalid_requests_are_refused_with_what_to_do(arguments: tuple[str, ...], words: str) -> None:
    said = refused(*arguments)
    assert said.startswith("fedssl-worker: ")
    assert words in said
