"""A real federation with a real run, a long run written beside it, and Chromium to look at them."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from fedssl.client import Client
from fedssl.local import Postgres
from fedssl.local.federation import Dealing, Federation, Machine, running_federation
from fedssl.local.folder import Folder
from fedssl.protocol.data import PartitionConfig
from fedssl.protocol.runs import RunSpec
from support.judged import DATASET, register_digits
from support.large_run import add_large_run
from support.tables import Tables

ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / ".artifacts" / "browser"
CACHE = ROOT / ".cache"
PALETTES = ("light", "dark")
SIZES = {"wide": (1440, 900), "phone": (390, 844)}

SPEC = {
    "name": "digits-ssd",
    "seed": 7,
    "num_rounds": 8,
    "method": {"name": "ssd"},
    "model": {"encoder": {"widths": [8, 16, 32]}, "projector": {"hidden_dims": [32], "out_dim": 32}},
    "data": {"channels": 1, "image_size": 16},
    "training": {"batch_size": 64, "optimizer": {"learning_rate": 0.1}},
    "cohort": {"min_clients": 3, "lease_seconds": 20},
    "evaluation": {"dataset": DATASET, "every": 2},
}


def chromium() -> Path:
    """The one of the system, else the one that `make browser-deps` has unpacked."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    unpacked = CACHE / "chromium" / "chromium"
    if found is None and not unpacked.exists():
        pytest.fail("there is no Chromium: run `make browser-deps`")
    return Path(found) if found else unpacked


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = chromium()
    libraries = {"LD_LIBRARY_PATH": str(path.parent / "lib")} if path.is_relative_to(CACHE) else {}
    with sync_playwright() as playwright:
        # No sandbox: it needs rights that containers withhold; only our own pages are opened.
        running = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"], env={**os.environ, **libraries}
        )
        yield running
        running.close()


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """What `fedssl up` starts: every process real, three workers with digits."""
    partition = PartitionConfig(dataset="digits", num_clients=3, scheme="dirichlet", alpha=0.5, max_images=600)
    folder = Folder(tmp_path_factory.mktemp("federation") / "up")
    with running_federation(folder, Dealing(partition=partition, required={}), Machine(port=0, device="cpu", threads=1)) as running:
        yield running


@pytest.fixture(scope="session")
def client(federation: Federation) -> Iterator[Client]:
    with contextlib.closing(federation.client()) as operator:
        yield operator


@pytest.fixture(scope="session")
def token(federation: Federation) -> str:
    return federation.folder.operator_token.read_text(encoding="ascii").strip()


@pytest.fixture(scope="session")
def run(client: Client, tmp_path_factory: pytest.TempPathFactory) -> UUID:
    """Eight rounds of SSD, trained and judged by real processes."""
    register_digits(client, tmp_path_factory.mktemp("digits"))
    made = client.create_run(RunSpec.model_validate(SPEC))
    for _ in client.events(made.id):
        pass  # until it has finished
    assert client.run(made.id).outcome == "completed"
    while any(row.state in ("queued", "running") for row in client.evaluations(made.id)):
        time.sleep(0.5)
    return made.id


@pytest.fixture(scope="session")
def large(federation: Federation, run: UUID) -> UUID:
    """500 rounds of 200 clients, all closed: nothing works on it. Made last, so that it is nobody's client."""
    with Tables(Postgres(federation.folder.postgres).url) as tables:
        return add_large_run(tables, num_rounds=500, num_clients=200, is_live=False)


class Watched:
    """A page that remembers what it complained of, and what it asked for elsewhere."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda request: request.url.startswith((base, "data:")) or self._note(request.url))
        page.on("response", lambda response: response.status >= 500 and self._note(f"{response.status} {response.url}"))

    def _note(self, what: str) -> None:
        self.complaints.append(what)

    def open(self, path: str) -> Page:
        """Go there, and wait until its charts are drawn."""
        self.page.goto(path)
        if not self.page.locator("#run[data-live='1']").count():  # a live page is never idle
            self.page.wait_for_load_state("networkidle")
        self.page.evaluate("document.fonts.ready")
        return self.page


Open = Callable[..., Watched]


@pytest.fixture
def look(browser: Browser, federation: Federation, token: str) -> Iterator[Open]:
    """Opens a signed-in page of a size and palette; in the end none may have complained."""
    contexts: list[tuple[BrowserContext, Watched]] = []

    def opened(size: str = "wide", palette: str = "light", *, signed_in: bool = True, **options: object) -> Watched:
        width, height = SIZES[size]
        context = browser.new_context(
            base_url=federation.url, viewport={"width": width, "height": height}, color_scheme=palette, **options
        )  # type: ignore[arg-type]
        page = context.new_page()
        watched = Watched(page, federation.url)
        contexts.append((context, watched))
        if signed_in:
            page.goto("/sign-in")
            page.fill("#token", token)
            page.click("button.pri")
            page.wait_for_url("**/runs")
        return watched

    yield opened
    for context, watched in contexts:
        context.close()
        assert watched.complaints == []
