"""A page of 500 rounds and 200 clients stays fluid while it is scrolled and while patches arrive."""

import json
from uuid import UUID

from playwright.sync_api import Page

from support.browsing import ARTIFACTS, Open

# Well above what an idle machine needs (17 ms, no task above 50 ms), because other work may share its cores.
MOST_FRAME_MS = 50.0
MOST_TASK_MS = 250.0
MOST_HEAP_GROWTH = 1.5
PATCHES = 40

_WATCH = """() => {
  const frames = [], tasks = [];
  let last = performance.now(), on = true;
  new PerformanceObserver((list) => tasks.push(...list.getEntries().map((entry) => entry.duration)))
    .observe({ type: "longtask" });
  const step = (now) => { frames.push(now - last); last = now; if (on) requestAnimationFrame(step); };
  requestAnimationFrame(step);
  window.measured = () => { on = false; return { frames: frames.slice(1), tasks }; };
}"""
_PATCH = """async (count) => {
  for (let i = 0; i < count; i += 1) {
    for (const part of document.querySelectorAll("#state, #reason, #strip, #names, #why, #log, #actions"))
      part.append(" "); /* what is as it was is not replaced */
    document.body.dispatchEvent(new CustomEvent("run:changed"));
    await new Promise((done) => document.body.addEventListener("htmx:afterSwap", done, { once: true }));
  }
}"""


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _report(page: Page, what: str) -> tuple[float, float]:
    """Return the 95th percentile of the frames and the longest task, both in milliseconds, and store the numbers."""
    found = page.evaluate("measured()")
    frame, task = _share(found["frames"], 0.95), max(found["tasks"], default=0.0)
    figures = {"frames": len(found["frames"]), "frame_p50_ms": _share(found["frames"], 0.5), "frame_p95_ms": frame,
               "long_tasks": len(found["tasks"]), "longest_task_ms": task}  # fmt: skip
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    (ARTIFACTS / f"frames-{what}.json").write_text(json.dumps(figures))
    return frame, task


def test_scrolling_a_large_run_is_fluid(open_page: Open, large_run: UUID) -> None:
    page = open_page().open(f"/runs/{large_run}")
    page.mouse.move(700, 450)
    page.evaluate(_WATCH)
    for way in (1, -1):
        for _ in range(60):
            page.mouse.wheel(0, way * 40)
            page.wait_for_timeout(16)
    frame, task = _report(page, "scrolling")
    assert frame <= MOST_FRAME_MS
    assert task <= MOST_TASK_MS


def test_patches_of_a_large_run_are_fluid_and_do_not_leak_memory(open_page: Open, large_run: UUID) -> None:
    """A live run sends patches with every event, so they must not leave memory or elements behind."""
    page = open_page().open(f"/runs/{large_run}")
    heap = page.context.new_cdp_session(page)

    def used() -> float:
        heap.send("HeapProfiler.collectGarbage")
        return float(heap.send("Runtime.getHeapUsage")["usedSize"])

    page.evaluate(_PATCH, 3)
    before = used()
    page.evaluate(_WATCH)
    page.evaluate(_PATCH, PATCHES)
    frame, task = _report(page, "patches")
    assert frame <= MOST_FRAME_MS
    assert task <= MOST_TASK_MS
    assert used() <= MOST_HEAP_GROWTH * before
    assert page.evaluate("document.querySelectorAll('*').length") <= 1500
