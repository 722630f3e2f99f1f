"""Files sent by the kernel: whole or in part, to callers that read slowly, stop reading, or disconnect."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from uvicorn.server import ServerState

from fedssl_coordinator.http import zero_copy
from fedssl_coordinator.http.server import ListenOptions, server_config
from fedssl_coordinator.http.zero_copy import ZERO_COPY
from support.certificates import Authority

CONTENT = os.urandom(9_000_001)
OFFSET, COUNT = 4097, 8_500_000  # more than the kernel buffers for a caller that does not read
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Sender:
    """An application that responds with a part of a file. It sets `ended` when it is done, and `error` if it failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended = asyncio.Event()
        self.error: BaseException | None = None
        self.extensions: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.extensions.append(scope.get("extensions", {}))
        length = [(b"content-length", str(COUNT).encode())]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": length})
            with self.path.open("rb") as file:
                await send({"type": ZERO_COPY, "file": file.fileno(), "offset": OFFSET, "count": COUNT})
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[tuple[str, int]]:
    config = server_config(app, ListenOptions(host="127.0.0.1", port=0, **options))
    config.load()
    new_protocol: Any = config.http_protocol_class
    server = await asyncio.get_running_loop().create_server(
        lambda: new_protocol(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()


@pytest.fixture
def path(tmp_path: Path, change_settings: Callable[..., None]) -> Path:
    change_settings(DATABASE_URL="postgresql+psycopg://x", REDIS_URL="redis://x", STORE_PATH="x", STALL_SECONDS="0.5")
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of bytes of each `os.sendfile` call."""
    numbers: list[int] = []
    original = os.sendfile

    def sendfile(*arguments: int) -> int:
        numbers.append(original(*arguments))
        return numbers[-1]

    monkeypatch.setattr(os, "sendfile", sendfile)
    return numbers


@pytest.mark.full(but=4)
@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "on the disk"])
@pytest.mark.parametrize("pause_seconds", [0, 0.001], ids=["fast", "slow"])
@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_callers_receive_the_part_of_the_file_and_the_connection_stays_open(
    path: Path,
    sent: list[int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_cached: bool,
    pause_seconds: float,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    monkeypatch.setattr(zero_copy, "_is_cached", lambda *_: is_cached)

    async def exchange() -> list[bytes]:
        received = []
        async with serving(Sender(path)) as address:
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(2):
                writer.write(REQUEST)
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"content-length: %d\r\n" % COUNT in head
                await asyncio.sleep(100 * pause_seconds)
                body = bytearray()
                while len(body) < COUNT:
                    body += await reader.read(COUNT - len(body))
                    await asyncio.sleep(pause_seconds)
                received.append(bytes(body))
            writer.close()
        return received

    with asyncio.Runner(loop_factory=new_loop) as runner:
        received = runner.run(exchange())
    assert received == [CONTENT[OFFSET : OFFSET + COUNT]] * 2
    assert (sum(sent) > COUNT) is is_cached  # at least half of the two responses; the rest is copied
    assert is_cached or not sent


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "on the disk"])
def test_a_file_that_ends_too_early_breaks_the_connection(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cached: bool
) -> None:
    monkeypatch.setattr(zero_copy, "_is_cached", lambda *_: is_cached)
    path.write_bytes(CONTENT[: OFFSET + 5_000_000])

    async def exchange() -> tuple[bytes, BaseException | None]:
        sender = Sender(path)
        async with serving(sender) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\n")
            body = await reader.read(-1)
            writer.close()
        return body, sender.error

    body, error = asyncio.run(exchange())
    assert body == CONTENT[OFFSET : OFFSET + 5_000_000]
    assert isinstance(error, EOFError)
    assert str(error) == "the file ends 3500000 bytes before the end of the response"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stalls"])
def test_a_caller_that_disconnects_or_stalls_ends_the_response_without_an_error(
    path: Path, *, leaves: bool, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def exchange() -> BaseException | None:
        sender = Sender(path)
        async with serving(sender) as address:
            reader, writer = await asyncio.open_connection(*address, limit=1 << 10)
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\n")
            if leaves:
                writer.transport.abort()
            await asyncio.wait_for(sender.ended.wait(), 10)
            writer.close()
        return sender.error

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(exchange()) is None


def test_encrypted_connections_do_not_have_the_extension(path: Path, tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("api", "127.0.0.1")

    async def exchange() -> list[Any]:
        sender = Sender(path)
        async with serving(sender, certificate=pair.certificate, key=pair.key) as address:
            context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            writer.write(REQUEST)
            await asyncio.wait_for(sender.ended.wait(), 10)
            writer.close()
            await reader.read(-1)
        return sender.extensions

    assert ZERO_COPY not in asyncio.run(exchange())[0]


def test_cached_files_are_recognised_and_short_ones_are_not(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(CONTENT)
        file.flush()
        assert zero_copy._is_cached(file.fileno(), 0, len(CONTENT)) is _has_probes(file.fileno())
        assert not zero_copy._is_cached(file.fileno(), 1, len(CONTENT))  # the file ends earlier


def _has_probes(file: int) -> bool:
    """Return whether this system can report whether the file is in the page cache."""
    try:
        return os.preadv(file, [bytearray(1)], 0, getattr(os, "RWF_NOWAIT", 0)) == 1 and hasattr(os, "RWF_NOWAIT")
    except OSError:
        return False
