"""Using the web page by keyboard, live, without scripts and without motion."""

import itertools
import re
import time
from uuid import UUID

from playwright.sync_api import Route, expect

from fedssl.client import Client
from fedssl.protocol.runs import RunSpec
from support.browsing import SPEC, Open
from support.evaluated_runs import DATASET
from support.tables import Tables

WORKERS = ["client-0", "client-1", "client-2"]


_CHART = """async () => {
  const { chart } = await import(document.querySelector('script[src$="/run.js"]').src.replace("run.js", "charts.js"));
  const place = Object.assign(document.createElement("div"), { id: "tested" });
  document.querySelector("main").prepend(place);
  const series = (y) => [{ label: "Linear probe", color: "accent", width: 2, y }];
  const shown = chart(place, { x: [0, 5, 9], series: series([0.1, 0.5, 0.6]), y: [0, 1] });
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  shown.set({ x: [0, 10, 20], series: series([0.1, 0.8, 0.9]) });
}"""

_ANNOUNCED = """() => {
  const status = document.querySelector(".top .live");
  window.said = [status.textContent.trim()];
  new MutationObserver(() => said.push(status.textContent.trim())).observe(status, { childList: true, subtree: true });
}"""

_SINGLE = """async () => {
  const { chart } = await import(document.querySelector('script[src$="/run.js"]').src.replace("run.js", "charts.js"));
  const place = document.createElement("div");
  document.querySelector("main").prepend(place);
  const uPlot = window.uPlot;
  window.uPlot = Object.assign(function (...of) { return (window.tested = new uPlot(...of)); }, uPlot);
  chart(place, { x: [0], series: [{ label: "kNN", color: "accent", width: 2, y: [0.1] }], y: [0, 1] });
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}"""

_ALARM = _SINGLE.replace(
    "y: [0.1] }], y: [0, 1] }", 'y: [0.5, 0.5, 0.5] }], y: [0, null], marks: [{ y: 2, text: "", zone: true }] }'
).replace("x: [0],", "x: [1, 2, 3],")

_PIXELS = """() => {
  const column = tested.ctx.getImageData(tested.bbox.left + 40, 0, 1, tested.ctx.canvas.height).data;
  return [0.5, 1.2].map((y) => [...column.slice(4 * Math.round(tested.valToPos(y, "y", true))).slice(0, 4)]);
}"""

_COLLAPSED = """async () => {
  const { src } = document.querySelector('script[src$="/run.js"]');
  const { plane } = await import(src.replace("run.js", "plane_and_heat.js"));
  const place = document.createElement("div");
  document.querySelector("main").prepend(place);
  const texts = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = (text) => texts.push(text);
  plane(place, () => [{ points: [[1e-14, 0, 0], [6e-14, 5e-15, 5]] }])();
  CanvasRenderingContext2D.prototype.fillText = write;
  return texts;
}"""


def _spec(name: str, **changes: object) -> RunSpec:
    cohort = {"clients": WORKERS, "min_clients": 3, "lease_seconds": 20}
    return RunSpec.model_validate({**SPEC, "name": name, "evaluation": None, "cohort": cohort, **changes})


def test_a_run_is_opened_and_a_stop_cancelled_by_keyboard(
    open_page: Open, client: Client, run: UUID, token: str
) -> None:
    stays = client.create_run(_spec("stays"), start=False).id
    page = open_page(signed_in=False).open("/sign-in")
    page.keyboard.type(token)
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs")
    page.keyboard.press("/")
    page.keyboard.type("stays")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Tab")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{stays}")
    page.locator("#actions a.bad").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#ask-stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#ask-stop")).to_be_hidden()
    page.locator("#actions a.bad").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#ask-stop button").first).to_be_focused()  # the one that changes nothing
    page.keyboard.press("Enter")
    expect(page.locator("#ask-stop")).to_be_hidden()
    assert client.run(stays).state == "created"
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("summary.who").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".menu[open]")).to_have_count(1)
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    expect(page.locator(".menu[open]")).to_have_count(0)
    expect(page.locator("summary.who")).to_be_focused()
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url("**/runs")


