"""Chromium, the pages that it opens, and where their pictures are stored."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from support.evaluated_runs import DATASET

ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / ".artifacts" / "browser"
CACHE = ROOT / ".cache"
PALETTES = ("light", "dark")
SIZES = {"wide": (1440, 900), "tablet": (1024, 768), "phone": (390, 844)}

SPEC = {
    "name": "digits-ssd",
    "seed": 7,
    "num_rounds": 8,
    "method": {"name": "ssd"},
    "model": {"encoder": {"widths": [8, 16, 32]}, "projector": {"hidden_dims": [32], "out_dim": 32}},
    "data": {"channels": 1, "image_size": 16},
    "training": {"batch_size": 64, "optimizer": {"learning_rate": 0.1}},
    "cohort": {"min_clients": 3, "lease_seconds": 20},
    "evaluation": {"dataset": DATASET, "every": 2, "embedding_map": "pca"},
}


def chromium() -> Path:
    """Return the path of the system's Chromium or, if there is none, of the one that `make browser-deps` has
    unpacked."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    unpacked = CACHE / "chromium" / "chromium"
    if found is None and not unpacked.exists():
        pytest.fail("there is no Chromium: run `make browser-deps`")
    return Path(found) if found else unpacked


def launch_options(*arguments: str) -> dict[str, Any]:
    """Return the options with which Playwright launches that Chromium."""
    path = chromium()
    libraries = {"LD_LIBRARY_PATH": str(path.parent / "lib")} if path.is_relative_to(CACHE) else {}
    # The sandbox needs privileges that containers do not have. Only our own pages are opened.
    needed = ["--no-sandbox", "--disable-dev-shm-usage", *arguments]
    return {"executable_path": path, "args": needed, "env": {**os.environ, **libraries}}


def sign_in(page: Page, token: str) -> None:
    page.goto("/sign-in")
    page.fill("#token", token)
    page.click("button.pri")
    page.wait_for_url("**/runs")


class Watched:
    """A page that records its errors and warnings, its requests to other hosts and its answers of 500 and above."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and self._hear(message.text))
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda request: request.url.startswith((base, "data:")) or self._note(request.url))
        page.on("response", lambda response: response.status >= 500 and self._note(f"{response.status} {response.url}"))

    def _hear(self, text: str) -> None:
        if "status of 404" not in text:  # Chromium's own message for a missing page
            self._note(text)

    def _note(self, what: str) -> None:
        self.complaints.append(what)

    def open(self, path: str) -> Page:
        """Open a path, and wait until the page's charts are drawn."""
        self.page.goto(path)
        if not self.page.locator("#run[data-live='1']").count():  # a live page is never idle
            self.page.wait_for_load_state("networkidle")
        self.page.evaluate("document.fonts.ready")
        return self.page


Open = Callable[..., Watched]
