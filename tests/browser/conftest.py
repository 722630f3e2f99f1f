"""Fixtures: a real federation with a real run, a long run that exists only in its database, and Chromium to view
both."""

import contextlib
import time
from collections.abc import Iterator
from uuid import UUID

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from fedssl.client import Client
from fedssl.protocol.data import PartitionConfig
from fedssl.protocol.runs import RunSpec
from fedssl_local.federation import Dealing, Federation, Machine, running_federation
from fedssl_local.folder import Folder
from support.browsing import SIZES, SPEC, Open, Watched, launch_options, sign_in
from support.evaluated_runs import register_digits
from support.large_run import add_large_run
from support.tables import Tables


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(**launch_options())
        yield running
        running.close()


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Yield a federation as `fedssl up` starts it, with real processes and three workers that have digits."""
    partition = PartitionConfig(dataset="digits", num_clients=3, scheme="dirichlet", alpha=0.5, max_images=600)
    folder = Folder(tmp_path_factory.mktemp("federation") / "up")
    with running_federation(
        folder, Dealing(partition=partition, required={}), Machine(port=0, device="cpu", threads=1)
    ) as running:
        yield running


@pytest.fixture(scope="session")
def client(federation: Federation) -> Iterator[Client]:
    with contextlib.closing(federation.client()) as operator:
        operator.create_project("cardiology")
        operator.rename_client("client-1", "St. Mary's hospital, radiology")
        operator.create_token("worker", "site-of-cardiology", project="cardiology")
        operator.create_notification_destination("webhook", "https://hooks.example.org/fedssl", label="on call")
        yield operator


@pytest.fixture(scope="session")
def token(federation: Federation) -> str:
    return federation.folder.operator_token.read_text(encoding="ascii").strip()


@pytest.fixture(scope="session")
def run(client: Client, tmp_path_factory: pytest.TempPathFactory) -> UUID:
    """Return a run of eight rounds of SSD, trained and evaluated by real processes."""
    register_digits(client, tmp_path_factory.mktemp("digits"))
    made = client.create_run(RunSpec.model_validate(SPEC))
    for _ in client.events(made.id):
        pass  # waits until the run has finished
    assert client.run(made.id).outcome == "completed"
    while any(row.state in ("queued", "running") for row in client.evaluations(made.id)):
        time.sleep(0.5)
    return made.id


@pytest.fixture(scope="session")
def tables(federation: Federation) -> Iterator[Tables]:
    place = federation.folder.postgres
    password, port = (place / "password").read_text().strip(), (place / "port").read_text().strip()
    with Tables(f"postgresql://fedssl:{password}@127.0.0.1:{port}/fedssl") as looking:
        yield looking


@pytest.fixture(scope="session")
def large_run(tables: Tables, run: UUID) -> UUID:
    """Return a completed run of 500 rounds with 200 clients, on which no process works.

    It is written after `run` has ended, so that its clients, which have no workers, cannot be in that run's cohort.
    """
    return add_large_run(tables, num_rounds=500, num_clients=200, is_live=False)


@pytest.fixture
def open_page(browser: Browser, federation: Federation, token: str) -> Iterator[Open]:
    """Yield a function that opens a page in a size and palette, signed in by default. No page may log a complaint."""
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
            sign_in(page, token)
        return watched

    yield opened
    for context, watched in contexts:
        complaints = list(watched.complaints)  # closing interrupts requests, and htmx logs that
        context.close()
        assert complaints == []
