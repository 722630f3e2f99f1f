"""Artifacts that this process has sent lately, such as a round's weights, which every client of it fetches.

Small ones are kept. Larger ones are shared by the responses that send them at the same time, and released with the
last of these. Their bytes were checked against their digests when they were read. A file that is written again is read
again.
"""

import hashlib
import threading
import weakref
from collections import OrderedDict
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fedssl_coordinator.core.store import store

LARGEST_BYTES = 8 << 20  # of one artifact that is kept
MOST_BYTES = 32 << 20  # of all that are kept
LARGEST_SHARED_BYTES = 64 << 20  # of one artifact: larger ones are read from their files, a mebibyte at a time
MOST_SHARED_BYTES = 128 << 20  # of all that are being sent
_WAIT_SECONDS = 1.0  # while another thread reads: a file of this size takes some milliseconds
_MESSAGE_BYTES = 1 << 20  # per message, which has a deadline (`http.stall_timeout`)


class RecentArtifacts:
    """The artifacts that were asked for last, up to `most_bytes` together and `largest_bytes` each, and those up to
    `largest_shared_bytes` that somebody holds, up to `most_shared_bytes` together."""

    def __init__(
        self,
        most_bytes: int = MOST_BYTES,
        largest_bytes: int = LARGEST_BYTES,
        largest_shared_bytes: int = LARGEST_SHARED_BYTES,
        most_shared_bytes: int = MOST_SHARED_BYTES,
    ) -> None:
        self._most_bytes = most_bytes
        self._largest_bytes = largest_bytes
        self._largest_shared_bytes = largest_shared_bytes
        self._most_shared_bytes = most_shared_bytes
        self._shared: weakref.WeakValueDictionary[tuple[str, str], memoryview] = weakref.WeakValueDictionary()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._changing = threading.Lock()
        self._reading = threading.Lock()

    def get(self, digest: str, num_bytes: int, version: str) -> memoryview | None:
        """Return the bytes of an artifact, and keep them if they are small.

        `num_bytes` and `version` are the store's (`Store.version`). An artifact that was written again since is read
        and checked again. Returns None if it is too large, if its bytes are not those of its digest, if too much is
        being sent, or if another thread takes long to read. Raises ArtifactNotFound.
        """
        if num_bytes > self._largest_shared_bytes:
            return None
        if (content := self._found(digest, version)) is not None:
            return content
        if not self._reading.acquire(timeout=_WAIT_SECONDS):
            return None
        try:
            if (content := self._found(digest, version)) is None:
                if num_bytes > self._largest_bytes and self._num_shared_bytes() + num_bytes > self._most_shared_bytes:
                    return None
                content = memoryview(b"".join(store().read(digest, 0, num_bytes)))
                if hashlib.sha256(content).hexdigest() != digest:
                    return None
                self._keep(digest, _Held(version, content))
        finally:
            self._reading.release()
        return content

    def _num_shared_bytes(self) -> int:
        with self._changing:
            return sum(content.nbytes for content in self._shared.values())

    def _found(self, digest: str, version: str) -> memoryview | None:
        with self._changing:
            held = self._held.get(digest)
            if held is None or held.version != version:
                return self._shared.get((digest, version))
            self._held.move_to_end(digest)
            return held.content

    def _keep(self, digest: str, held: "_Held") -> None:
        with self._changing:
            self._held.pop(digest, None)
            if held.content.nbytes > self._largest_bytes:
                self._shared[digest, held.version] = held.content
                return
            self._held[digest] = held
            while sum(each.content.nbytes for each in self._held.values()) > self._most_bytes:
                self._held.popitem(last=False)


class _Held(NamedTuple):
    version: str
    content: memoryview


class MemoryResponse(Response):
    """Sends bytes that are in memory without copies of them, and with a deadline per mebibyte, as a stream has."""

    def __init__(self, content: memoryview, headers: dict[str, str], media_type: str) -> None:
        super().__init__(None, headers=headers, media_type=media_type)
        self._content = content  # this object itself: other responses find it as long as it exists

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self._content), _MESSAGE_BYTES):
            part = self._content[start : start + _MESSAGE_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        # The server waits for the reader before the next message: this one waits until the last bytes are on their way.
        await send({"type": "http.response.body", "body": b"", "more_body": False})