def test_two_runs_are_selected_and_compared(open_page: Open, client: Client, run: UUID) -> None:
    other = client.create_run(_spec("other", seed=8), start=False).id
    page = open_page().open("/runs")
    for key in ("j", "x", "j", "x", "c"):
        page.keyboard.press(key)
    page.wait_for_url("**/compare?**")
    expect(page.locator("h1")).to_have_text("Compare 2 runs")
    page.goto(f"/compare?runs={run},{other}")
    copied = page.evaluate(
        "getSelection().selectAllChildren(document.querySelector('table.diff')), getSelection().toString()"
    )
    assert re.search(r"Rounds closed\s+8\s+0\s", copied), copied  # values are separated from their changes
    assert re.search(r">\u22128</span>\s+<span", page.content())


def test_the_selection_is_restored_when_going_back_from_a_comparison(
    open_page: Open, client: Client, run: UUID
) -> None:
    client.create_run(_spec("another", seed=9), start=False)
    page = open_page().open("/runs")
    for box in page.locator("#list input[name=runs]").all()[:2]:
        box.check()
    page.click("#compare button.pri")
    page.wait_for_url("**/compare?**")
    page.go_back()
    expect(page.locator("#list input[name=runs]:checked")).to_have_count(2)  # the browser has restored them
    expect(page.locator("#compare output")).to_have_text("2")
    expect(page.locator("#list tr.sel")).to_have_count(2)


def test_a_search_is_kept_when_another_group_is_chosen(open_page: Open, client: Client, run: UUID) -> None:
    page = open_page().open("/runs")
    page.fill("#q", "digits")
    expect(page).to_have_url(re.compile("q=digits"))
    page.get_by_role("link", name=re.compile("^Finished")).click()
    expect(page).to_have_url(re.compile(r"group=finished&q=digits$"))
    expect(page.locator("#q")).to_have_value("digits")
    page.get_by_role("link", name=re.compile("^All")).click()
    page.fill("#q", "")
    expect(page).to_have_url(re.compile("q=$"))
    page.get_by_role("link", name=re.compile("^Active")).click()
    expect(page).to_have_url(re.compile(r"group=active$"))


def test_the_axis_of_a_single_round_is_one_round_wide(open_page: Open, run: UUID) -> None:
    page = open_page().open(f"/runs/{run}")
    page.evaluate(_SINGLE)
    assert page.evaluate("[window.tested.scales.x.min, window.tested.scales.x.max]") == [-0.5, 0.5]


def test_an_alarms_zone_is_in_the_chart_but_does_not_cover_the_lines(open_page: Open, run: UUID) -> None:
    page = open_page().open(f"/runs/{run}")
    page.evaluate(_ALARM)
    assert page.evaluate("window.tested.scales.y.max") >= 2
    line, zone = page.evaluate(_PIXELS)
    assert line != zone


def test_a_collapsed_encoders_path_has_few_ticks(open_page: Open, run: UUID) -> None:
    page = open_page().open(f"/runs/{run}")
    texts = page.evaluate(_COLLAPSED)
    assert len(texts) < 20
    assert "5.0e\u221215" in texts


def test_the_divergence_of_a_single_update_is_shown(open_page: Open, client: Client, run: UUID) -> None:
    cohort = {"clients": ["client-0"], "min_clients": 1, "lease_seconds": 20}
    single = client.create_run(_spec("single", num_rounds=1, cohort=cohort)).id
    client.wait(single)
    page = open_page().open(f"/runs/{single}")
    page.locator("#heat").scroll_into_view_if_needed()
    expect(page.locator("#heat canvas")).to_be_visible()


def test_values_that_a_logarithmic_axis_leaves_out_are_counted(open_page: Open, client: Client, run: UUID) -> None:
    """SSD's loss is negative, and a logarithmic axis of rounds cannot show round 0 either."""
    page = open_page().open(f"/compare?runs={run}&y=loss&scale=log")
    expect(page.locator("#left-out")).to_have_text(
        "Not drawn, because a logarithmic axis begins above 0: 8 values of digits-ssd."
    )
    page = open_page().open(f"/compare?runs={run}&scale=log-x")
    expect(page.locator("#left-out")).to_contain_text("1 value of digits-ssd.")
    page = open_page().open(f"/compare?runs={run}")
    expect(page.locator("#left-out")).to_be_hidden()


