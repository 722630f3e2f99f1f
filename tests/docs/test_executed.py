"""The notebook and the documents' commands are run on one federation that `fedssl up` has started."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from fedssl.local import connect
from fedssl.models import import_torchvision
from support.walkthrough import Walkthrough, run_cells

pytestmark = [pytest.mark.full, pytest.mark.integration, pytest.mark.timeout(480)]

DOCS = Path(__file__).parents[2] / "docs"
UP = ["fedssl", "up", "--data", "digits", "--clients", "2"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of a running federation."""
    folder = tmp_path_factory.mktemp("federation")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDSSL_")}
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedssl.cli.main", *UP[1:], "--port", "0", "--format", "json"],
            cwd=folder,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            process_group=0,
        )
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            text = "".join(line for line in iter(lambda: next(lines, "}\n"), "}\n")) + "}"
            assert json.loads(text)["directory"] == str(folder / ".fedssl"), (folder / "stderr").read_text()
            yield folder
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture
def working_folder(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder that links to the federation, as if a reader had started it there."""
    for name in [name for name in os.environ if name.startswith("FEDSSL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".fedssl").symlink_to(federation / ".fedssl")
    return tmp_path


@pytest.mark.full
def test_the_notebook_runs_and_trains_a_good_encoder(working_folder: Path) -> None:
    notebook = DOCS / "notebooks" / "first-run.ipynb"
    assert " ".join(UP) in notebook.read_text()
    matplotlib.use("Agg")
    space = run_cells(notebook)
    assert space["run"].outcome == "completed"
    assert space["accuracy"] > 0.8
    assert space["points"].shape == (len(space["test"]), 2)
    assert not any(cell.get("outputs") for cell in json.loads(notebook.read_text())["cells"])


RUN_FROM_WEIGHTS = """
num_rounds = 1
[method]
name = "fedsimclr"
[model.encoder]
name = "resnet18"
stem = "imagenet"
[model.initial]
weights = "imagenet-r18"
[data]
channels = 3
image_size = 16
[training]
batch_size = 16
local_epochs = 1
[partition]
dataset = "digits"
num_clients = 2
scheme = "iid"
max_images = 64
"""

PAGES = [
    "quickstart.md",
    "concepts.md",
    "cli.md",
    "how-to/two-sites.md",
    "how-to/own-images.md",
    "how-to/search-images.md",
    "how-to/classify-images.md",
    "how-to/classifier-from-sites.md",
    "how-to/different-encoders.md",
    "how-to/start-from-weights.md",
    "how-to/disaster.md",
]


def test_every_how_to_page_is_executed() -> None:
    described = {path.relative_to(DOCS).as_posix() for path in (DOCS / "how-to").glob("*.md")}
    assert described <= set(PAGES)


class Others:
    """Runs the commands of other programs. Workers run until the test ends."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._num_workers = 0
        self.printed: list[str] = []

    def __call__(self, words: list[str]) -> None:
        if words[0] == "kill":
            os.kill(int(words[-1]), signal.SIGKILL)
        elif words[0] == "fedssl-worker":
            self._work(words[1:])
        elif words[0] == "python":
            done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            self.printed.append(done.stdout)
        else:
            assert words == UP, "the pages start one federation"

    def _work(self, arguments: list[str]) -> None:
        self._num_workers += 1
        path = Path(f"worker-{self._num_workers}.log")
        with path.open("w") as log:
            process = subprocess.Popen([sys.executable, "-m", "fedssl_worker", *arguments], stderr=log)
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.terminate)
        end = time.monotonic() + 120
        while "registered" not in path.read_text():
            assert time.monotonic() < end, path.read_text()
            time.sleep(0.2)


def worker_of(folder: Path, client: str) -> str:
    """Return the process id of a client's worker."""
    needle = f"FEDSSL_WORKER_STATE={folder}/.fedssl/workers/{client}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if needle in path.read_bytes():
                return path.parent.name
        except OSError:
            continue
    raise AssertionError(f"no worker of {client}")


def write_labs(folder: Path) -> None:
    """Write the folders of two labs with images of stripes in two directions. Only the first has labels."""
    rng = np.random.default_rng(0)
    for number in range(60):
        is_malignant = number % 2
        stripes = np.indices((16, 16))[is_malignant] % 4 // 2 * 120
        for path in (
            folder / "lab-a" / ("malignant" if is_malignant else "benign") / f"{number}.png",
            folder / "lab-b" / f"{number}.png",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((stripes + rng.integers(0, 100, (16, 16))).astype(np.uint8)).save(path)


def check_classified(printed: str) -> None:
    """Assert that the page's script prints the right classes of two images, and `fedssl classify`'s probabilities."""
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["malignant"] > line["benign"] for line in lines] == [False, True]
    with Path("predictions.csv").open(newline="") as file:
        rows = {row["path"]: row for row in csv.DictReader(file)}
    for line in lines:
        row = rows[Path(line["image"]).name]
        for name in ("benign", "malignant"):
            assert line[name] == pytest.approx(float(row[f"p_{name}"]), abs=1e-5)


def test_the_commands_of_the_pages_succeed(federation: Path, working_folder: Path) -> None:
    for number in range(40):
        path = working_folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((16, 16), 40 + number).save(path)
    write_labs(working_folder)
    shutil.copy(federation / ".fedssl" / "tokens" / "operator", working_folder / "operator-token")
    save_file(import_torchvision().models.resnet18(weights=None).state_dict(), working_folder / "resnet18.safetensors")
    (working_folder / "run.toml").write_text(RUN_FROM_WEIGHTS)
    with connect(federation / ".fedssl") as client:
        url = client.url
    stands_for = {"https://fedssl.example.org": url, "PID": worker_of(federation, "client-0")}
    with ExitStack() as stack:
        others = Others(stack)
        walkthrough = Walkthrough(stands_for, others)
        for page in PAGES:
            walkthrough.follow(DOCS / page)
    assert walkthrough.num_commands >= 40
    [classified] = others.printed
    check_classified(classified)
