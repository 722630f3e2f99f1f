"""ASGI's extension `http.response.zerocopysend`: the kernel sends a file to a connection, and nothing is copied here.

uvicorn does not have this extension. A stream reads each byte into this process and writes it from there, which costs
1.6 times the processor time (docs/contributing/log.md).
"""

import asyncio
import os
from typing import cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from fedssl_coordinator.core.threads import run_in_thread

ZERO_COPY = "http.response.zerocopysend"

_PIECE_BYTES = 2 << 20  # per turn of the event loop
_PROBE_BYTES = 64 << 10  # between two probes of the page cache: the kernel reads at least as many at once
_COPIED_BYTES = 64 << 10  # after what the kernel took
_READ_BYTES = 1 << 20  # of what is only on the disk


class ZeroCopy:
    """Adds the extension to the application of one connection, which must not be encrypted."""

    def __init__(self, app: ASGIApp, transport: asyncio.Transport) -> None:
        self._app = app
        self._transport = transport

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        cycle = cast("RequestResponseCycle", send.__self__)  # type: ignore[attr-defined]

        async def send_or_copy(message: Message) -> None:
            if message["type"] == ZERO_COPY:
                await self._send_file(cycle, message["file"], message["offset"], message["count"])
            else:
                await send(message)

        scope.setdefault("extensions", {})[ZERO_COPY] = {}
        await self._app(scope, receive, send_or_copy)

    async def _send_file(self, cycle: RequestResponseCycle, file: int, offset: int, count: int) -> None:
        """Send the rest of a response: `count` bytes of the open file `file`, from `offset` on.

        Raises EOFError, which breaks the connection off, if the file ends before.
        """
        stop = offset + count
        await self._drain(cycle.flow)
        while offset < stop:
            if self._transport.is_closing():
                cycle.disconnected = True  # uvicorn notices this one turn of the event loop later
                return
            piece = min(_PIECE_BYTES, stop - offset)
            num_sent = self._send_some(file, offset, piece) if _is_cached(file, offset, piece) else 0
            offset += num_sent
            cycle.expected_content_length -= num_sent
            if num_sent == piece:
                await asyncio.sleep(0)
                continue
            # The disk has to be waited for, or the caller, who does not read as fast. Both waits are those of a stream.
            size = _COPIED_BYTES if num_sent else _READ_BYTES
            part = await run_in_thread(os.pread, file, min(size, stop - offset), offset)
            if not part:
                raise EOFError(f"the file ends {stop - offset} bytes before the end of the response")
            offset += len(part)
            await cycle.send({"type": "http.response.body", "body": part, "more_body": True})
            await self._drain(cycle.flow)
        await cycle.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _send_some(self, file: int, offset: int, count: int) -> int:
        """Return how many bytes the kernel took: fewer than `count` if the caller reads slowly or is gone."""
        connection = self._transport.get_extra_info("socket").fileno()
        try:
            return os.sendfile(connection, file, offset, count)
        except (BlockingIOError, ConnectionError):  # the transport finds out that a connection is lost
            return 0

    async def _drain(self, flow: FlowControl) -> None:
        """Wait until the kernel has all bytes that were written to the transport, or the connection is lost."""
        for limits in ((0,), ()):
            if self._transport.is_closing():
                return
            self._transport.set_write_buffer_limits(*limits)
            await flow.drain()


def _is_cached(file: int, offset: int, count: int) -> bool:
    """Return whether the bytes can be sent without waiting for a disk, by probes of the page cache.

    Only Linux has such probes, and only for some file systems.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    try:
        return all(
            os.preadv(file, [byte], place, os.RWF_NOWAIT)
            for place in (*range(offset, offset + count, _PROBE_BYTES), offset + count - 1)
        )
    except OSError:
        return False