def test_a_live_page_shows_progress_and_keeps_the_focus(open_page: Open, client: Client, run: UUID) -> None:
    live = client.create_run(_spec("live", num_rounds=12)).id
    page = open_page().open(f"/runs/{live}")
    expect(page.locator(".top .live")).to_have_text("Live", timeout=20_000)
    page.locator("#terms button").first.focus() if page.locator("#terms button").count() else page.focus("#gantt")
    place = page.evaluate("document.activeElement.outerHTML")
    closed = page.locator("#strip progress")
    expect(closed).not_to_have_attribute("value", "0", timeout=60_000)
    assert page.evaluate("document.activeElement.outerHTML") == place
    page.locator("#actions a.bad").click()
    page.locator("#ask-stop button.bad").click()
    expect(page.locator("#state")).to_contain_text("Stopped", timeout=20_000)
    assert client.run(live).outcome == "stopped"


def test_a_page_opened_before_the_first_update_gets_all_panels_and_results(
    open_page: Open, client: Client, run: UUID
) -> None:
    """It gets its panels and finally the last evaluation, which is done after the end of the run."""
    evaluation = {"dataset": DATASET, "every": 0}
    fresh = client.create_run(_spec("fresh", num_rounds=2, evaluation=evaluation), start=False).id
    page = open_page().open(f"/runs/{fresh}")
    expect(page.locator(".top .live")).to_have_text("Live", timeout=20_000)
    expect(page.locator("#terms")).to_be_hidden()
    expect(page.locator("#downloads")).to_contain_text("There are no weights yet")
    expect(page.locator("#ask-stop")).not_to_contain_text("Round 2")
    client.start(fresh)
    for panel in ("loss", "watch", "heat"):
        page.locator(f"#{panel}").scroll_into_view_if_needed()
        expect(page.locator(f"#{panel} canvas").first).to_be_visible(timeout=60_000)
    uniformity = page.locator("#terms button", has_text="uniformity")
    uniformity.click()
    expect(uniformity).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#strip")).to_contain_text(re.compile(r"Linear probe\s*[0-9]"), timeout=60_000)
    expect(page.locator("#accuracy canvas").first).to_be_visible(timeout=20_000)
    expect(page.locator(".top .live")).to_have_text("Finished", timeout=20_000)
    expect(page.locator("#downloads")).to_contain_text("Weights of round 2")
    expect(page.get_by_role("link", name="New map")).to_be_visible()
    expect(uniformity).to_have_attribute("aria-pressed", "true")


def test_reasons_stay_next_to_their_clients(open_page: Open, large_run: UUID, tables: Tables) -> None:
    """Clients with an exception come first. When one of them has no exception any more, other rows are shown."""
    page = open_page().open(f"/runs/{large_run}")
    shown = "id => [...document.querySelectorAll(`#${id} [data-client]`)].map(row => row.dataset.client)"
    before = page.evaluate(shown, "names")
    part = "WHERE run_id = %s AND round_number = 500 AND client_id = %s"
    tables.execute(
        f"UPDATE assignments SET state = 'accepted', update_digest = repeat('ab', 32) {part}", large_run, before[0]
    )
    page.evaluate("document.body.dispatchEvent(new CustomEvent('run:changed'))")
    expect(page.locator(f'#why [data-client="{before[0]}"]')).to_have_count(0)
    after = page.evaluate(shown, "names")
    tables.execute(f"UPDATE assignments SET state = 'expired', update_digest = NULL {part}", large_run, before[0])
    assert after[:-1] == before[1:]
    assert after == page.evaluate(shown, "why")


