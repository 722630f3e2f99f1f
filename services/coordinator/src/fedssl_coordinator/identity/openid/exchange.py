"""Requests to an OpenID Connect provider: bounded in size, time and number."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog

from fedssl.client.addresses import proxies_of_environment
from fedssl.client.deadline import Deadline, observe_deadlines, running
from fedssl.client.errors import ClientError
from fedssl_coordinator.core.problems import ProblemError, printable

log = structlog.get_logger(__name__)

_SECONDS = 10.0
_BYTES_PER_SECOND = 1 << 14
_MAX_BYTES = 1 << 20
_MAX_AT_A_TIME = 8  # at most this many request threads wait for a provider: a slow one must leave some for the API
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "fedssl-coordinator"}


class Exchange:
    """Sends requests to one provider. Redirects are not followed. Threads may share it."""

    def __init__(self, issuer: str, ca_file: Path | None) -> None:
        """Create the client. Trusts only the authorities in `ca_file` (PEM), or the machine's if it is None.

        Raises ProblemError.
        """
        self._issuer = issuer
        self._places = threading.BoundedSemaphore(_MAX_AT_A_TIME)
        try:
            trusted = httpx.create_ssl_context() if ca_file is None else ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise self.unusable(f"FEDSSL_OIDC_CA_FILE {ca_file} cannot be used ({error})") from None
        try:
            with proxies_of_environment():
                self._http = httpx.Client(verify=trusted, timeout=_SECONDS, headers=_HEADERS)
        except ClientError as error:
            raise self.unusable(str(error)) from None
        observe_deadlines(self._http)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the few places for people who wait for the provider. Raises ProblemError if none is free."""
        if not self._places.acquire(blocking=False):
            raise self.unusable(f"{_MAX_AT_A_TIME} people wait for it already")
        try:
            yield
        finally:
            self._places.release()

    def json(self, method: str, url: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON object of an answer. Raises ProblemError if there is none."""
        try:
            with (
                running(Deadline(_SECONDS, _BYTES_PER_SECOND)),
                self._http.stream(method, url, **parameters) as response,
            ):
                body = bytearray()
                for piece in response.iter_raw():
                    body += piece
                    if len(body) > _MAX_BYTES:
                        raise self.unusable(f"{url} sent more than {_MAX_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.unusable(f"{url} did not answer: {str(error) or type(error).__name__}") from None
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise self.unusable(f"{url} answered {response.status_code} without JSON") from None
        if not isinstance(content, dict):
            raise self.unusable(f"{url} answered {response.status_code} without a JSON object")
        return response.status_code, content

    def unusable(self, reason: str) -> ProblemError:
        """Return the error for a person whose provider cannot be used at the moment. The log has the reason."""
        log.warning("openid.provider_unusable", issuer=self._issuer, reason=printable(reason))
        detail = (
            f"the provider {self._issuer} cannot be used at the moment ({printable(reason, 300)}): try again "
            "shortly, or sign in with a token"
        )
        return ProblemError("unavailable", detail)
