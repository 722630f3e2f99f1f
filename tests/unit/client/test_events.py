"""The event stream, and how it resumes when it breaks."""

import json
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from fedssl.client import BadAnswer, Client, NotFound, Retry, Unreachable
from fedssl.client.sse import ServerSentEvent, lines, parse_events

from .conftest import Answer, Received, ScriptedServer, json_answer, problem
from .test_connection import run_view

QUICK = Retry(seconds=2, first_delay=0.01, max_delay=0.05)
RUN = uuid4()


def sent(number: int, kind: str = "round.opened") -> bytes:
    event = {
        "id": number,
        "at": datetime.now(UTC).isoformat(),
        "kind": kind,
        "run_id": str(RUN),
        "round_number": 1,
        "client_id": None,
        "message": "first\u2028second",
    }
    return f"id: {number}\r\nevent: {kind}\r\ndata: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()


def stream(*events: bytes, cut: bool = False) -> Answer:
    body = b": ping\r\n\r\n" + b"".join(events)
    return Answer(200, body, {"Content-Type": "text/event-stream"}, with_length=cut, cut_after=len(body) - cut)


def test_events_are_returned_until_the_run_has_finished(server: ScriptedServer) -> None:
    server.script = lambda request: stream(sent(1), sent(2), sent(3, "run.finished"))
    with Client(server.url, "t") as client:
        events = list(client.events(RUN))
    assert [event.id for event in events] == [1, 2, 3]
    assert events[0].message == "first\u2028second"
    assert "Last-Event-ID" not in server.requests[0].headers
    assert len(server.requests) == 1


def test_a_resumed_run_has_events_after_its_first_end(server: ScriptedServer) -> None:
    kinds = ["run.created", "run.finished", "run.resumed", "run.finished"]
    server.script = lambda request: stream(*(sent(number, kind) for number, kind in enumerate(kinds, 1)))
    with Client(server.url, "t") as client:
        assert [event.kind for event in client.events(RUN)] == kinds


def test_a_broken_stream_resumes_after_the_last_event(server: ScriptedServer) -> None:
    def script(request: Received) -> Answer:
        if not request.path.endswith("/stream"):
            return json_answer(run_view(RUN))
        last = request.headers.get("Last-Event-ID")
        if last is None:
            return stream(sent(1), sent(2), sent(3), cut=True)
        if last == "2":
            return problem("unavailable", 503) if len(server.requests) < 4 else stream(sent(3))
        return stream(sent(4, "run.finished"))

    server.script = script
    with Client(server.url, "t", retry=QUICK) as client:
        assert [event.id for event in client.events(RUN)] == [1, 2, 3, 4]


def test_a_refused_stream_is_not_asked_for_again(server: ScriptedServer) -> None:
    server.script = lambda request: problem("not-found", 404)
    with Client(server.url, "t", retry=QUICK) as client, pytest.raises(NotFound):
        next(client.events(RUN))
    assert len(server.requests) == 1


def test_no_events_follow_the_end_of_a_finished_run(server: ScriptedServer) -> None:
    server.script = lambda request: (
        stream() if request.path.endswith("/stream") else json_answer(run_view(RUN, "finished"))
    )
    with Client(server.url, "t") as client:
        assert list(client.events(RUN, after=9)) == []
    assert server.requests[0].headers["Last-Event-ID"] == "9"


def test_an_unreachable_coordinator_ends_the_iteration(server: ScriptedServer) -> None:
    server.script = lambda request: (
        stream(sent(1), sent(2), cut=True) if len(server.requests) == 1 else Answer(200, b"x", cut_after=0)
    )
    with Client(server.url, "t", retry=Retry(seconds=0.2, first_delay=0.02)) as client:
        events = client.events(RUN)
        assert next(events).id == 1
        with pytest.raises(Unreachable):
            list(events)


def test_a_stream_that_breaks_after_a_quiet_time_is_resumed(server: ScriptedServer) -> None:
    """Only comments arrive for longer than the retry time. The retry time starts when the stream breaks."""
    quiet = sent(1) + b": ping\n" * 5
    broken = Answer(200, quiet + b"cut", {"Content-Type": "text/event-stream"}, cut_after=len(quiet), pause_seconds=0.1)
    server.script = lambda request: broken if len(server.requests) == 1 else stream(sent(2, "run.finished"))
    with Client(server.url, "t", retry=Retry(seconds=0.3, first_delay=0.02)) as client:
        assert [event.id for event in client.events(RUN)] == [1, 2]


def test_events_between_the_end_of_the_stream_and_the_next_request_are_not_lost(server: ScriptedServer) -> None:
    """A coordinator that shuts down ends the stream, and the run finishes before the client requests its state."""

    def script(request: Received) -> Answer:
        if not request.path.endswith("/stream"):
            return json_answer(run_view(RUN, "finished"))
        return stream(sent(2), sent(3, "run.finished")) if "Last-Event-ID" in request.headers else stream(sent(1))

    server.script = script
    with Client(server.url, "t") as client:
        assert [event.id for event in client.events(RUN)] == [1, 2, 3]


def test_an_unreadable_event_is_a_bad_answer(server: ScriptedServer) -> None:
    server.script = lambda request: stream(b"data: hello\n\n")
    with Client(server.url, "t") as client, pytest.raises(BadAnswer):
        list(client.events(RUN))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_end_in_three_ways_however_the_stream_is_split(size: int) -> None:
    text = b"a\r\n\r\nb\rc\n\nd\r\r\ne\n"
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(lines(chunks)) == [b"a", b"", b"b", b"c", b"", b"d", b"", b"e"]


def test_an_event_of_many_lines_is_limited() -> None:
    endless = (b"data: " + b"x" * 1000 + b"\n" for _ in range(2000))
    with pytest.raises(BadAnswer, match="more than 1 MiB"):
        list(parse_events(endless))


def test_the_fields_of_events_are_parsed() -> None:
    stream = [b"id:1\nevent: x\ndata:one\n\n", b"retry: 5\n\nid: 2\n\ndata\n\n"]
    assert list(parse_events(stream)) == [ServerSentEvent("x", "one", "1"), ServerSentEvent("message", "", "2")]


def test_an_endless_line_is_refused() -> None:
    with pytest.raises(BadAnswer):
        list(lines([b"x" * 2**20, b"y"]))
