"""The protocol passes each body to the application as it was sent, however its bytes arrive."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.server import ServerState

from fedssl_coordinator.http.server import ListenOptions, server_config

CONTENT = os.urandom(300_000)


@pytest.mark.parametrize("pause_seconds", [0, 0.01])
@pytest.mark.parametrize("num_chunk_bytes", [1, 1000, 65_536, len(CONTENT)])
def test_bodies_are_received_as_they_were_sent(
    num_chunk_bytes: int, pause_seconds: float, change_settings: Callable[..., None]
) -> None:
    change_settings(DATABASE_URL="postgresql+psycopg://x", REDIS_URL="redis://x", STORE_PATH="x")
    content = CONTENT[: 3000 * num_chunk_bytes]
    chunks = [content[start : start + num_chunk_bytes] for start in range(0, len(content), num_chunk_bytes)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    head = b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        received = b""
        more = True
        while more:
            await asyncio.sleep(pause_seconds)
            message = await receive()
            assert isinstance(message["body"], bytes)
            received += message["body"]
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": received})

    async def exchange() -> list[bytes]:
        config = server_config(echo, ListenOptions(host="127.0.0.1", port=0))
        config.load()
        loop = asyncio.get_running_loop()
        new_protocol: Any = config.http_protocol_class
        server = await loop.create_server(
            lambda: new_protocol(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
        )
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            received = []
            for _ in range(2):  # the second request uses the same connection
                writer.write(head + body)
                await reader.readuntil(b"\r\n\r\n")  # 100 Continue
                await reader.readuntil(b"\r\n\r\n")
                received.append(await _chunked(reader))
            writer.close()
            await writer.wait_closed()
        return received

    assert asyncio.run(exchange()) == [content, content]


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    """Return the body of a chunked response."""
    whole = b""
    while size := int(await reader.readline(), 16):
        whole += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return whole
