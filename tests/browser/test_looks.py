"""Every page in every palette and size has no complaints, no sideways scroll and no violations that axe finds."""

import re
import time
from uuid import UUID

import pytest
from playwright.sync_api import Browser, Locator, Page

from fedssl.client import Client
from fedssl.protocol.runs import RunSpec
from fedssl_local.federation import Federation
from support.browsing import ARTIFACTS, CACHE, PALETTES, SIZES, SPEC, Open, launch_options, sign_in

AXE = CACHE / "npm" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = {
    "runs": "/runs",
    "runs-none": "/runs?q=nothing-is-called-this",
    "run": "/runs/{run}",
    "large": "/runs/{large_run}",
    "rounds": "/runs/{run}/rounds",
    "round": "/runs/{run}/rounds/2",
    "large-round": "/runs/{large_run}/rounds/250",
    "members": "/runs/{run}/clients",
    "jobs": "/runs/{run}/jobs",
    "run-events": "/runs/{run}/events",
    "files": "/runs/{run}/files",
    "spec": "/runs/{run}/spec",
    "edit": "/runs/{run}/edit",
    "evaluate": "/runs/{run}/evaluate?draw=pca",
    "new": "/runs/new",
    "new-quick": "/runs/new?template=quick",
    "compare": "/compare?runs={run},{large_run}",
    "compare-loss": "/compare?runs={run},{large_run}&x=time&y=loss&scale=log-x&smooth=5",
    "compare-none": "/compare",
    "clients": "/clients",
    "client": "/clients/client-0",
    "client-named": "/clients/client-1",
    "revoke": "/clients/client-0/revoke/confirm",
    "events": "/events",
    "data": "/public-data",
    "notifications": "/notifications",
    "reference": "/reference",
    "missing": "/runs/{nothing}",
}
DRAWN = "[...document.querySelectorAll('.chart')].every(chart => chart.querySelector('canvas') || chart.dataset.empty)"
CUT = """[...document.querySelectorAll('h1, h2, dt, dd, p, label, .btn, .st span, .seg a')]
    .filter(part => part.clientWidth > 1 && getComputedStyle(part).overflowX === 'hidden')
    .filter(part => part.scrollWidth > part.clientWidth + 1).map(part => part.textContent.trim())"""
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.exists():
        pytest.fail("there is no axe-core: run `make browser-deps`")
    return AXE.read_text()


@pytest.mark.parametrize("palette", PALETTES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_and_does_not_scroll_sideways(
    open_page: Open, run: UUID, large_run: UUID, axe: str, name: str, size: str, palette: str
) -> None:
    page = open_page(size, palette).open(PAGES[name].format(run=run, large_run=large_run, nothing=UUID(int=7)))
    _scroll(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    if name == "large":
        assert page.evaluate("document.querySelectorAll('*').length") <= 1500
    _keep(page, f"{name}-{size}-{palette}.png")
    page.evaluate(axe)  # through the debugger, to which the page's policy does not apply
    found = page.evaluate("tags => axe.run({runOnly: tags})", TAGS)["violations"]
    assert [(rule["id"], [node["html"][:120] for node in rule["nodes"][:3]]) for rule in found] == []


@pytest.mark.parametrize("width", [320, 768])
@pytest.mark.parametrize("name", PAGES)
def test_no_page_scrolls_sideways_at_other_widths(
    open_page: Open, run: UUID, large_run: UUID, name: str, width: int
) -> None:
    watched = open_page("phone")
    watched.page.set_viewport_size({"width": width, "height": 800})
    page = watched.open(PAGES[name].format(run=run, large_run=large_run, nothing=UUID(int=7)))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [320, 1024])
def test_a_larger_default_text_enlarges_the_page_and_no_text_is_cut_off(
    browser: Browser, federation: Federation, run: UUID, large_run: UUID, token: str, width: int
) -> None:
    larger = browser.browser_type.launch(**launch_options("--blink-settings=defaultFontSize=24"))
    page = larger.new_page(base_url=federation.url, viewport={"width": width, "height": 800})
    sign_in(page, token)
    for name, path in PAGES.items():
        page.goto(path.format(run=run, large_run=large_run, nothing=UUID(int=7)))
        assert page.evaluate("getComputedStyle(document.body).fontSize") in ("19.5px", "21px"), name
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert page.evaluate(CUT) == [], name
    page.goto(PAGES["run"].format(run=run))
    page.wait_for_selector("#gantt canvas")
    assert page.evaluate("document.querySelector('#gantt canvas').clientHeight") == 1.5 * (62 + 4 * 22 + 24)
    larger.close()


def test_a_long_name_does_not_make_the_page_scroll_sideways(open_page: Open, client: Client) -> None:
    spec = {**{key: value for key, value in SPEC.items() if key != "evaluation"}, "name": 100 * "a"}
    created = client.create_run(RunSpec.model_validate(spec), start=False)
    page = open_page("phone").open(f"/runs/{created.id}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("size", ["wide", "tablet"])
def test_the_list_of_runs_does_not_scroll_sideways(open_page: Open, client: Client, large_run: UUID, size: str) -> None:
    client.create_run(RunSpec.model_validate({**SPEC, "name": "fedalignuniform-dirichlet-0.3-seed-3"}), start=False)
    table = open_page(size).open("/runs").locator("#list .scroll")
    assert table.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_scores_and_events_are_visible_on_a_tablet(open_page: Open, run: UUID) -> None:
    """They are neither in a hidden column nor in a part of a table that is visible only after scrolling."""
    watched = open_page("tablet")
    row = watched.open(PAGES["runs"]).locator(f'tr[data-href="/runs/{run}"]')
    scores = row.locator("td.base")
    assert [re.fullmatch(r"\d+\.\d%.*chance \d+\.\d%", text.strip(), re.DOTALL) is not None
            for text in scores.all_inner_texts()] == [True, True]  # fmt: skip
    assert all(map(_is_within_its_table, scores.all()))
    events = watched.open(PAGES["members"].format(run=run)).locator("td.events > div")
    assert len(events.all()) == 9, "the three newest of each of three clients"
    for event in events.all():
        assert _is_within_its_table(event)
        assert event.bounding_box()["width"] > 150, "events are broken into single words"


def _is_within_its_table(part: Locator) -> bool:
    """Return whether an element is shown in the part of its table that is visible without scrolling."""
    inside = "part => part.getBoundingClientRect().right <= part.closest('.scroll').getBoundingClientRect().right + 1"
    return part.is_visible() and part.evaluate(inside)


def test_the_sign_in_is_accessible(open_page: Open, axe: str) -> None:
    for palette in PALETTES:
        page = open_page("wide", palette, signed_in=False).open("/sign-in")
        _keep(page, f"sign-in-{palette}.png")


def _scroll(page: Page) -> None:
    """Scroll to the end, so that every chart is drawn, wait until all are drawn, and scroll back."""
    for place in range(0, page.evaluate("document.body.scrollHeight"), 600):
        page.evaluate("place => scrollTo(0, place)", place)
        page.wait_for_timeout(30)
    end = time.monotonic() + 20
    while not page.evaluate(DRAWN):  # the page's policy forbids `wait_for_function` to evaluate
        assert time.monotonic() < end, "a chart stays blank"
        page.wait_for_timeout(50)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(200)


def _keep(page: Page, name: str) -> None:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTIFACTS / name, full_page=True)
