"""Requests to an object store that a coordinator names. They carry bytes of artifacts, and never the token."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from fedssl.client import Client, ClientError, Retry, Tls, Unavailable, WorkerClient
from fedssl.client.direct_transfer import DirectTransfer, _is_near
from fedssl.client.errors import BadAnswer, StoreUnreachable, Unreachable
from fedssl.client.tls import DEFAULT_TLS
from fedssl.client.uploads import WHOLE_BYTES
from support.processes import free_port

DATA = bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()
TOKEN = "a-token-that-goes-nowhere-else"


class Recorder:
    """An HTTP server that records requests. `answers` has a status, headers and a body for each request, in order."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.seconds = 0.0  # the delay before each answer
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                recorder.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
                time.sleep(recorder.seconds)
                status, headers, body = recorder.answers.pop(0)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PUT = do_PATCH = do_GET  # noqa: N815 - http.server calls these names

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def two() -> Iterator[tuple[Recorder, Recorder]]:
    """Yield a coordinator and an object store. Both record the requests that they get."""
    servers = Recorder(), Recorder()
    yield servers
    for server in servers:
        server.close()


def test_the_token_does_not_follow_a_redirect(two: tuple[Recorder, Recorder], tmp_path: Path) -> None:
    coordinator, store = two
    there = {"Location": f"{store.url}/bucket/key?signature=x", "ETag": f'"{DIGEST}"'}
    coordinator.answers = [(307, there, b"")] * 3
    store.answers = [
        (503, {}, b"slow down"),
        (200, {"ETag": '"other"', "Content-Length": str(len(DATA))}, DATA[:4000]),  # ends early
        (206, {"Content-Range": f"bytes 4000-{len(DATA) - 1}/{len(DATA)}"}, DATA[4000:]),
    ]
    with WorkerClient(coordinator.url, TOKEN, retry=Retry(seconds=20, first_delay=0.01, max_delay=0.02)) as client:
        client.download(DIGEST, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == DATA
    assert [headers["authorization"] for _, _, headers in coordinator.requests] == [f"Bearer {TOKEN}"] * 3
    assert len(store.requests) == 3
    for _, path, headers in store.requests:
        assert path == "/bucket/key?signature=x"
        assert not {"authorization", "cookie", "if-range"} & headers.keys()
        assert TOKEN not in str(headers)
    assert [headers.get("range") for _, _, headers in store.requests] == [None, None, "bytes=4000-"]


def test_further_redirects_of_a_store_are_not_followed(two: tuple[Recorder, Recorder], tmp_path: Path) -> None:
    coordinator, store = two
    coordinator.answers = [(307, {"Location": f"{store.url}/a", "ETag": f'"{DIGEST}"'}, b"")]
    store.answers = [(307, {"Location": f"{store.url}/b"}, b"")]
    with WorkerClient(coordinator.url, TOKEN, retry=Retry(seconds=0)) as client, pytest.raises(ClientError):
        client.download(DIGEST, tmp_path / "model")
    assert [path for _, path, _ in store.requests] == ["/a"]


def direct_transfer(tls: Tls = DEFAULT_TLS, coordinator: str = "https://fed.example.org") -> DirectTransfer:
    return DirectTransfer(httpx.URL(coordinator), tls, 5, lambda server: True)


@pytest.mark.parametrize(
    "url",
    ["", "ftp://host/a", "//host", "http:///a", "https://user@host/a", "file:///etc/passwd", "https://host:65536/a"],
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with (
        pytest.raises(BadAnswer, match="sent an invalid object-store address"),
        direct_transfer().stream("GET", url, headers={}),
    ):
        pass


def test_an_unencrypted_store_on_another_machine_must_be_allowed() -> None:
    with (
        pytest.raises(StoreUnreachable, match="it must have an https address, unless FEDSSL_INSECURE_HTTP=1"),
        direct_transfer().stream("GET", "http://192.0.2.1/a", headers={}),
    ):
        pass
    assert direct_transfer(Tls(insecure_http=True))._permitted("http://192.0.2.1/a").host == "192.0.2.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "0.0.0.0", "2130706433", "localhost", "[::ffff:127.0.0.1]"])
def test_a_remote_coordinator_cannot_direct_a_client_to_its_own_machine(
    two: tuple[Recorder, Recorder], host: str
) -> None:
    own = two[1].url.replace("127.0.0.1", host)
    there = direct_transfer(Tls(insecure_http=True))
    with (
        pytest.raises(StoreUnreachable, match="names an object store on this one"),
        there.stream("GET", f"{own}/containers/json?all=1", headers={}),
    ):
        pass
    assert two[1].requests == []
    assert not there.is_open


def test_loopback_and_link_local_addresses_are_near() -> None:
    near = ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "fe80::1%1"]
    assert [_is_near(peer) for peer in (*near, "192.0.2.1", "10.0.0.7", "2001:db8::1")] == [True] * 5 + [False] * 3


def test_a_proxy_on_this_machine_is_not_taken_for_an_object_store(
    two: tuple[Recorder, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = two[1]
    proxy.answers = [(200, {}, b"bytes")]
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("no_proxy", "")
    there = direct_transfer(Tls(insecure_http=True))
    with there.stream("GET", "http://store.example/a", headers={}) as response:
        assert response.read() == b"bytes"
    there.close()


def test_cookies_are_not_kept(two: tuple[Recorder, Recorder]) -> None:
    store = two[1]
    store.answers = [(200, {"Set-Cookie": "track=1; Path=/"}, b"")] * 2
    there = direct_transfer(coordinator=store.url)
    for _ in range(2):
        with there.stream("GET", f"{store.url}/a", headers={}) as response:
            response.read()
    there.close()
    assert ["cookie" in headers for _, _, headers in store.requests] == [False, False]


def test_threads_that_start_together_share_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[httpx.Client] = []

    def slowly(**options: Any) -> httpx.Client:
        time.sleep(0.05)
        made.append(real(**options))
        return made[-1]

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", slowly)
    there = direct_transfer()
    threads = [threading.Thread(target=there._client, args=(httpx.URL("http://127.0.0.1/"),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there.close()
    assert [client.is_closed for client in made] == [True]


def closed() -> str:
    """Return an address at which no server listens."""
    return f"http://127.0.0.1:{free_port()}"


def test_a_download_passes_through_the_coordinator_if_its_store_is_unreachable(
    two: tuple[Recorder, Recorder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = two[0]
    etag = {"ETag": f'"{DIGEST}"'}
    coordinator.answers = [(307, {"Location": f"{closed()}/key?signature=x", **etag}, b"")]
    coordinator.answers += [(200, etag, DATA), (200, {}, DATA[:8]), (200, etag, DATA)]
    with Client(coordinator.url, TOKEN, retry=Retry(seconds=0)) as client:
        client.download_artifact(DIGEST, tmp_path / "model")
        assert client._connection.fetch("/v1/artifacts/x", 0, 7) == DATA[:8]
        client.download_artifact(DIGEST, tmp_path / "again")
    assert (tmp_path / "model").read_bytes() == (tmp_path / "again").read_bytes() == DATA
    assert [headers.get("accept-direct") for _, _, headers in coordinator.requests] == ["1", None, None, None]
    [said] = caplog.messages
    assert "No answer from 127.0.0.1, where the coordinator keeps its artifacts" in said
    assert "signature" not in said


def test_a_store_that_answered_recently_is_retried_and_stays_open() -> None:
    store = Recorder()
    store.answers = [(200, {"Connection": "close"}, b"")]
    there = direct_transfer(coordinator=store.url)
    with there.stream("GET", f"{store.url}/a", headers={}) as response:
        response.read()
    store.close()
    with pytest.raises(Unreachable), there.stream("GET", f"{store.url}/a", headers={}):
        pass
    assert there.is_open


def test_a_range_passes_through_the_coordinator_if_its_store_is_unreachable(
    two: tuple[Recorder, Recorder],
) -> None:
    coordinator = two[0]
    coordinator.answers = [(307, {"Location": f"{closed()}/key"}, b""), (206, {}, DATA[:8])]
    with Client(coordinator.url, TOKEN, retry=Retry(seconds=0)) as client:
        assert client._connection.fetch("/v1/artifacts/x", 0, 7) == DATA[:8]
    assert [headers.get("accept-direct") for _, _, headers in coordinator.requests] == ["1", None]


@pytest.mark.parametrize("status", [301, 400, 403])
def test_a_download_passes_through_the_coordinator_if_its_store_refuses_new_addresses_too(
    two: tuple[Recorder, Recorder], tmp_path: Path, status: int
) -> None:
    coordinator, store = two
    etag = {"ETag": f'"{DIGEST}"'}
    coordinator.answers = [(307, {"Location": f"{store.url}/key", **etag}, b"")] * 2 + [(200, etag, DATA)] * 2
    store.answers = [(status, {}, b"not from there")] * 2
    with Client(coordinator.url, TOKEN, retry=Retry(seconds=5, first_delay=0.01)) as client:
        client.download_artifact(DIGEST, tmp_path / "model")
        client.download_artifact(DIGEST, tmp_path / "again")
    assert (tmp_path / "model").read_bytes() == (tmp_path / "again").read_bytes() == DATA
    assert [headers.get("accept-direct") for _, _, headers in coordinator.requests] == ["1", "1", None, None]


def test_an_upload_passes_through_the_coordinator_if_its_store_refuses_new_addresses_too(
    two: tuple[Recorder, Recorder], tmp_path: Path
) -> None:
    coordinator, store = two
    coordinator.answers = [BEGUN, parts_at(store.url)] * 2 + [BEGUN, (204, {}, b"")]
    store.answers = [(403, {}, b"not from there")] * 2
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(coordinator.url, TOKEN, retry=Retry(seconds=5, first_delay=0.01)) as client:
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4())
    assert [method for method, _, _ in coordinator.requests] == ["POST"] * 5 + ["PATCH"]


def test_an_address_that_is_not_permitted_is_not_followed(two: tuple[Recorder, Recorder], tmp_path: Path) -> None:
    coordinator, store = two
    there = {"Location": f"{store.url}/key", "ETag": f'"{DIGEST}"'}
    coordinator.answers = [(307, there, b"")] * 2
    with (
        WorkerClient(coordinator.url, TOKEN, retry=Retry(seconds=0), may_go_to=lambda server: False) as client,
        pytest.raises(BadAnswer, match="redirects to another address"),
    ):
        client.download(DIGEST, tmp_path / "model")
    assert store.requests == []


LARGE = bytes(WHOLE_BYTES + 1000)
LARGE_DIGEST = hashlib.sha256(LARGE).hexdigest()
BEGUN = (201, {"Location": f"/v1/uploads/{uuid4()}", "Upload-Offset": "0", "Upload-Direct": "1"}, b"")


def parts_at(url: str) -> tuple[int, dict[str, str], bytes]:
    part = {"offset": 0, "num_bytes": len(LARGE), "url": f"{url}/part?signature=x"}
    return 200, {}, json.dumps({"parts": [part]}).encode()


NO_MORE = (200, {}, b'{"parts": []}')


def test_an_upload_passes_through_the_coordinator_if_its_store_is_unreachable(
    two: tuple[Recorder, Recorder], tmp_path: Path
) -> None:
    coordinator = two[0]
    coordinator.answers = [BEGUN, parts_at(closed()), BEGUN, (204, {}, b""), BEGUN, (204, {}, b"")]
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(coordinator.url, TOKEN, retry=Retry(seconds=0)) as client:
        assert client.upload(LARGE_DIGEST, tmp_path / "update", uuid4()) == len(LARGE)
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4())
    methods = [method for method, _, _ in coordinator.requests]
    assert methods == ["POST", "POST", "POST", "PATCH", "POST", "PATCH"]


def test_a_part_that_breaks_after_a_long_time_is_sent_again(two: tuple[Recorder, Recorder], tmp_path: Path) -> None:
    coordinator, store = two
    coordinator.answers = [BEGUN, parts_at(store.url)] * 3 + [NO_MORE]
    store.answers = [(403, {}, b"expired"), (503, {}, b"slow down"), (200, {}, b"")]
    store.seconds = 0.3
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(coordinator.url, TOKEN, retry=Retry(seconds=0.2, first_delay=0.01)) as client:
        assert client.upload(LARGE_DIGEST, tmp_path / "update", uuid4()) == 3 * len(LARGE)


def test_a_part_that_always_breaks_is_given_up(two: tuple[Recorder, Recorder], tmp_path: Path) -> None:
    coordinator, store = two
    coordinator.answers = [BEGUN, parts_at(store.url)] * 9
    store.answers = [(503, {}, b"slow down")] * 9
    store.seconds = 0.3
    (tmp_path / "update").write_bytes(LARGE)
    with (
        WorkerClient(coordinator.url, TOKEN, retry=Retry(seconds=0.2, first_delay=0.01)) as client,
        pytest.raises(Unavailable, match="answered 503"),
    ):
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4())
    assert len(store.requests) == 3
