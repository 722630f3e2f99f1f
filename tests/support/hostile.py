"""Answers of broken or malicious coordinators, and of proxies between them and a worker."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Answer = Callable[[], Iterable[bytes]]
"""Yields the bytes of a response, including the status line and the headers."""

_ID = "00000000-0000-4000-8000-000000000001"
_PROBLEM = "application/problem+json"


def answer(body: bytes, status: str = "200 OK", **headers: str) -> Answer:
    """Return a response whose framing is correct."""

    def give() -> Iterator[bytes]:
        named = {"Content-Length": str(len(body))} | {name.replace("_", "-"): text for name, text in headers.items()}
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {text}" for name, text in named.items()), "", ""]
        yield "\r\n".join(lines).encode("latin-1") + body

    return give


def raw_response(*parts: bytes) -> Answer:
    return lambda: iter(parts)


def slow_response(parts: bytes, pause_seconds: float, before: bytes = b"") -> Answer:
    """Return a response that sends one byte after each pause."""

    def give() -> Iterator[bytes]:
        yield before
        for byte in parts:
            time.sleep(pause_seconds)
            yield bytes([byte])

    return give


def endless_response(part: bytes, before: bytes, most: int = 256 << 20) -> Answer:
    """Return a response that repeats the same bytes until the other side closes the connection."""

    def give() -> Iterator[bytes]:
        yield before
        for _ in range(most // len(part)):
            yield part

    return give


def _problem(slug: str = "", status: str = "409 Conflict", **fields: Any) -> Answer:
    document = {"type": f"urn:fedssl:problem:{slug}" if slug else "about:blank", "title": "x", "detail": "x"}
    document |= {"status": int(status[:3]), **fields}
    return answer(json.dumps(document).encode(), status, Content_Type=_PROBLEM)


_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

MALFORMED: dict[str, Answer] = {
    "a number as the id": answer(b'{"assignment_id": 5}'),
    "an object as the id": answer(b'{"assignment_id": {"a": []}}'),
    "a list as the id": answer(b'{"assignment_id": ["%s"]}' % _ID.encode()),
    "null": answer(b"null"),
    "a number": answer(b"5"),
    "a text": answer(b'"carry on"'),
    "a list": answer(b"[]"),
    "no bytes": answer(b"", "200 OK", Content_Type="application/json"),
    "spaces": answer(b" " * 1000),
    "lists in lists": answer(b"[" * 100_000),
    "lists in lists, closed": answer(b"[" * 50_000 + b"]" * 50_000),
    "objects in objects": answer(b'{"assignment_id":' * 30_000 + b"1" + b"}" * 30_000),
    "a long number": answer(b'{"assignment_id": %s}' % (b"9" * 10_000)),
    "a number beyond any": answer(b'{"carry_on": 1e999999}'),
    "a long key": answer(b'{"%s": 1}' % (b"k" * 50_000)),
    "a key twice": answer(b'{"state": "accepted", "state": 7}'),
    "not UTF-8": answer(b'{"client_id": "\xff\xfe"}'),
    "half a character": answer(b'{"client_id": "\\ud800"}'),
    "a NUL": answer(b'{"client_id": "\\u0000"}'),
    "a page": answer(b"<!doctype html><title>Sign in</title>" * 50, Content_Type="text/html"),
    "compressed": answer(b"\x1f\x8b\x08" + bytes(100), Content_Encoding="gzip"),
    "a huge length": raw_response(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n{"),
    "a length beyond any": raw_response(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{"),
    "a negative length": raw_response(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{"),
    "two lengths": raw_response(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}"),
    "less than its length": raw_response(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
    "a body without end": endless_response(b"1000\r\n" + b" " * 4096 + b"\r\n", _CHUNKED),
    "a chunk that is none": raw_response(_CHUNKED + b"zz\r\n{}\r\n"),
    "a head without end": endless_response(b"X-Y: " + b"z" * 4000 + b"\r\n", b"HTTP/1.1 200 OK\r\n"),
    "not HTTP": raw_response(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "nothing": raw_response(),
    "a status that is none": raw_response(b"HTTP/1.1 999 ???\r\nContent-Length: 2\r\n\r\n{}"),
    "a redirect": answer(b"", "307 Temporary Redirect", Location="http://127.0.0.1:9/elsewhere"),
    "a redirect to a file": answer(b"", "302 Found", Location="file:///etc/passwd"),
}
"""Answers that no coordinator sends, whatever it was asked."""

REFUSALS: dict[str, Answer] = {
    "a proxy's 401": answer(b"<h1>401</h1>", "401 Unauthorized", WWW_Authenticate="Basic"),
    "a proxy's 403": answer(b"<h1>403 Forbidden</h1><hr>nginx", "403 Forbidden"),
    "a proxy's 403 as a problem": _problem(status="403 Forbidden"),
    "a proxy's 404": answer(b"default backend - 404", "404 Not Found"),
    "a proxy's 405": answer(b"", "405 Method Not Allowed"),
    "a proxy's 407": answer(b"", "407 Proxy Authentication Required"),
    "a proxy's 409": answer(b"", "409 Conflict"),
    "a proxy's 410": answer(b"gone", "410 Gone"),
    "a proxy's 502": answer(b"<h1>502</h1>", "502 Bad Gateway"),
    "a teapot": answer(b"", "418 I'm a teapot"),
    "problems in problems": answer(b'{"type":' * 30_000, "409 Conflict", Content_Type=_PROBLEM),
    "an error that is none": _problem("unavailable", "503 Service Unavailable", errors=[{"loc": 5, "msg": {"a": [1]}}]),
    "errors that are none": _problem("unavailable", "503 Service Unavailable", errors={"loc": 5}),
    "a long detail": _problem("unavailable", "503 Service Unavailable", detail="x" * 500_000),
    "a problem without end": endless_response(b" " * 4096, b"HTTP/1.1 503 Service Unavailable\r\n\r\n"),
}
"""Refusals that are not about this worker, which therefore retries."""

WAITS: dict[str, Answer] = {
    f"Retry-After: {text[:30]}": answer(b"", "503 Service Unavailable", Retry_After=text)
    for text in ("9" * 400, "-1", "1e400", "soon", "\u00b2", "Fri, 31 Dec 99999 23:59:59 GMT", "Mon, 32 Foo", "-", "0")
}
"""Values of Retry-After that are not times, or that are centuries."""


def slow_answers(pause_seconds: float) -> dict[str, Answer]:
    """Return answers that arrive in small parts with pauses between them, and do not end within a test."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    return {
        "a body by the byte": slow_response(b"[" * 100_000, pause_seconds, head),
        "a head by the byte": slow_response(b"X-Y: " + b"z" * 50_000, pause_seconds, b"HTTP/1.1 200 OK\r\n"),
        "heads without end": lambda: _repeated(b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n", pause_seconds),
        "a refusal by the byte": slow_response(
            b"x" * 50_000, pause_seconds, b"HTTP/1.1 403 Forbidden\r\nContent-Length: 50000\r\n\r\n"
        ),
    }


