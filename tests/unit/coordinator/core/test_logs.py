"""The format and the subject of log lines."""

import logging
import re
import threading
from collections.abc import Callable
from contextvars import copy_context

import httpx
import pytest
import structlog

from fedssl_coordinator.core import metrics
from fedssl_coordinator.core.logs import CHATTY, about, add_subject, configure_logging, is_for_people, say_about
from fedssl_local.server import choose_port
from fedssl_worker import metrics as worker_metrics
from fedssl_worker.logs import set_up_logging


def subject() -> dict[str, object]:
    return dict(add_subject(None, "info", {}))


def test_threads_of_one_request_share_its_subject() -> None:
    say_about(run="nobody's")
    with about(run="a"):
        thread = threading.Thread(target=copy_context().run, args=(lambda: say_about(round=3, client=None),))
        thread.start()
        thread.join()
        assert subject() == {"run": "a", "round": 3}
        with about(client="b"):
            assert subject() == {"run": "a", "round": 3, "client": "b"}
    assert subject() == {}


@pytest.mark.parametrize(("form", "for_people"), [("json", False), ("console", True), ("", False)])
def test_the_format_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch, form: str, for_people: bool) -> None:  # noqa: FBT001
    monkeypatch.setenv("FEDSSL_LOG_FORMAT", form)
    assert is_for_people() is for_people


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_LOG_FORMAT", "xml")
    with pytest.raises(ValueError, match="json or console"):
        is_for_people()
    with pytest.raises(ValueError, match="json or console"):
        set_up_logging("info")


@pytest.mark.parametrize("set_up", [configure_logging, lambda: set_up_logging("info")], ids=["coordinator", "worker"])
def test_text_from_outside_stays_on_one_line_in_a_terminal(
    set_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSSL_LOG_FORMAT", "console")
    root, configured = logging.getLogger(), structlog.get_config()
    before = (root.handlers[:], root.level, {name: logging.getLogger(name).level for name in CHATTY})
    try:
        set_up()
        structlog.get_logger().warning("coordinator.unreachable", reason="\x1b[2J\x9b2J")
        logging.getLogger("fedssl.client").warning("%s Trying again.", "no\n12:00 [info] update.submitted\u202e")
    finally:
        structlog.configure(**configured)
        root.handlers[:], level, levels = before
        root.setLevel(level)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)  # the colours
    assert len(text.splitlines()) == 2
    assert all(char.isprintable() for line in text.splitlines() for char in line), text


@pytest.mark.parametrize("served", [metrics, worker_metrics], ids=["coordinator", "worker"])
def test_prometheus_is_served_only_if_a_port_is_given(served: object) -> None:
    port = choose_port()
    served.serve("127.0.0.1", None)  # type: ignore[attr-defined]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60)
    served.serve("127.0.0.1", port)  # type: ignore[attr-defined]
    assert "gpu_memory_bytes 0.0" in httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60).text
