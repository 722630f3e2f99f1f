"""Artifacts to the coordinator: streamed from files, in constant memory.

A small one is one PUT. A larger one goes by the protocol tus 1.0: announced once more after every break, it goes on at
the byte that the coordinator names, whichever process sends it.
"""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from fedssl.client.connection import Connection
from fedssl.client.downloads import OnBytes
from fedssl.client.errors import ApiError, BadAnswer, Conflict, NotFound, Unreachable
from fedssl.client.retry import Backoff, Retry, is_temporary, with_retries

WHOLE_BYTES = 1 << 20
"""The largest file that is sent in one request: it costs less to send again than to ask how much has arrived."""

_CHUNK_BYTES = 1 << 20
_ANSWER_SECONDS = 120.0  # the coordinator checks and syncs what it received before it answers
_LOCATION = re.compile(r"/v1/uploads/[0-9a-f-]{36}")
_OFFSET = re.compile(r"[0-9]{1,19}")
_TUS = {"Tus-Resumable": "1.0.0"}


def upload(
    connection: Connection,
    digest: str,
    source: Path,
    *,
    assignment_id: UUID | None = None,
    retry: Retry | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> int:
    """Send a file from disk, and return how many of its bytes were put on the line: those sent again count again.

    They are counted as they are handed over, a mebibyte at a time, so at most that many have left. One that the
    coordinator has already is no error. The time that `retry` allows counts from the last byte that arrived. Raises
    ClientError.
    """
    sending = _Upload(connection, digest, source, assignment_id, on_bytes)
    if sending.size <= WHOLE_BYTES:
        with_retries(sending.send_whole, retry or connection.retry)
    else:
        sending.run(Backoff(retry or connection.retry))
    return sending.num_sent


class _Upload:
    """One file on its way out."""

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

    def send_whole(self) -> None:
        """One PUT with all of it."""
        params = {} if self._assignment_id is None else {"assignment": str(self._assignment_id)}
        self._send("PUT", f"/v1/artifacts/{self._digest}", 0, {"Content-Type": "application/octet-stream"}, params)

    def run(self, backoff: Backoff) -> None:
        """Announce, send from the byte that the coordinator names, and again until nothing is left to send."""
        reached = 0
        while True:
            is_announced = False
            try:
                location, offset = self._announce()
                is_announced = True
                if offset > reached:
                    reached = offset
                    backoff.progress()
                self._on_bytes(offset)
                if offset >= self.size:
                    return
                headers = {**_TUS, "Content-Type": "application/offset+octet-stream", "Upload-Offset": str(offset)}
                self._send("PATCH", location, offset, headers, {})
                return
            except (Unreachable, ApiError) as error:
                if isinstance(error, ApiError) and error.slug == "upload-busy":
                    backoff.progress()  # all of it is there, and is being checked
                elif not (is_temporary(error) or (is_announced and _is_elsewhere(error))):
                    raise
                backoff.wait(error)

    def _announce(self) -> tuple[str, int]:
        """Where to send it, and from which byte on."""
        metadata = {"digest": self._digest}
        if self._assignment_id is not None:
            metadata["assignment"] = str(self._assignment_id)
        pairs = (f"{name} {base64.b64encode(value.encode()).decode()}" for name, value in metadata.items())
        headers = {**_TUS, "Upload-Length": str(self.size), "Upload-Metadata": ",".join(pairs)}
        with self._connection.stream("POST", "/v1/uploads", headers=headers, timeout=_ANSWER_SECONDS) as response:
            location = response.headers.get("Location", "")
            offset = response.headers.get("Upload-Offset", "")
        # The token goes nowhere else, wherever an answer points to.
        if not _LOCATION.fullmatch(location) or not _OFFSET.fullmatch(offset):
            raise BadAnswer("POST /v1/uploads did not say where to send the file: is this a fedssl coordinator?")
        return location, int(offset)

    def _send(self, method: str, path: str, offset: int, headers: dict[str, str], params: dict[str, str]) -> None:
        """All bytes from `offset` on. The answer comes once the coordinator has checked and stored them."""
        headers = {**headers, "Content-Length": str(self.size - offset)}
        seconds = max(self._connection.timeout, _ANSWER_SECONDS)
        content = self._chunks(offset)
        with self._connection.stream(
            method, path, params=params, headers=headers, content=content, timeout=seconds
        ) as response:
            response.read()

    def _chunks(self, offset: int) -> Iterator[bytes]:
        with self._source.open("rb") as file:
            file.seek(offset)
            while chunk := file.read(_CHUNK_BYTES):
                self.num_sent += len(chunk)
                yield chunk
                self._on_bytes(file.tell())


def _is_elsewhere(error: Exception) -> bool:
    """Whether the upload has moved on, or was forgotten, since it was announced."""
    return isinstance(error, NotFound) or (isinstance(error, Conflict) and error.slug == "offset-mismatch")
