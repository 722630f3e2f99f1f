"""Take the pictures of docs/web.md again while six clients train. `make pictures`.

Everything in them is real: the processes of `fedssl up`, unevenly partitioned digits, two finished runs and a
running one.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from playwright.sync_api import Browser, Page, sync_playwright

from fedssl.client import Client
from fedssl.protocol.data import PartitionConfig
from fedssl.protocol.runs import RunSpec
from fedssl_local.federation import Dealing, Federation, Machine, running_federation
from fedssl_local.folder import Folder
from support.browsing import SIZES, SPEC, launch_options
from support.evaluated_runs import register_digits

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CLIENTS = 6
PARTITION = PartitionConfig(dataset="digits", num_clients=CLIENTS, scheme="dirichlet", alpha=0.5, max_images=1_200)
COHORT = {"min_clients": CLIENTS, "min_updates": 4, "lease_seconds": 60}
RUNS = {
    "digits-align": {"method": {"name": "fedalignuniform"}, "num_rounds": 6},
    "digits-byol": {"method": {"name": "fedbyol"}, "num_rounds": 6},
    "digits-ssd": {"method": {"name": "ssd"}, "num_rounds": 40},
}
SHOWN_AFTER = 24  # rounds of the last run


def _submit(client: Client) -> UUID:
    """Submit the runs one after another. The last one is still running when this returns."""
    for name, changes in RUNS.items():
        spec = RunSpec.model_validate({**SPEC, **changes, "name": name, "cohort": COHORT})
        run = client.create_run(spec).id
        while (view := client.run(run)).state != "finished" and not (
            name == "digits-ssd" and view.rounds_closed >= SHOWN_AFTER
        ):
            time.sleep(0.5)
    return run


def sign_in(page: Page, federation: Federation) -> None:
    page.goto("/sign-in")
    page.fill("#token", federation.folder.operator_token.read_text(encoding="ascii").strip())
    page.click("button.pri")
    page.wait_for_url("**/runs")


def _take(page: Page, path: str, name: str) -> None:
    page.goto(path)
    page.evaluate("document.fonts.ready")
    for place in range(0, page.evaluate("document.body.scrollHeight"), 400):
        page.evaluate("place => scrollTo(0, place)", place)
        page.wait_for_timeout(300)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(1_500)
    page.screenshot(path=IMAGES / name, full_page=True)


@contextlib.contextmanager
def federation_and_browser() -> Iterator[tuple[Federation, Client, Browser]]:
    """Yield a running federation of six clients that has digits to evaluate on, its operator's client, and Chromium."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        machine = Machine(port=0, device="cpu", threads=1)
        dealing = Dealing(partition=PARTITION, required={})
        federation = stack.enter_context(running_federation(Folder(Path(place) / "up"), dealing, machine))
        client = stack.enter_context(contextlib.closing(federation.client()))
        register_digits(client, Path(place))
        browser = stack.enter_context(sync_playwright()).chromium.launch(**launch_options())
        yield federation, client, browser
        browser.close()


def main() -> None:
    with federation_and_browser() as (federation, client, browser):
        run = _submit(client)
        width, height = SIZES["wide"]
        for palette, where, name, tall in (
            ("light", f"/runs/{run}", "run-light.png", height),
            ("dark", "/runs", "runs-dark.png", height // 2),
        ):
            page = browser.new_page(
                base_url=federation.url, viewport={"width": width, "height": tall}, color_scheme=palette
            )
            sign_in(page, federation)
            _take(page, where, name)


if __name__ == "__main__":
    main()
