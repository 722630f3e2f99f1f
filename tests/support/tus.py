"""Uploads with the tus protocol, one request at a time, in ways in which no client of this project sends them."""

import base64
from types import TracebackType
from typing import Any, Self

import httpx

from support.coordinator import Coordinator

PART = "application/offset+octet-stream"


class Tus:
    """A client that sends requests with one token."""

    def __init__(self, coordinator: Coordinator, token: str | None = None, *, verify: Any = False) -> None:
        """Create a client. `verify`: the TLS context if the coordinator requires a certificate."""
        self._http = coordinator.http(token, verify=verify)
        self._http.headers["Tus-Resumable"] = "1.0.0"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def announce(self, num_bytes: int, digest: str, assignment: object = None) -> httpx.Response:
        """Announce an upload and return the answer."""
        values = {"digest": digest} | ({} if assignment is None else {"assignment": str(assignment)})
        pairs = (f"{name} {base64.b64encode(value.encode()).decode()}" for name, value in values.items())
        headers = {"Upload-Length": str(num_bytes), "Upload-Metadata": ",".join(pairs)}
        return self._http.post("/v1/uploads", headers=headers)

    def begin(self, num_bytes: int, digest: str, assignment: object = None) -> str:
        """Begin an upload and return its address."""
        answer = self.announce(num_bytes, digest, assignment)
        assert answer.status_code == 201, answer.text
        return str(answer.headers["location"])

    def send(self, location: str, content: Any, offset: int, **headers: str) -> httpx.Response:
        """Send one part and return the answer."""
        own = {"Upload-Offset": str(offset), "Content-Type": PART}
        changes = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._http.patch(location, content=content, headers={**own, **changes})

    def offset(self, location: str) -> int:
        """Return the offset at which the upload continues."""
        answer = self._http.head(location)
        assert answer.status_code == 200, answer.status_code
        assert answer.headers["cache-control"] == "no-store"
        return int(answer.headers["upload-offset"])

    def request(self, method: str, path: str, **headers: str) -> httpx.Response:
        """Send any other request and return the answer."""
        return self._http.request(method, path, headers=headers)
