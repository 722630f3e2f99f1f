"""Server-sent events: from the bytes of a stream to events. No I/O."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedssl.client.errors import BadAnswer

_MAX_EVENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event. `id` is the newest that the stream has named, to be sent as Last-Event-ID when it breaks."""

    event: str
    data: str
    id: str


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends, which are LF, CRLF or CR. (`str.splitlines` would split at U+2028 inside data too.)"""
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
    """Events with data, as they become complete. An event that the stream's end cuts off is dropped.

    >>> list(parse_events([b": ping\\n\\nid: 7\\nda", b"ta: one\\ndata: two\\n\\ndata: cut"]))
    [ServerSentEvent(event='message', data='one\\ntwo', id='7')]
    """
    event, last_id = "message", ""
    data: list[str] = []
    for line in lines(chunks):
        if not line:
            if data:
                yield ServerSentEvent(event, "\n".join(data), last_id)
            event, data = "message", []
            continue
        field, _, value = line.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            event = value
        elif field == "id" and "\0" not in value:
            last_id = value
