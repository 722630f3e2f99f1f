"""Uploads artifacts to the coordinator, streamed from files in constant memory.

A small file is sent in one PUT. A larger one is sent by the tus 1.0 protocol: after every interruption it is announced
again and continues at the byte that the coordinator names, whichever process sends it. If the coordinator offers it,
its parts are sent directly to the object store.
"""

import base64
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import UUID

from fedssl.client.connection import Connection, parse, read
from fedssl.client.deadline import TRANSFER_BYTES_PER_SECOND
from fedssl.client.downloads import PROGRESS_BYTES, OnBytes
from fedssl.client.errors import ApiError, BadAnswer, Conflict, NotFound, StoreUnreachable, TryAgain, Unreachable
from fedssl.client.retry import Retry, RetryTimer, is_temporary, with_retries
from fedssl.protocol.views import UploadPart, UploadParts
from fedssl.protocol.work import BROADCAST_HEADER, DELIVERY_HEADER, Submit, Submitted

WHOLE_BYTES = 1 << 20
"""The largest file that is sent in one request: sending it again costs less than asking how much has arrived."""

_CHUNK_BYTES = 1 << 20
_ANSWER_SECONDS = 120.0  # the coordinator checks and syncs what it received before it responds
_ADDRESS_SECONDS = 600.0  # URLs of parts are signed for 15 minutes, and a part must begin within that time
_LARGEST_ANSWER = 1 << 16
_LARGEST_PARTS = 8 << 20
_BUSY_SECONDS = 3600.0  # how long the coordinator may check what it has received
_MOST_TIMES = 16  # a file is sent at most this many times; a coordinator accepts no more
_BROKEN_PARTS = 2  # broken parts in a row that are retried, however long they took
_LOCATION = re.compile(r"/v1/uploads/[0-9a-f-]{36}")
_OFFSET = re.compile(r"[0-9]{1,19}")
_TUS = {"Tus-Resumable": "1.0.0"}
_DELIVER = "/v1/work/deliver"
_NO_DELIVERIES = (400, 404, 405, 411, 413, 414, 431)  # from an older coordinator, or from a proxy with narrow limits


