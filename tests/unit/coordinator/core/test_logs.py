"""Log lines: in which form, and about what."""

import threading
from contextvars import copy_context

import httpx
import pytest

from fedssl_coordinator.core import metrics
from fedssl_coordinator.core.logs import about, add_subject, is_for_people, say_about
from fedssl_local.server import choose_port
from fedssl_worker import metrics as worker_metrics
from fedssl_worker.logs import set_up_logging


def subject() -> dict[str, object]:
    return dict(add_subject(None, "info", {}))


def test_threads_of_one_request_share_what_it_is_about() -> None:
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
def test_the_form_is_chosen(monkeypatch: pytest.MonkeyPatch, form: str, for_people: bool) -> None:  # noqa: FBT001
    monkeypatch.setenv("FEDSSL_LOG_FORMAT", form)
    assert is_for_people() is for_people


def test_a_form_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_LOG_FORMAT", "xml")
    with pytest.raises(ValueError, match="json or console"):
        is_for_people()
    with pytest.raises(ValueError, match="json or console"):
        set_up_logging("info")


@pytest.mark.parametrize("served", [metrics, worker_metrics], ids=["coordinator", "worker"])
def test_prometheus_is_answered_only_where_that_is_asked_for(served: object) -> None:
    port = choose_port()
    served.serve("127.0.0.1", None)  # type: ignore[attr-defined]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60)
    served.serve("127.0.0.1", port)  # type: ignore[attr-defined]
    assert "gpu_memory_bytes 0.0" in httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60).text