def test_an_open_question_is_not_replaced_by_an_update(open_page: Open, client: Client, run: UUID) -> None:
    waits = client.create_run(_spec("waits", cohort={"clients": [*WORKERS, "nobody"], "min_clients": 4})).id
    watched = open_page()
    page = watched.open(f"/runs/{waits}")
    page.locator("#stop").focus()
    page.evaluate("document.body.dispatchEvent(new CustomEvent('run:changed'))")
    page.wait_for_timeout(1000)
    expect(page.locator("#stop")).to_be_focused()
    page.keyboard.press("Enter")
    mark = "for (const verb of ['stop', 'pause']) document.querySelector(`#ask-${verb} h2`).dataset.mark = 1"
    page.evaluate(mark)
    page.evaluate("document.body.dispatchEvent(new CustomEvent('run:changed'))")
    expect(page.locator("#ask-pause h2[data-mark]")).to_have_count(0)
    expect(page.locator("#ask-stop h2[data-mark]")).to_have_count(1)
    page.evaluate("document.querySelector('#stop').replaceWith(document.querySelector('#stop').cloneNode(true))")
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_focused()
    gone = f"/runs/{UUID(int=7)}/live"
    page.route("**/live?*", lambda route: route.continue_(url=route.request.url.split("/runs/")[0] + gone))
    expect(page.locator(".top .live")).to_have_text("Deleted", timeout=20_000)
    expect(page.locator("#reason")).to_contain_text("There is no run")
    expect(page.locator("#actions")).to_be_empty()
    client.stop(waits)
    watched.complaints.clear()  # the complaints about the answers of 404


