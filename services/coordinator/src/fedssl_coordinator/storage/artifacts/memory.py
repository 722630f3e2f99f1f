"""Small artifacts that this process has sent lately, such as a round's weights, which each of its clients fetches.

Their bytes were checked against their digests when they were read. A file that is written again is read again.
"""

import hashlib
import threading
from collections import OrderedDict
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fedssl_coordinator.core.store import store

LARGEST_BYTES = 8 << 20  # per artifact: larger ones are read from their files, a mebibyte at a time
MOST_BYTES = 32 << 20  # of all artifacts together
_WAIT_SECONDS = 1.0  # to wait while another thread reads: a file of this size takes some milliseconds
_MESSAGE_BYTES = 1 << 20  # per message, which has a deadline (`http.protocol`)


class RecentArtifacts:
    """The artifacts that were asked for last, up to `most_bytes` together and `largest_bytes` each."""

    def __init__(self, most_bytes: int = MOST_BYTES, largest_bytes: int = LARGEST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._largest_bytes = largest_bytes
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._changing = threading.Lock()
        self._reading = threading.Lock()

    def get(self, digest: str, num_bytes: int, version: str) -> bytes | None:
        """Return the bytes of an artifact, and keep them. `num_bytes` and `version` are the store's (`Store.version`).

        An artifact that was written again since is read and checked again. Returns None if it is too large, if its
        bytes are not those of its digest, or if another thread takes long to read. Raises ArtifactNotFound.
        """
        if num_bytes > self._largest_bytes:
            return None
        if (content := self._found(digest, version)) is not None:
            return content
        if not self._reading.acquire(timeout=_WAIT_SECONDS):
            return None
        try:
            if (content := self._found(digest, version)) is None:
                content = b"".join(store().read(digest, 0, num_bytes))
                if hashlib.sha256(content).hexdigest() != digest:
                    return None
                self._keep(digest, _Held(version, content))
        finally:
            self._reading.release()
        return content

    def _found(self, digest: str, version: str) -> bytes | None:
        with self._changing:
            held = self._held.get(digest)
            if held is None or held.version != version:
                return None
            self._held.move_to_end(digest)
            return held.content

    def _keep(self, digest: str, held: "_Held") -> None:
        with self._changing:
            self._held.pop(digest, None)
            self._held[digest] = held
            while sum(len(each.content) for each in self._held.values()) > self._most_bytes:
                self._held.popitem(last=False)


class _Held(NamedTuple):
    version: str
    content: bytes


class MemoryResponse(Response):
    """Sends bytes that are in memory without copies of them, and with a deadline per mebibyte, as a stream has."""

    def __init__(self, content: bytes, headers: dict[str, str], media_type: str) -> None:
        super().__init__(None, headers=headers, media_type=media_type)
        self._content = memoryview(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self._content), _MESSAGE_BYTES):
            part = self._content[start : start + _MESSAGE_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        # The server waits for the reader before the next message: this one waits until the last bytes are on their way.
        await send({"type": "http.response.body", "body": b"", "more_body": False})
