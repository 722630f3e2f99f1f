"""Workers that follow the protocol and train nothing: thousands of them in one process, each with its own token."""

import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import random
import socket
import struct
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedssl.artifacts.header import header_bytes, num_bytes
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.work import DELIVERY_HEADER, OFFER_HEADER, PAUSE_HEADER
from fedssl_worker.lease import progress_interval

_LARGEST_PUT = 1 << 20  # as in the worker's client, which sends larger updates to `/v1/uploads`
_CONNECT_SECONDS = 60.0
T = TypeVar("T", int, bytes)

_HEAD_BYTES = 1 << 16
_dropped = memoryview(bytearray(1 << 20))  # for bodies that are only counted; all workers write to it
_HELD = {"claim"}  # long polls, whose duration is not a latency


@dataclass
class Measurements:
    """The measurements of all workers together. Times are in seconds."""

    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refusals: Counter[str] = field(default_factory=Counter)
    num_claims: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True)
class Answer:
    """A response; `content` is empty if it was only counted."""

    status: int
    headers: dict[str, str]
    content: bytes


class Connection:
    """One worker's connection. It speaks HTTP/1.1 itself, because a library would take more time than the coordinator.

    Large bodies are not copied, as in `tests/bench/http_floor.py`: asyncio's streams would take more processor time for
    them than the coordinator.
    """

    def __init__(self, host: str, port: int, token: str, tally: Measurements) -> None:
        self._address = (host, port)
        self._head = f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        self.tally = tally
        self._socket: socket.socket | None = None

    async def ask(
        self, name: str, method: str, path: str, *parts: bytes, is_kept: bool = True, **headers: str
    ) -> Answer:
        """Send a request, and retry it after a connection error, 429 or 503. Each of these is counted as a refusal."""
        while True:
            began = time.perf_counter()
            try:
                answer = await self._exchange(method, path, parts, headers, is_kept=is_kept)
            except (OSError, TimeoutError) as error:
                self.close()
                self.tally.refusals[f"{name}: {type(error).__name__}"] += 1
                await asyncio.sleep(random.uniform(0.1, 0.5))
                continue
            if answer.status in (429, 503):
                self.tally.refusals[f"{name}: {answer.status}"] += 1
                await asyncio.sleep(float(answer.headers.get("retry-after", 1)) * random.uniform(0.5, 1.5))
                continue
            if name not in _HELD:
                self.tally.latencies[name].append(time.perf_counter() - began)
            return answer

    async def _exchange(
        self, method: str, path: str, parts: tuple[bytes, ...], headers: dict[str, str], *, is_kept: bool
    ) -> Answer:
        if self._socket is not None and _is_closed(self._socket):
            self.close()  # the coordinator closes connections that are idle for longer than a worker pauses in a round
        if self._socket is None:
            self._socket = await asyncio.wait_for(self._connected(), _CONNECT_SECONDS)
        loop, line = asyncio.get_running_loop(), self._socket
        size = sum(map(len, parts))
        own = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
        head = f"{method} {path} HTTP/1.1\r\n{self._head}{own}Content-Length: {size}\r\n\r\n".encode()
        for part in (head, *parts):
            await loop.sock_sendall(line, part)
        self.tally.bytes_up += size
        received = b""
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += _unless_closed(await loop.sock_recv(line, _HEAD_BYTES))
        lines = received[:end].decode("latin-1").split("\r\n")
        fields = {key.lower(): value.strip() for key, _, value in (text.partition(":") for text in lines[1:])}
        content = received[end + 4 :]
        left = int(fields.get("content-length", 0)) - len(content)
        self.tally.bytes_down += len(content) + left
        while left and is_kept:
            content += _unless_closed(await loop.sock_recv(line, min(left, _HEAD_BYTES)))
            left = int(fields["content-length"]) - len(content)
        while left:
            left -= _unless_closed(await loop.sock_recv_into(line, _dropped[:left]))
        if fields.get("connection") == "close":
            self.close()
        return Answer(int(lines[0].split()[1]), fields, content if is_kept else b"")

    async def _connected(self) -> socket.socket:
        line = socket.socket()
        try:
            line.setblocking(False)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(line, self._address)
        except BaseException:
            line.close()
            raise
        return line

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _is_closed(line: socket.socket) -> bool:
    """Return whether the other side has closed the connection. A real worker's HTTP client asks this as well."""
    try:
        return not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _unless_closed(received: T) -> T:
    if not received:
        raise ConnectionResetError("the coordinator closed the connection")
    return received


class _LeaseLost(Exception):
    """The work took longer than the lease; it is counted as refused."""