def upload(
    connection: Connection,
    digest: str,
    source: Path,
    *,
    assignment_id: UUID | None = None,
    retry: Retry | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> int:
    """Upload a file from disk, and return how many of its bytes were sent. Bytes that were sent again count again.

    They are counted when they are handed over, one MiB at a time, so at most that many were sent. It is not an error if
    the coordinator already has the file. The time that `retry` allows counts from the last attempt that transferred
    bytes. Raises ClientError.
    """
    sending = _Upload(connection, digest, source, assignment_id, on_bytes)
    if sending.size <= WHOLE_BYTES:
        with_retries(sending.send_whole, retry or connection.retry)
    else:
        sending.run(RetryTimer(retry or connection.retry))
    return sending.num_sent


@dataclass(frozen=True, slots=True)
class Delivery:
    """The result of a delivery.

    Attributes:
        submitted: the response, or None if this kind of request was refused: upload the file, and submit it.
        num_sent: how many bytes of the file were sent; bytes that were sent again count again.
    """

    submitted: Submitted | None
    num_sent: int


def deliver(
    connection: Connection, submission: Submit, source: Path, on_bytes: OnBytes = lambda count: None
) -> Delivery:
    """Send a small file and its submission in one request, and retry if that may help. Raises ClientError."""
    sending = _Upload(connection, submission.update, source, submission.assignment_id, on_bytes)
    try:
        answer = with_retries(partial(sending.send_with, submission), connection.retry)
    except ApiError as error:
        if error.problem.status not in _NO_DELIVERIES:
            raise
        return Delivery(None, sending.num_sent)
    return Delivery(parse(Submitted, answer, f"POST {_DELIVER}"), sending.num_sent)


class _Upload:
    """The upload of one file."""

    def __init__(
        self, connection: Connection, digest: str, source: Path, assignment_id: UUID | None, on_bytes: OnBytes
    ) -> None:
        self.size = source.stat().st_size
        self.num_sent = 0
        self._connection = connection
        self._digest = digest
        self._source = source
        self._assignment_id = assignment_id
        self._on_bytes = on_bytes
        self._reached = 0
        self._broken: Exception | None = None
        self._num_broken_parts = 0
        self._busy_since: float | None = None

    def send_whole(self) -> None:
        """Send the whole file in one PUT."""
        params = {} if self._assignment_id is None else {"assignment": str(self._assignment_id)}
        self._send("PUT", f"/v1/artifacts/{self._digest}", 0, {"Content-Type": "application/octet-stream"}, params)

    def send_with(self, submission: Submit) -> bytes:
        """Send the whole file and its submission in one POST."""
        about = submission.model_dump_json()
        headers = {"Content-Type": "application/octet-stream", DELIVERY_HEADER: about, BROADCAST_HEADER: "1"}
        return self._send("POST", _DELIVER, 0, headers, {})

    def run(self, timer: RetryTimer) -> None:
        """Announce the file and send it from the byte that the coordinator names, repeatedly, until all is sent."""
        while True:
            is_announced, before = False, self.num_sent
            try:
                location, offset, is_direct = self._announce()
                is_announced = True
                self._judge(offset, timer)
                self._on_bytes(offset)
                if offset < self.size:
                    self._send_rest(location, offset, timer, is_direct=is_direct)
                return
            except StoreUnreachable:
                continue  # so the whole file is sent to the coordinator itself
            except (Unreachable, ApiError) as failed:
                error = _passing(failed) if is_announced else failed
                if isinstance(error, ApiError) and error.slug == "upload-busy":
                    self._wait_while_busy(timer, error)
                elif not is_temporary(error):
                    raise
                if self.num_sent > before:
                    self._broken = error
                    timer.bytes_sent()
                timer.wait(error)

    def _wait_while_busy(self, timer: RetryTimer, error: ApiError) -> None:
        """Restart the deadline, because all bytes have arrived and are being checked. Raises `error` after an hour."""
        now = time.monotonic()
        self._busy_since = now if self._busy_since is None else self._busy_since
        if now - self._busy_since > _BUSY_SECONDS:
            raise error
        timer.progress()

    def _judge(self, offset: int, timer: RetryTimer) -> None:
        """Restart the deadline if the last attempt made progress, or raise its error if the time is used up."""
        broken, self._broken = self._broken, None
        if offset >= min(self._reached + PROGRESS_BYTES, self.size) > self._reached:
            self._reached = offset
            timer.progress()
        elif broken is not None:
            timer.bytes_lost(broken)

    def _send_rest(self, location: str, offset: int, timer: RetryTimer, *, is_direct: bool) -> None:
        if is_direct and not offset and self._connection.direct_transfer.is_open:
            self._send_directly(location, timer)
            return
        headers = {**_TUS, "Content-Type": "application/offset+octet-stream", "Upload-Offset": str(offset)}
        self._send("PATCH", location, offset, headers, {})

    def _send_directly(self, location: str, timer: RetryTimer) -> None:
        """Send every part to the object store, until the coordinator misses none. The token is not sent there."""
        while missing := self._missing(location):
            end = time.monotonic() + _ADDRESS_SECONDS
            for part in missing:
                if time.monotonic() > end:
                    break
                self._send_part(part, timer)

    def _send_part(self, part: UploadPart, timer: RetryTimer) -> None:
        headers, before = {"Content-Length": str(part.num_bytes)}, self.num_sent
        content = self._chunks(part.offset, part.num_bytes)
        try:
            with self._connection.direct_transfer.stream("PUT", part.url, headers=headers, content=content) as response:
                read(response, _LARGEST_ANSWER)
        except (Unreachable, ApiError):
            # A part is stored whole or not at all, and may take longer than the time that retries are allowed.
            if self.num_sent > before and self._num_broken_parts < _BROKEN_PARTS:
                self._num_broken_parts += 1
                timer.progress()
            raise
        self._num_broken_parts = 0
        timer.progress()

    def _missing(self, location: str) -> tuple[UploadPart, ...]:
        path = f"{location}/parts"
        with self._connection.stream("POST", path, timeout=_ANSWER_SECONDS) as response:
            missing = parse(UploadParts, read(response, _LARGEST_PARTS), f"POST {path}").parts
        if any(part.offset + part.num_bytes > self.size for part in missing):
            raise BadAnswer(f"POST {path} asks for bytes that the file does not have")
        return missing

    def _announce(self) -> tuple[str, int, bool]:
        """Return where to send the file, from which byte on, and whether its parts may go to the object store."""
        metadata = {"digest": self._digest}
        if self._assignment_id is not None:
            metadata["assignment"] = str(self._assignment_id)
        pairs = (f"{name} {base64.b64encode(value.encode()).decode()}" for name, value in metadata.items())
        headers = {**_TUS, "Upload-Length": str(self.size), "Upload-Metadata": ",".join(pairs)}
        with self._connection.stream("POST", "/v1/uploads", headers=headers, timeout=_ANSWER_SECONDS) as response:
            location = response.headers.get("Location", "")
            offset = response.headers.get("Upload-Offset", "")
            is_direct = response.headers.get("Upload-Direct") == "1"
        # The token is sent to no other server, whatever address a response names.
        if not _LOCATION.fullmatch(location) or not _OFFSET.fullmatch(offset):
            raise BadAnswer("POST /v1/uploads did not return where to send the file: is this a fedssl coordinator?")
        if int(offset) > self.size:
            raise BadAnswer(f"POST /v1/uploads returned offset {offset}, but the file has {self.size} bytes")
        return location, int(offset), is_direct

    def _send(self, method: str, path: str, offset: int, headers: dict[str, str], params: dict[str, str]) -> bytes:
        """Send all bytes from `offset` on. The response comes once the coordinator has checked and stored them."""
        headers = {**headers, "Content-Length": str(self.size - offset)}
        seconds = max(self._connection.timeout, _ANSWER_SECONDS)
        content = self._chunks(offset, self.size - offset)
        with self._connection.stream(
            method,
            path,
            params=params,
            headers=headers,
            content=content,
            timeout=seconds,
            bytes_per_second=TRANSFER_BYTES_PER_SECOND,
        ) as response:
            return read(response, _LARGEST_ANSWER)

    def _chunks(self, offset: int, num_bytes: int) -> Iterator[bytes]:
        if self.num_sent > _MOST_TIMES * self.size:
            raise BadAnswer(f"the coordinator asked for the {self.size} bytes of a file more than {_MOST_TIMES} times")
        end = offset + num_bytes
        with self._source.open("rb") as file:
            file.seek(offset)
            while chunk := file.read(min(_CHUNK_BYTES, end - file.tell())):
                self.num_sent += len(chunk)
                yield chunk
                self._on_bytes(file.tell())


def _passing(error: Unreachable | ApiError) -> Unreachable | ApiError:
    """Return the error of an announced upload, as temporary if its offset has changed or it was forgotten."""
    if isinstance(error, NotFound) or (isinstance(error, Conflict) and error.slug == "offset-mismatch"):
        return TryAgain(error.problem, error.retry_after)
    return error
