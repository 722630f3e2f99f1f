"""Record the page of a run for README.md while six clients train it and one is killed. `make recording`.

The recording is an animated WebP: one frame per second of the run, played at four frames per second, then a scroll
through the finished run. Everything in it is real, as in take_pictures.py.
"""

import argparse
import io
import os
import signal
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page
from take_pictures import COHORT, IMAGES, federation_and_browser, sign_in

from fedssl.client import Client
from fedssl.protocol.runs import RunSpec
from fedssl_local.federation import Federation
from support.browsing import SPEC

VIEWPORT = (1440, 900)
NUM_ROUNDS = 16
KILLED_AFTER = 5  # rounds
KILLED = "client-2"
SECONDS_PER_FRAME = 1.0
PLAYED_MILLISECONDS = 250
LAST_MILLISECONDS = 2_500
SCROLL_STEP = 160  # pixels


def _frame(page: Page, size: tuple[int, int]) -> Image.Image:
    """Return a picture of the page as it is now, scaled down."""
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize(size, Image.Resampling.LANCZOS)


def _kill(federation: Federation) -> None:
    """Kill one worker. The supervisor of the federation restarts it."""
    needle = f"FEDSSL_WORKER_STATE={federation.folder.worker_state(KILLED).absolute()}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found = needle in path.read_bytes()
        except OSError:
            continue
        if found:
            os.kill(int(path.parent.name), signal.SIGKILL)
            return
    raise RuntimeError(f"no process has {needle!r} in its environment")


def _record(page: Page, client: Client, federation: Federation, size: tuple[int, int]) -> list[Image.Image]:
    spec = {**SPEC, "num_rounds": NUM_ROUNDS, "cohort": COHORT, "training": {**SPEC["training"], "local_epochs": 2}}
    run = client.create_run(RunSpec.model_validate(spec)).id
    page.goto(f"/runs/{run}")
    page.evaluate("document.fonts.ready")
    frames, due, to_kill = [], time.monotonic(), True
    while (view := client.run(run)).state != "finished":
        if to_kill and view.rounds_closed >= KILLED_AFTER:
            _kill(federation)
            to_kill = False
        frames.append(_frame(page, size))
        due = max(due + SECONDS_PER_FRAME, time.monotonic())
        page.wait_for_timeout(1_000 * max(0.0, due - time.monotonic()))
    page.wait_for_timeout(6_000)  # the evaluation of the last round
    for place in range(0, page.evaluate("document.body.scrollHeight - innerHeight") + SCROLL_STEP, SCROLL_STEP):
        page.evaluate("place => scrollTo(0, place)", place)
        page.wait_for_timeout(300)
        frames.append(_frame(page, size))
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES / "run.webp")
    parser.add_argument("--width", type=int, default=1_000, help="of the recording, in pixels")
    parser.add_argument("--quality", type=int, default=60)
    given = parser.parse_args()
    width, height = VIEWPORT
    size = (given.width, given.width * height // width)
    with federation_and_browser() as (federation, client, browser):
        page = browser.new_page(
            base_url=federation.url, viewport={"width": width, "height": height}, color_scheme="light"
        )
        sign_in(page, federation)
        first, *others = _record(page, client, federation, size)
    durations = [PLAYED_MILLISECONDS] * len(others) + [LAST_MILLISECONDS]
    first.save(
        given.out, save_all=True, append_images=others, duration=durations, loop=0, quality=given.quality, method=6
    )


if __name__ == "__main__":
    main()