class SimulatedWorker:
    """A worker that registers, claims, downloads, sends heartbeats, waits as if it trained, and sends its update.

    It delivers a small update in one request, and pauses when the coordinator asks for it. If `delivers` or `pauses` is
    false, it does not, like an older worker.
    """

    def __init__(
        self,
        name: str,
        line: Connection,
        train_seconds: float,
        claim_seconds: float,
        *,
        delivers: bool = True,
        pauses: bool = True,
    ) -> None:
        self._name = name
        self.line = line
        self._train_seconds = train_seconds
        self._claim_seconds = claim_seconds
        self._delivers = delivers
        self._pauses = pauses
        self._key = hashlib.sha256(name.encode()).hexdigest()
        self._num_entries = 0

    async def register(self) -> None:
        introduction = {
            "worker_version": "simulated", "methods": {"fedalignuniform": 1}, "device": "cpu", "num_images": 100,
            "channels": 1, "image_size": 8, "anchor": self._anchor(),
        }  # fmt: skip
        await self._post("register", introduction)

    async def work(self) -> None:
        """Do all offered work, until cancelled."""
        with contextlib.closing(self.line):
            while True:
                await self.work_once()

    async def work_once(self) -> None:
        """Claim once, and do the offered work."""
        headers = {PAUSE_HEADER.replace("-", "_"): "1"} if self._pauses else {}
        self.line.tally.num_claims += 1
        answer = await self._post("claim", {"wait_seconds": self._claim_seconds}, **headers)
        if answer.status == 200:
            with contextlib.suppress(_LeaseLost):  # as a worker does: the next claim returns the work
                most = int(answer.headers.get(OFFER_HEADER.lower(), 0)) if self._delivers else 0
                await self._train(json.loads(answer.content), most)
        elif pause := answer.headers.get("retry-after"):
            self.line.close()  # the coordinator would close it during the pause
            await asyncio.sleep(float(pause))

    async def _train(self, item: dict[str, Any], most_delivered: int) -> None:
        await self.line.ask("download", "GET", f"/v1/artifacts/{item['broadcast']}", is_kept=False)
        end = time.monotonic() + random.uniform(0.5, 1.5) * self._train_seconds
        while True:
            progress = {"phase": "training", "epoch": 0, "num_epochs": 1, "step": 0, "num_steps": 1}
            await self._post("heartbeat", {"assignment_id": item["assignment_id"], "progress": progress})
            left = end - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(left, progress_interval(item["lease_seconds"])))
        update = _template(json.dumps(item["plan"]))
        digest, tail = update.of(random.getrandbits(20))
        done = {"assignment_id": item["assignment_id"], "update": digest, "num_examples": 100}
        metrics = {"loss": 1.0, "effective_rank": 4.0, "feature_std": 1.0, "embedding_std": 1.0, "divergence": 0.1}
        submission = {**done, "metrics": metrics, "anchor": self._anchor()}
        if len(update.beginning) + len(tail) <= most_delivered:
            headers = {DELIVERY_HEADER.replace("-", "_"): json.dumps(submission)}
            path = "/v1/work/deliver"
            self._checked(await self.line.ask("deliver", "POST", path, update.beginning, tail, **headers))
            return
        await self._upload(item["assignment_id"], digest, update.beginning, tail)
        await self._post("submit", submission)

    async def _upload(self, assignment: str, digest: str, beginning: bytes, tail: bytes) -> None:
        size = len(beginning) + len(tail)
        if size <= _LARGEST_PUT:
            path = f"/v1/artifacts/{digest}?assignment={assignment}"
            self._checked(await self.line.ask("upload", "PUT", path, beginning, tail))
            return
        pairs = (f"{key} {base64.b64encode(value.encode()).decode()}"
                 for key, value in (("digest", digest), ("assignment", assignment)))  # fmt: skip
        about = {"Tus_Resumable": "1.0.0", "Upload_Length": str(size), "Upload_Metadata": ",".join(pairs)}
        begun = self._checked(await self.line.ask("begin upload", "POST", "/v1/uploads", **about))
        sent = {"Tus_Resumable": "1.0.0", "Upload_Offset": "0", "Content_Type": "application/offset+octet-stream"}
        self._checked(await self.line.ask("upload", "PATCH", begun.headers["location"], beginning, tail, **sent))

    async def _post(self, what: str, body: dict[str, Any], **headers: str) -> Answer:
        content = json.dumps(body).encode()
        path = f"/v1/work/{what}"
        return self._checked(
            await self.line.ask(what, "POST", path, content, Content_Type="application/json", **headers)
        )

    def _checked(self, answer: Answer) -> Answer:
        if answer.status == 409:
            self.line.tally.refusals["lease lost"] += 1
            raise _LeaseLost
        assert answer.status < 400, f"{self._name}: {answer.content.decode()}"
        return answer

    def _anchor(self) -> dict[str, Any]:
        self._num_entries += 3  # a round writes three entries
        head = hashlib.sha256(f"{self._name}/{self._num_entries}".encode()).hexdigest()
        return {"key": self._key, "seq": self._num_entries, "head": head}


class _Template:
    """An update as the plan declares it, equal for all clients except for its last number."""

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        size = sum(num_bytes(spec.dtype, spec.shape) for spec in specs)
        self._format = {"F32": "<f", "I64": "<q"}[specs[-1].dtype]
        self.beginning = header_bytes(specs) + bytes(size - struct.calcsize(self._format))
        self._hash = hashlib.sha256(self.beginning)

    def of(self, value: int) -> tuple[str, bytes]:
        """Return the digest and the last bytes of the update that ends with this number."""
        tail = struct.pack(self._format, value)
        whole = self._hash.copy()
        whole.update(tail)
        return whole.hexdigest(), tail


@functools.lru_cache(maxsize=4)
def _template(plan: str) -> _Template:
    declared = ArtifactPlan.model_validate_json(plan).update
    return _Template(tuple(sorted(declared, key=lambda spec: (spec.dtype != "I64", spec.name))))  # as safetensors does