def _repeated(part: bytes, pause_seconds: float) -> Iterator[bytes]:
    while True:
        yield part
        time.sleep(pause_seconds)


def changed_item(work: bytes, **fields: Any) -> bytes:
    """Return a work item with these values changed; `None` becomes JSON's null."""
    return json.dumps({**json.loads(work), **fields}).encode()


WORK: dict[str, dict[str, Any]] = {
    "a negative lease": {"lease_seconds": -60},
    "no lease": {"lease_seconds": 0},
    "a lease of a century": {"lease_seconds": 3.2e9},
    "a lease beyond any": {"lease_seconds": 1e300},
    "a lease that is a text": {"lease_seconds": "for a while"},
    "a negative round": {"round_number": -1},
    "a round beyond any": {"round_number": 10**30},
    "a path as the broadcast": {"broadcast": "../../../etc/passwd"},
    "a path as the client": {"client_id": "../hospital-b"},
    "a negative version": {"method_version": -(10**20)},
    "too many dimensions": {"dimensions": list(range(100_000))},
    "a negative last round": {"last_accepted": {"round_number": -5, "update": "0" * 64}},
    "a plan of nothing": {"plan": {"broadcast": [], "update": None}},
    "a plan larger than any disk": {
        "plan": {
            "broadcast": [{"name": "w", "dtype": "F64", "shape": [10**30] * 8}],
            "update": [{"name": "w", "dtype": "F64", "shape": [2**40, 2**40]}],
        }
    },
    "a deadline in another age": {"round_deadline": "0000-00-00T99:99:99Z"},
    "an unknown key": {"also": {"run": "rm -rf"}},
    "no spec": {"spec": 5},
}
"""Changes that make an honest work item impossible, so that the worker declines it."""
