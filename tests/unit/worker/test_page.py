"""The data owner's page: a real process, queried over HTTP, for a ledger that is being written, long or damaged."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import httpx
import pytest

from fedssl.files import write_atomically
from fedssl.protocol.work import WorkItem
from fedssl_worker.current_work import CurrentWork, read_current_work
from fedssl_worker.disclosure.ledger.entries import LedgerEntry, entry_hash
from fedssl_worker.disclosure.ledger.segments import write_head
from fedssl_worker.disclosure.ledger.verification import read_entries
from fedssl_worker.disclosure.policy import LedgerRules
from fedssl_worker.main import app
from fedssl_worker.page.ledger_index import LedgerIndex
from fedssl_worker.page.view import View

from .conftest import make_item, make_spec
from .ledgers import FIELDS, FIRST, SHORT, filled

pytestmark = pytest.mark.full


POLICY = """
schema = 1
client = "site"
coordinator = "https://fedssl.example.org"
max_bytes_total = 5000

[[allow]]
artifact = "weights"
methods = ["ssd"]
max_bytes = 1000
"""


class Page:
    """A running page: the addresses that it printed, and a client that keeps cookies."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._process = process
        self.address = process.stdout.readline().strip()
        self.url = self.address.partition("/?")[0]
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60, follow_redirects=True)

    def next_address(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def get(self, path: str = "/", **headers: str) -> httpx.Response:
        return self.http.get(path, headers=headers)

    def await_text(self, text: str, path: str = "/") -> str:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if text in (found := self.get(path).text):
                return found
            time.sleep(0.1)
        raise AssertionError(f"{text!r} is not on the page:\n{found}")


@contextmanager
def serving(state: Path, *arguments: str) -> Iterator[Page]:
    command = [sys.executable, "-m", "fedssl_worker", "page", "--state", str(state), "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    try:
        page = Page(process)
        with page.http:
            yield page
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@contextmanager
def opened(state: Path, *arguments: str) -> Iterator[Page]:
    with serving(state, *arguments) as page:
        assert page.get(page.address).status_code == 200
        yield page


@pytest.fixture
def state(tmp_path: Path) -> Path:
    ledger = filled(tmp_path / "ledger", 2)
    ledger.append("intent", **{**FIELDS, "round": 3, "run": "other-run", "numbers": ["loss=0.5"]})
    ledger.append("refused", run="other-run", round=4, method="ssd", reason="the policy <forbids> this work")
    ledger.close()
    return tmp_path


def _outcomes(text: str) -> list[str]:
    return re.findall(r'<td class="(sent|unconfirmed|refused)">', text)


def test_the_page_lists_sent_and_refused_updates_with_reasons(state: Path) -> None:
    before = {path: path.read_bytes() for path in (state / "ledger").iterdir()}
    with opened(state) as page:
        text = page.await_text("intact, 7 entries")
        assert "the policy &lt;forbids&gt; this work" in text
        assert _outcomes(text) == ["refused", "unconfirmed", "sent", "sent"]
        assert "weights: 1 tensor; metrics: loss" in text
        assert "36 bytes" in text
        assert "No policy is in force" in text
        assert "The worker has no work at the moment" in text
        refused = page.get("/?outcome=refused").text
        assert _outcomes(refused) == ["refused"]
        assert "No entry matches" in page.get("/?run=nothing").text
    assert {path: path.read_bytes() for path in (state / "ledger").iterdir()} == before


def test_each_address_works_in_only_one_browser(state: Path) -> None:
    with serving(state) as page:
        assert page.get().status_code == 403
        assert page.get("/?key=wrong").status_code == 403
        assert page.get("/?key=%C3%BC").status_code == 403
        answer = page.get(page.address)
        assert answer.status_code == 200
        assert str(answer.url) == page.url + "/", "the key is not left in the browser's history"
        [cookie] = [part.headers["set-cookie"] for part in answer.history]
        assert "HttpOnly; SameSite=Strict" in cookie
        assert page.get().status_code == 200
        assert httpx.get(page.address, trust_env=False, timeout=60).status_code == 403, "it was used"
        assert httpx.get(page.next_address(), trust_env=False, timeout=60).status_code == 303


def test_requests_with_a_foreign_host_name_are_refused(state: Path) -> None:
    with opened(state) as page:
        port = page.url.rpartition(":")[2]
        assert page.get(Host=f"localhost:{port}").status_code == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil.example:{port}"):
            answer = page.get(Host=host)
            assert answer.status_code == 421
            assert "ledger" not in answer.text


def test_headers_forbid_scripts_and_other_hosts(state: Path) -> None:
    with opened(state) as page:
        for path in ("/", "/page.css", "/nothing"):
            answer = page.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script" not in policy
            assert answer.headers["cache-control"] == "no-store"
        assert "<script" not in page.get().text
        assert not re.search(r'(?:src|href)="(?:https?:)?//', page.get().text)
        assert page.http.post("/").status_code == 501


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "localhost"])
def test_the_page_listens_on_loopback_only(state: Path, host: str) -> None:
    command = [sys.executable, "-m", "fedssl_worker", "page", "--state", str(state), "--host", host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"--host {host}: the page shows what left this machine" in done.stderr
    assert "only listens on 127.0.0.1 or ::1" in done.stderr


def test_a_missing_state_and_a_port_in_use_are_refused(tmp_path: Path, state: Path) -> None:
    from typer.testing import CliRunner

    missing = CliRunner().invoke(app, ["page", "--state", str(tmp_path / "missing")])
    assert (missing.exit_code, "give the worker's --state" in missing.output) == (2, True)
    with serving(state) as page:
        port = page.url.rpartition(":")[2]
        taken = CliRunner().invoke(app, ["page", "--state", str(state), "--port", port])
        assert (taken.exit_code, "choose another --port" in taken.output) == (2, True)


def test_the_page_follows_a_ledger_that_is_being_written(state: Path) -> None:
    from fedssl_worker.disclosure.ledger import Ledger

    ledger = Ledger(state / "ledger", rules=SHORT)  # rotates while the page reads
    with opened(state) as page:
        page.await_text("intact, 7 entries")
        for number in range(10, 20):
            intent = ledger.append("intent", **{**FIELDS, "round": number})
            ledger.append("sent", round=number, intent=intent.seq)
        text = page.await_text("Unconfirmed</dt>\n            <dd>1<")
        assert "damaged" not in text
        page.await_text('<td class="num">19</td>')
    ledger.append("sent", round=19, intent=intent.seq)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"round":2', b'"round":9', f"{FIRST}, line 4: entry 4 was changed: its hash does not match"),
        (b'"kind":"sent"', b"garbage", f"{FIRST}, line 3: this is not an entry"),
    ],
)
def test_damage_is_shown_with_its_position(state: Path, old: bytes, new: bytes, said: str) -> None:
    path = state / "ledger" / FIRST
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with opened(state) as page:
        text = page.await_text("The ledger is damaged")
        assert said in text
        assert "intact" not in text


