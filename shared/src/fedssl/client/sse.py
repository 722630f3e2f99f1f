"""Parses server-sent events. Does no I/O.

The package httpx-sse does the same, but limits neither a line nor an event: a hostile server could fill the memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedssl.client.errors import BadAnswer

_MAX_EVENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event. `id` is the newest that the stream has sent; send it as Last-Event-ID to resume a broken stream."""

    event: str
    data: str
    id: str


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines without their ends: LF, CRLF or CR. (`str.splitlines` would also split at U+2028 inside data.)"""
    buffer, after_cr = b"", False
    for chunk in chunks:
        if after_cr and chunk:
            chunk, after_cr = chunk.removeprefix(b"\n"), False
        if chunk:
            after_cr = chunk.endswith(b"\r")
        buffer += chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *complete, buffer = buffer.split(b"\n")
        if len(buffer) > _MAX_EVENT_BYTES:
            raise BadAnswer("the event stream sent a line of more than 1 MiB: is this a fedssl coordinator?")
        yield from complete


def parse_events(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Yield each complete event that has data. An event that is cut off by the end of the stream is dropped.

    >>> list(parse_events([b": ping\\n\\nid: 7\\nda", b"ta: one\\ndata: two\\n\\ndata: cut"]))
    [ServerSentEvent(event='message', data='one\\ntwo', id='7')]
    """
    event, last_id, num_bytes = "message", "", 0
    data: list[str] = []
    for line in lines(chunks):
        if not line:
            if data:
                yield ServerSentEvent(event, "\n".join(data), last_id)
            event, data, num_bytes = "message", [], 0
            continue
        num_bytes += len(line)
        if num_bytes > _MAX_EVENT_BYTES:
            raise BadAnswer("the event stream sent an event of more than 1 MiB: is this a fedssl coordinator?")
        field, _, value = line.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            event = value
        elif field == "id" and "\0" not in value:
            last_id = value