def test_a_stream_is_opened_again_after_an_error(open_page: Open, client: Client, run: UUID) -> None:
    """A proxy may answer 404 while the coordinator restarts, after which browsers do not reconnect by themselves."""
    live = client.create_run(_spec("again", num_rounds=200)).id
    watched, answers = open_page(), iter([404, 404])

    def answer(route: Route) -> None:
        status = next(answers, None)
        route.continue_() if status is None else route.fulfill(status=status, body="")

    watched.page.route("**/stream?*", answer)
    page = watched.open(f"/runs/{live}")
    page.set_viewport_size({"width": 320, "height": 640})
    expect(page.locator(".top .live")).to_have_text("No connection", timeout=20_000, use_inner_text=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    expect(page.locator(".top .live")).to_have_text("Live", timeout=30_000)
    client.stop(live)
    expect(page.locator("#announced")).to_contain_text("Stopped. Stopped by an operator", timeout=20_000)


def test_a_stream_that_delivers_nothing_is_opened_again(open_page: Open, client: Client, run: UUID) -> None:
    """A connection that was lost while the computer slept reports no error."""
    live = client.create_run(_spec("silent", num_rounds=200)).id
    watched, held = open_page(), list[Route]()
    watched.page.route("**/stream?*", lambda route: route.continue_() if held else held.append(route))
    page = watched.open(f"/runs/{live}")
    with page.expect_request("**/stream?*", timeout=30_000):
        pass
    expect(page.locator(".top .live")).to_have_text("Live", timeout=20_000)
    client.stop(live)


def test_a_page_shown_again_after_signing_out_asks_to_sign_in(open_page: Open, run: UUID) -> None:
    """Safari keeps pages over plain HTTP, and shows them when a person goes back."""
    page = open_page().open("/clients")
    shown_again = "dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))"
    with page.expect_response("**/session"):
        page.evaluate(shown_again)
    expect(page.locator("h1")).to_be_visible()
    page.context.clear_cookies()
    page.evaluate(shown_again)
    page.wait_for_url("**/sign-in?next=/clients")


def test_drawing_does_not_change_its_own_size_again(open_page: Open, run: UUID) -> None:
    page = open_page().page
    page.add_init_script("window.errors = []; addEventListener('error', (event) => errors.push(event.message))")
    page.goto(f"/runs/{run}")
    page.wait_for_selector("#embedding canvas")
    page.wait_for_timeout(500)
    assert page.evaluate("errors") == []


def test_an_update_keeps_the_selected_text_and_the_focus(open_page: Open, large_run: UUID) -> None:
    page = open_page().open(f"/runs/{large_run}")
    page.evaluate("document.querySelector('#why').append(' ')")  # the difference causes it to be replaced
    page.focus("#why a")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#log li'))")
    selected = page.evaluate("String(getSelection())")
    with page.expect_response("**/live?*"):
        page.evaluate("document.body.dispatchEvent(new CustomEvent('run:changed'))")
    expect(page.locator("#why a")).to_be_focused()
    assert page.evaluate("String(getSelection())") == selected != ""


def test_charts_that_are_not_loaded_are_not_shown_as_missing(open_page: Open, run: UUID) -> None:
    """This holds while a slow connection loads them, and after a failure."""
    watched, held = open_page(), list[Route]()
    watched.page.route("**/curves.json*", lambda route: held.append(route))
    watched.page.goto(f"/runs/{run}")
    watched.page.wait_for_timeout(500)
    chart = watched.page.locator("#accuracy")
    expect(chart).to_be_empty()
    held.pop().abort()
    expect(chart).to_contain_text("could not be loaded")
    expect(chart).to_have_attribute("role", "group")
    watched.page.unroute("**/curves.json*")
    watched.page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    expect(chart.locator("canvas").first).to_be_visible()
    watched.complaints.clear()  # the complaint about the request above


def test_a_slow_connection_has_one_request_per_chart_and_the_status_is_announced_once(
    open_page: Open, client: Client, run: UUID
) -> None:
    waits = client.create_run(_spec("slow", cohort={"clients": [*WORKERS, "nobody"], "min_clients": 4})).id
    watched, held = open_page(), list[Route]()
    event = 'retry: 100\nid: 1\ndata: {"kind": "round.closed"}\n\n'  # after which the browser reconnects at once
    watched.page.route("**/stream?*", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
    watched.page.route("**/curves.json", lambda route: held.append(route))
    page = watched.open(f"/runs/{waits}")
    page.evaluate(_ANNOUNCED)
    for _ in range(4):
        with page.expect_response("**/live?*"):
            pass
    assert len(held) == 1
    said = page.evaluate("said")
    assert all(one != other for one, other in itertools.pairwise(said)), said
    with page.expect_request("**/curves.json"):  # for the change that was requested meanwhile
        held[0].continue_()
    client.stop(waits)


def test_a_selection_of_runs_survives_a_filter(open_page: Open, client: Client, run: UUID) -> None:
    for name in ("picked", "left"):
        client.create_run(_spec(name), start=False)
    page = open_page().open("/runs")
    page.get_by_label("Select picked").check()
    page.fill("#q", "left")
    expect(page.locator("#list tbody tr")).to_have_count(1)
    expect(page.locator("#found")).to_have_text("1 row")
    expect(page.locator("#compare output")).to_have_text("1")
    page.get_by_label("Select left").check()
    page.get_by_role("link", name=re.compile("^Finished")).click()
    expect(page.locator("#compare output")).to_have_text("2")
    page.goto("/clients")
    page.goto("/runs?q=picked")
    expect(page.get_by_label("Select picked")).to_be_checked()
    page.click("#compare button.pri")
    expect(page.locator("h1")).to_have_text("Compare 2 runs")


def test_a_narrow_page_has_every_column_with_its_heading(open_page: Open, run: UUID) -> None:
    page = open_page("phone").open(f"/runs/{run}/jobs")
    row = page.locator("tbody tr").first
    expect(row.locator('td[data-label="kNN"]')).to_be_visible()
    expect(row.locator('td[data-label="Uniformity"]')).to_be_visible()
    heading = "cell => getComputedStyle(cell, '::before').content"
    assert row.locator('td[data-label="kNN"]').evaluate(heading) == '"kNN"'
    expect(page.get_by_role("link", name="Compare")).to_be_visible()
    page.goto("/clients/client-0")
    page.locator(".ledger .l-k a").first.click()  # nothing covers it
    page.wait_for_url("**/rounds/*")


def test_a_page_is_printed_in_the_light_theme_with_all_charts(open_page: Open, run: UUID) -> None:
    page = open_page("phone", "dark").open(f"/runs/{run}")
    for panel in ("heat", "embedding"):
        expect(page.locator(f"#{panel} canvas")).to_have_count(1)
    page.evaluate("addEventListener('beforeprint', () => { window.printed = document.documentElement.dataset.theme })")
    page.pdf()
    assert page.evaluate("printed") == "light"
    assert page.evaluate("document.documentElement.dataset.theme") is None


def test_a_tooltip_shows_the_current_values_of_an_updated_chart(open_page: Open, run: UUID) -> None:
    page = open_page().open(f"/runs/{run}")
    page.evaluate(_CHART)
    box = page.locator("#tested .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator(".tip")
    expect(tip).to_contain_text("Round 10")
    expect(tip).to_contain_text("0.8")


def test_the_timeline_uses_the_servers_clock(open_page: Open, run: UUID) -> None:
    """The browser's own clock is ten minutes slow."""
    now = time.time() + 600
    lasting = {"round": 1, "client": "client-0", "attempt": 1, "state": "leased", "reason": None, "closed": None}
    frame = {
        "now": now,
        "rounds": [{"number": 1, "state": "open", "reason": None, "opened": now - 40, "closed": None}],
        "parts": [{**lasting, "offered": now - 40, "leased": now - 30, "bytes": None}],
        "jobs": [],
    }
    watched = open_page()
    watched.page.route("**/timeline.json?*", lambda route: route.fulfill(json=frame))
    page = watched.open(f"/runs/{run}")
    picture = page.locator("#gantt canvas")
    box = picture.bounding_box()
    assert box is not None
    picture.hover(position={"x": box["width"] * 0.6, "y": 73})
    expect(page.locator(".tip")).to_contain_text(re.compile("working for3[0-9] s"))


def test_the_timeline_shows_the_most_recently_requested_rounds(open_page: Open, run: UUID) -> None:
    watched, held = open_page(), list[Route]()
    watched.page.route("**/timeline.json?*last=7", lambda route: held.append(route))
    page = watched.open(f"/runs/{run}")
    page.focus("#gantt")
    page.keyboard.press("[")
    page.locator("#gantt canvas").click(position={"x": 20, "y": 10})  # the first round and the following one
    page.wait_for_timeout(500)
    with page.expect_response("**/timeline.json?*last=7"):
        held[0].continue_()
    page.wait_for_timeout(300)
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#gantt-say")).to_contain_text("round 1:")
    page.get_by_role("button", name="All rounds").click()
    expect(page.locator("#gantt-sub")).to_have_text("outcome of every round")
    page.focus("#gantt")
    for key in ("ArrowDown", "End", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator("#gantt-say")).to_have_text("client-1, round 7: update accepted")
    expect(page.locator(".tip")).to_contain_text("round 7update accepted")


def test_errors_are_shown_next_to_their_fields_while_typing(open_page: Open, client: Client, run: UUID) -> None:
    watched = open_page()
    page = watched.open("/runs/new?method=fedbyol")
    page.fill("#f-num_rounds", "0")
    expect(page.locator('.err[data-for="num_rounds"]')).to_contain_text("greater than or equal to 1")
    expect(page.locator("#f-num_rounds")).to_be_focused()
    expect(page.locator("#f-num_rounds")).to_have_accessible_description(re.compile("greater than or equal to 1"))
    expect(page.locator("#checked")).to_have_text("1 setting is not valid")
    page.click("text=Create, start later")
    expect(page.locator("#f-num_rounds")).to_be_focused()
    watched.complaints.clear()  # the complaint about the answer of 422
    page.fill("#f-num_rounds", "2")
    expect(page.locator('.err[data-for="num_rounds"]')).to_be_empty()
    page.fill("#f-name", "made by hand")
    expect(page.locator("pre.spec")).to_contain_text("made by hand")
    expect(page.locator("#estimate[data-measuring]")).to_have_count(0)  # otherwise its next request is interrupted
    page.click("text=Create, start later")
    page.wait_for_url("**/runs/*-*")
    expect(page.locator("h1")).to_have_text("made by hand")


def test_a_check_that_fails_replaces_the_earlier_result(open_page: Open, run: UUID) -> None:
    watched = open_page()
    page = watched.open("/runs/new?method=fedbyol")
    expect(page.locator("#check")).to_contain_text("These settings are valid")
    said = '<div class="note bad" role="alert">The database does not answer.</div>'
    wrong = [(502, "<h1>Bad gateway</h1>", "an error (502)"), (503, said, "The database does not answer.")]
    answers = iter(wrong)

    def answer(route: Route) -> None:
        status, body, _ = next(answers)
        route.fulfill(status=status, body=body)

    page.route("**/runs/new/check", answer, times=len(wrong))
    for number, (_, _, words) in enumerate(wrong, start=2):
        page.fill("#f-num_rounds", str(number))
        expect(page.locator("#check")).to_contain_text(words)
        expect(page.locator("#check")).not_to_contain_text("settings are valid")
    page.route("**/runs/new/check", lambda route: route.abort(), times=1)
    page.fill("#f-num_rounds", "7")
    expect(page.locator("#check")).to_contain_text("No connection")
    page.fill("#f-num_rounds", "8")
    expect(page.locator("#check")).to_contain_text("These settings are valid")
    assert page.evaluate("htmx.config.timeout") == 60_000
    page.evaluate("htmx.config.timeout = 300")
    page.route("**/runs/new/check", lambda route: None, times=1)  # it is never answered
    page.fill("#f-num_rounds", "9")
    expect(page.locator("#check")).to_contain_text("No connection")
    page.fill("#f-num_rounds", "8")
    expect(page.locator("#check")).to_contain_text("These settings are valid")
    watched.complaints.clear()  # the complaints about the answers above


def test_durations_bytes_and_numbers_are_formatted_readably(open_page: Open, run: UUID) -> None:
    page = open_page().open(f"/runs/{run}")
    folder = page.evaluate("document.querySelector('script[src$=\"/run.js\"]').src.replace('run.js', '')")
    write = "async ([folder, all]) => { const f = await import(`${folder}format.js`); return all.map(f.seconds); }"
    shown = page.evaluate(write, [folder, [9.96, 59.7, 119.7, 3599.6, 7199]])
    assert shown == ["10 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 0 min"]
    shown = page.evaluate(write.replace("f.seconds", "f.bytes"), [folder, [999, 999_499, 999_700, 2.56e6, 1e15]])
    assert shown == ["999 B", "999 kB", "1.00 MB", "2.56 MB", "1.00 PB"]
    shown = page.evaluate(write.replace("f.seconds", "f.short"), [folder, [1.25, 4321, -2e9]])
    assert shown == ["1.25", "4,321", "\u22122.0e+9"]


def test_every_methods_form_opens(open_page: Open, client: Client, run: UUID) -> None:
    """Methods are chosen from the list, as a user does. `Watched` fails if a page logs a complaint."""
    page = open_page().open("/runs/new")
    methods = page.locator("#method option").evaluate_all("options => options.map(option => option.value)")
    assert sorted(methods) == sorted(method.name for method in client.methods())
    for method in methods:
        if page.locator("#method").input_value() != method:
            with page.expect_navigation(url="**/runs/new/settings"):
                page.select_option("#method", method)
        expect(page.locator("#method")).to_have_value(method)
        page.fill("#f-num_rounds", "3")
        expect(page.locator("pre.spec")).to_contain_text('"num_rounds": 3')
        assert page.locator('[name^="spec.method."]').count() >= 1, method


def test_the_map_is_changed_by_keyboard_with_its_slider(open_page: Open, client: Client, run: UUID) -> None:
    page = open_page().open(f"/runs/{run}")
    page.locator("#embedding").scroll_into_view_if_needed()
    says = page.locator("#embedding-says")
    expect(says).to_have_text("Round 8")
    newest = page.locator("#embedding canvas").screenshot()
    page.locator("#embedding-round").focus()
    page.keyboard.press("Home")
    expect(says).to_have_text("Before training")
    expect(page.locator("#embedding-round")).to_have_attribute("aria-valuetext", "Before training")
    assert page.locator("#embedding canvas").screenshot() != newest
    page.keyboard.press("ArrowRight")
    expect(says).to_have_text("Round 2")
    expect(page.locator("#embedding")).to_have_attribute("aria-label", re.compile("360 test images of digits"))
    page.locator("#embedding-play").press("Enter")
    expect(says).to_have_text("Round 8", timeout=10_000)
    expect(page.locator("#embedding-play")).to_have_attribute("aria-pressed", "false")


def test_charts_link_to_their_tables_without_scripts(open_page: Open, run: UUID) -> None:
    page = open_page(java_script_enabled=False).open(f"/runs/{run}")
    expect(page.locator("#accuracy")).to_be_hidden()
    page.locator("section", has_text="Local loss").get_by_role("link", name="Rounds").first.click()
    page.wait_for_url("**/rounds")


def test_a_run_can_be_read_and_stopped_without_scripts(open_page: Open, client: Client, run: UUID) -> None:
    plain = client.create_run(_spec("plain", cohort={"clients": [*WORKERS, "nobody"], "min_clients": 4})).id
    page = open_page(java_script_enabled=False).open("/runs?q=plain")
    while "creating the initial weights" in page.locator("tbody").inner_text():
        page.reload()  # the page does not reload itself without scripts
    expect(page.locator("tbody")).to_contain_text("3 of 4 have registered")
    page.get_by_role("link", name="plain").click()
    page.locator("#actions a.bad").click()
    page.get_by_role("button", name="Stop run").click()
    expect(page.locator("#state")).to_contain_text("Stopped")
    assert client.run(plain).outcome == "stopped"


def test_revoking_a_client_requires_typing_its_name(open_page: Open, client: Client, large_run: UUID) -> None:
    page = open_page().open("/clients/site-200")
    page.click("text=Revoke")
    armed = page.locator("#ask-revoke [data-armed]")
    expect(armed).to_be_disabled()
    page.fill("#ask-revoke input.in", "site-20")
    expect(armed).to_be_disabled()
    page.fill("#ask-revoke input.in", "site-200")
    armed.click()
    expect(page.locator("h1 + .st")).to_contain_text("Revoked")
    assert client.client("site-200").revoked_at is not None


def test_nothing_is_animated_if_reduced_motion_is_requested(open_page: Open, run: UUID) -> None:
    page = open_page(reduced_motion="reduce").open(f"/runs/{run}")
    assert page.evaluate("document.getAnimations().length") == 0


def test_charts_are_drawn_with_an_invalid_browser_language(open_page: Open, run: UUID) -> None:
    watched = open_page()
    posix = "Object.defineProperty(navigator, 'language', { value: 'en-US@posix', configurable: true })"
    watched.page.context.add_init_script(posix)
    page = watched.open(f"/runs/{run}")
    expect(page.locator(".uplot").first).to_be_visible()


def test_the_chosen_theme_is_kept_after_a_reload(open_page: Open, run: UUID) -> None:
    page = open_page().open("/runs")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    page.keyboard.press("t")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_the_form_shows_the_settings_of_the_chosen_options_and_an_estimate(
    open_page: Open, client: Client, run: UUID
) -> None:
    page = open_page().open("/runs/new?template=quick")
    mean = page.locator('fieldset[data-option="mean"]')
    expect(mean).to_be_visible()
    page.select_option('[id="f-method.reducer"]', "ldawa")
    expect(mean).to_be_hidden()
    expect(page.locator('fieldset[data-option="ldawa"]')).to_be_visible()
    estimate = page.locator("#estimate")
    expect(estimate).to_contain_text(re.compile(r"In total\s*[0-9.]+ kB|In total\s*[0-9.]+ MB"), timeout=60_000)
    page.check('[name="client.client-1"]')
    expect(estimate).to_contain_text(re.compile(r"take part\s*1\b"), timeout=20_000)
    page.fill('[id="f-num_rounds"]', "many")
    expect(page.locator('.err[data-for="num_rounds"]')).to_have_text("write a whole number", timeout=20_000)
    page.fill('[id="f-num_rounds"]', "2")
    expect(page.locator('.err[data-for="num_rounds"]')).to_have_text("", timeout=20_000)
    page.select_option("#method", "fedbyol")
    expect(page.locator(".stick h2").first).to_have_text("FedBYOL", timeout=20_000)
    expect(page.locator('[id="f-num_rounds"]')).to_have_value("2")
    expect(page.locator('[name="client.client-1"]')).to_be_checked()


def test_a_secure_round_shows_its_phase_and_what_was_revealed(open_page: Open, client: Client) -> None:
    spec = _spec(
        "secure",
        num_rounds=1,
        method={"name": "fedsimclr"},
        aggregation={"arithmetic": "fixed"},
        secure_aggregation={"min_cohort": 3, "collusion": 0},
    )
    made = client.create_run(spec).id
    for _ in client.events(made):
        pass  # waits until the run has finished
    assert client.run(made).outcome == "completed", client.run(made).reason
    page = open_page().open(f"/runs/{made}/rounds/1")
    section = page.get_by_role("region", name="Secure aggregation")
    expect(section).to_contain_text("phase done")
    expect(section).to_contain_text(f"of the own masks of {', '.join(WORKERS)}")
    expect(section).to_contain_text("No cryptographer outside this project has reviewed the protocol.")
    page.goto(f"/runs/{made}")
    expect(page.get_by_text("sums of 3 updates or more. Not promised")).to_be_visible()
    expect(page.locator("#loss")).to_contain_text("Clients do not send their own losses in this run")
    losses = [metric.value for metric in client.metrics(made, "loss")]
    assert len(losses) == 1