def test_a_ledger_whose_end_was_cut_off_is_shown_as_damaged(state: Path) -> None:
    path = state / "ledger" / FIRST
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    with opened(state) as page:
        assert "its end was cut off" in page.await_text("The ledger is damaged")


def test_an_incomplete_last_line_is_not_shown_as_damage(state: Path) -> None:
    path = state / "ledger" / FIRST
    path.write_bytes(path.read_bytes() + b'{"body":{"kind":"int')
    with opened(state) as page:
        page.await_text("intact, 7 entries")


def test_a_ledger_without_its_archived_segments_is_shown_as_intact(tmp_path: Path) -> None:
    filled(tmp_path / "ledger", 6, SHORT).close()
    (tmp_path / "ledger" / FIRST).unlink()
    with opened(tmp_path) as page:
        text = page.await_text("intact")
        assert "Earlier files of the ledger are missing" not in text, "the next one begins with the totals"


def test_the_page_shows_the_current_work_and_what_it_would_send(state: Path) -> None:
    item: WorkItem = make_item(make_spec(), 2)
    shown = CurrentWork(state)
    (state / "policy.toml").write_text(POLICY)
    with opened(state, "--policy", str(state / "policy.toml")) as page:
        page.await_text("intact")
        with shown.shown(item):
            text = page.get().text
        assert f"of {item.spec.num_rounds} of the run" in text
        assert "The policy refuses it:" in text
        assert "at most" in text
        assert "masked vectors" not in text
        masked = make_spec(aggregation={"arithmetic": "fixed"}, secure_aggregation={"min_cohort": 3})
        with shown.shown(make_item(masked, 2)):
            assert "or up to about twice that as the masked vectors that leave" in " ".join(page.get().text.split())
        assert "36 bytes of at most 5.0 kB" in text
        assert "The worker has no work" in page.get().text
        (state / "policy.toml").write_text("schema = 2")
        assert "cannot be used" in page.get().text


def test_work_is_shown_until_it_has_ended(tmp_path: Path) -> None:
    item: WorkItem = make_item(make_spec(), 2)
    with CurrentWork(tmp_path).shown(item):
        assert read_current_work(tmp_path) == item
        assert ((tmp_path / "work.json").stat().st_mode & 0o777) == 0o600
    assert read_current_work(tmp_path) is None
    write_atomically(tmp_path / "work.json", "{")
    assert read_current_work(tmp_path) is None
    with CurrentWork(tmp_path / "not-there").shown(item):
        assert read_current_work(tmp_path / "not-there") is None, "work continues although it cannot be shown"


def test_a_hundred_thousand_entries_are_read_once_and_paged(tmp_path: Path) -> None:
    folder, run = tmp_path / "ledger", str(UUID(int=7))
    filled(folder, 0, LedgerRules(sign=False)).close()
    [last] = read_entries(folder)
    with (folder / FIRST).open("ab") as file:
        for number in range(50_000):
            about = {**FIELDS, "run": run, "round": number, "digest": f"{number:064x}", "policy": "none"}
            for kind, more in (("intent", {}), ("sent", {"intent": last.seq + 1})):
                body = {**about, "kind": kind, "seq": last.seq + 1, "time": "2026-11-23T12:00:00.000+00:00", **more}
                last = LedgerEntry(body, entry_hash(last.hash, body), last.hash, "")
                file.write(last.line())
    write_head(folder, last.seq, last.hash)
    index = LedgerIndex(folder)
    index.read()
    assert (index.overview().damage, index.overview().num_entries) == (None, 100_001)
    assert index.overview().num_bytes == 50_000 * FIELDS["bytes"]
    began = time.monotonic()
    index.read()
    rows, count = index.rows("sent", run[:8], 49_900, 100)
    assert (count, len(rows), rows[-1].round_number) == (50_000, 100, 0)
    assert time.monotonic() - began < 1, "nothing is read again"
    view = View(tmp_path, None, index)
    last_page = view.render(outcome="", run="", page=500)
    assert "intact, 100,001 entries" in last_page
    assert "Page 500 of 500" in last_page
    assert len(last_page) < 200_000
    assert "Page 500 of 500" in view.render(outcome="", run="", page=99_999_999)


def test_reading_can_be_stopped(state: Path) -> None:
    stop = threading.Event()
    reader = threading.Thread(target=LedgerIndex(state / "ledger").follow, args=(stop,))
    reader.start()
    stop.set()
    reader.join(5)
    assert not reader.is_alive()
