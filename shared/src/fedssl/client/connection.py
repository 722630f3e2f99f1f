"""The connection to a coordinator. Only this module knows how requests are sent and how they can fail."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from fedssl import tracing
from fedssl.client.addresses import is_loopback, no_cookies, parsed, proxies_of_environment
from fedssl.client.deadline import Deadline, observe_deadlines, running
from fedssl.client.direct_transfer import DirectTransfer, MayGoTo
from fedssl.client.errors import BadAnswer, ClientError, InvalidRequest, StoreUnreachable, Unreachable, api_error
from fedssl.client.retry import Retry, with_retries
from fedssl.client.tls import MUTUAL_TLS_HINT, Tls, trust_error
from fedssl.protocol.errors import Problem
from fedssl.protocol.validation import first_problem
from fedssl.protocol.views import Page

M = TypeVar("M", bound=BaseModel)
Params = Mapping[str, str | int | float]

CONNECT_SECONDS = 5.0
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_PROBLEM_BYTES = 1 << 20
_ANSWER_BYTES = 64 << 20  # the limit of a body that is read into memory; files are streamed
_ANSWER_BYTES_PER_SECOND = 16 << 10
_MOST_VALUES = 1 << 19  # a value of 3 bytes costs up to 4 kB of memory in pydantic's errors
MALFORMED = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""The errors of validation: pydantic's ValidationError is a ValueError, and our validators may receive any value."""

_MAX_RETRY_AFTER_SECONDS = 86_400.0
_MISTAKES_LOOKED_AT = 1000  # pydantic describes either all of them or none
_PLACE_CHARACTERS, _MESSAGE_CHARACTERS = 200, 500  # both may contain what was sent
_PAGE_SIZE = 100
_LENGTH = re.compile(r"[0-9]{1,18}")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_HINTS = {
    401: "The token was not accepted: give one that the coordinator made (`fedssl token create`).",
    404: "Nothing answers at this path: is the address that of a fedssl coordinator?",
}


class Connection:
    """Sends requests with the token and turns every failure into a ClientError.

    Threads may share it, and its owner closes it. `timeout` is in seconds. It limits connecting, every wait for bytes,
    and the time until a response's head is complete. The body may take longer, but only while it arrives fast enough
    (`Deadline`).
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: float,
        retry: Retry,
        tls: Tls,
        transport: httpx.BaseTransport | None,
        may_go_to: MayGoTo,
    ) -> None:
        self.url = checked_url(url)
        address = httpx.URL(self.url)
        self._is_encrypted = address.scheme == "https"
        self.timeout = timeout
        self.retry = retry
        if token and not _TOKEN.fullmatch(token):
            raise ClientError("the token holds a space or a character that no token has: copy it again, on its own")
        if token and transport is None:
            tls.check_token_may_go(address)
        verify = tls.context(address) if transport is None else False
        with proxies_of_environment():
            self._http = httpx.Client(
                base_url=self.url,
                # Not compressed, because a few compressed bytes could expand to any size.
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
                cookies=no_cookies(),
                timeout=self._limits(None),
                transport=transport,
                verify=verify,
                # Requests that do not leave this machine do not use a proxy that the environment names.
                trust_env=not is_loopback(address.host),
            )
        if transport is None:
            observe_deadlines(self._http)
        self.direct_transfer = DirectTransfer(address, tls, timeout, may_go_to)

    def close(self) -> None:
        self._http.close()
        self.direct_transfer.close()

    def call(
        self,
        method: str,
        path: str,
        answer: type[M],
        *,
        body: BaseModel | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
        idempotent: bool = True,
        max_bytes: int | None = None,
    ) -> M:
        """Send a request and parse the response, of at most `max_bytes`, or 64 MiB if that is None."""
        content = self.send(
            method,
            path,
            body=body,
            params=params,
            headers=headers,
            timeout=timeout,
            retry=retry,
            idempotent=idempotent,
            max_bytes=max_bytes,
        )
        return parse(answer, content, f"{method} {path}")

    def send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
        idempotent: bool = True,
        max_bytes: int | None = None,
        on_headers: Callable[[Mapping[str, str]], None] = lambda headers: None,
    ) -> bytes:
        """Send a request, retry it if that may help, and return the response's whole body. Raises ClientError.

        `on_headers` receives the response's headers.
        """
        content = None if body is None else body.model_dump_json().encode()
        sent = {"Content-Type": "application/json"} if body is not None else {}

        def attempt() -> bytes:
            with self.stream(
                method, path, params=params, headers={**sent, **(headers or {})}, content=content, timeout=timeout
            ) as response:
                on_headers(response.headers)
                return read(response, max_bytes)

        return with_retries(attempt, retry or self.retry, idempotent=idempotent)

    def fetch(self, path: str, first: int, last: int) -> bytes:
        """Return the bytes from `first` to `last`, both included, of an artifact. Raises ClientError.

        They come from the object store if the coordinator redirects the request there.
        """
        wanted = {"Range": f"bytes={first}-{last}"}

        def attempt() -> bytes:
            headers, accepted = self.offer_direct(wanted)
            with self.stream("GET", path, headers=headers, accepted=accepted) as response:
                if response.status_code != 307:
                    return read(response)
                location = response.headers.get("Location", "")
            try:
                with self.direct_transfer.stream("GET", location, headers=wanted) as response:
                    return read(response)
            except StoreUnreachable:
                return attempt()

        return with_retries(attempt, self.retry)

    def offer_direct(self, headers: Mapping[str, str]) -> tuple[dict[str, str], tuple[int, ...]]:
        """Return the headers of a request for an artifact, and the statuses to accept besides success.

        With 307 the coordinator names the object store that has the bytes, if the request offers to fetch them there.
        """
        return ({**headers, "Accept-Direct": "1"}, (307,)) if self.direct_transfer.is_open else (dict(headers), ())

    def pages(self, path: str, item: type[M], params: Params | None = None) -> Iterator[M]:
        """Yield every item of a list, page by page. Raises BadAnswer if a page follows itself."""
        page_type = Page[item]  # type: ignore[valid-type]
        query: dict[str, str | int | float] = {"limit": _PAGE_SIZE, **(params or {})}
        while True:
            page = self.call("GET", path, page_type, params=query)
            yield from page.items
            if page.next_cursor is None:
                return
            if page.next_cursor == query.get("cursor"):
                raise BadAnswer(f"GET {path} returned one page twice: does a proxy in between leave out the query?")
            query["cursor"] = page.next_cursor

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | Iterable[bytes] | None = None,
        timeout: float | None = None,
        accepted: tuple[int, ...] = (),
        bytes_per_second: float | None = _ANSWER_BYTES_PER_SECOND,
    ) -> Iterator[httpx.Response]:
        """Make one attempt; the block reads the response. Turns httpx's errors into a ClientError.

        Statuses outside 200 to 299 raise, except those in `accepted`. `bytes_per_second` is the lowest rate at which
        the body may arrive. If it is None, as for a stream of events, any rate is accepted.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = None if bytes_per_second is None else Deadline(seconds, bytes_per_second)
        try:
            with (
                running(deadline),
                self._http.stream(
                    method,
                    path,
                    params=params,
                    headers={**tracing.carried(), **(headers or {})},
                    content=content,
                    timeout=self._limits(timeout),
                ) as response,
            ):
                if deadline is not None:
                    deadline.head_came()
                if not response.is_success and response.status_code not in accepted:
                    raise _refusal(response)
                yield response
        except httpx.TransportError as error:
            if (untrusted := trust_error(error, self.url)) is not None:
                raise untrusted from None
            raise Unreachable(self._no_answer(error), maybe_sent=not isinstance(error, _NOT_SENT)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BadAnswer(f"{self.url} gave an answer that cannot be read: {error}") from None

    def _limits(self, timeout: float | None) -> httpx.Timeout:
        seconds = self.timeout if timeout is None else timeout
        return httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS), write=min(seconds, self.timeout))

    def _no_answer(self, error: httpx.TransportError) -> str:
        reason = str(error) or type(error).__name__
        # A coordinator that requires certificates disconnects without a response if it does not accept the client's.
        hint = MUTUAL_TLS_HINT if self._is_encrypted and not isinstance(error, _NOT_SENT) else ""
        return (
            f"No answer from {self.url} ({reason}): check that the coordinator runs and that this is its address{hint}."
        )


def read(response: httpx.Response, max_bytes: int | None = None) -> bytes:
    """Return the body of a response that is not a file. Raises BadAnswer if it is compressed or too long.

    With `max_bytes`, as for a worker, it also raises BadAnswer if the body could have too many JSON values.
    """
    if _is_packed(response):
        raise BadAnswer(
            f"{response.request.url.host} compresses its answers, which was not requested: is there a proxy in between?"
        )
    is_limited = max_bytes is not None
    max_bytes = _ANSWER_BYTES if max_bytes is None else max_bytes
    too_long = BadAnswer(
        f"{response.request.url.host} sends an answer of more than {max_bytes} bytes: is this a fedssl coordinator?"
    )
    if content_length(response) > max_bytes:
        raise too_long
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > max_bytes:
            raise too_long
    if is_limited and body.count(b",") + body.count(b"[") + body.count(b"{") > _MOST_VALUES:
        raise BadAnswer(
            f"{response.request.url.host} sends an answer of more than {_MOST_VALUES} values: is this a fedssl "
            "coordinator?"
        )
    return bytes(body)


def content_length(response: httpx.Response) -> int:
    """Return the announced length of the body, or 0 if none is announced. Raises BadAnswer if it is not a length."""
    text = response.headers.get("Content-Length") or "0"
    if not _LENGTH.fullmatch(text):
        raise BadAnswer(f"{response.request.url.host} sent an invalid Content-Length: {text[:50]!r}")
    return int(text)


def _is_packed(response: httpx.Response) -> bool:
    return bool(response.headers.get("Content-Encoding", "identity") != "identity")


def parse(model: type[M], content: str | bytes, what: str) -> M:
    """Parse a response, or part of one, as a model of the protocol. Raises BadAnswer, whose message names it `what`."""
    try:
        return model.model_validate_json(content)
    except MALFORMED as error:
        reason = summary(error) if isinstance(error, ValidationError) else type(error).__name__
        raise BadAnswer(
            f"{what} gave an answer that this client does not understand ({reason}): "
            "is this a fedssl coordinator, and of a version near this client's?"
        ) from None


def request_body(model: type[M], **values: Any) -> M:
    """Return the body of a request. Raises InvalidRequest, which names each argument that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest(error) from None


def summary(error: ValidationError) -> str:
    """Describe the first problem, without the value, or count the problems if there are very many."""
    if error.error_count() > _MISTAKES_LOOKED_AT:
        return f"{error.error_count()} values are not valid"
    first = first_problem(error)
    return f"{first.place[:_PLACE_CHARACTERS] or 'the whole answer'}: {first.message[:_MESSAGE_CHARACTERS]}"


def checked_url(url: str) -> str:
    """Return a coordinator's address in the form in which it is used. Raises ClientError."""
    address = parsed(url)
    if address is None:
        raise ClientError("The coordinator's address must be http://HOST:PORT or https://HOST, without a user in it.")
    return str(address).rstrip("/")


def _refusal(response: httpx.Response) -> ClientError:
    if response.is_redirect:
        return BadAnswer(
            f"{response.request.url.host} redirects to another address: give the coordinator's own address. "
            "Redirects are not followed, so that the token is sent to no other server."
        )
    body = b""
    for chunk in () if _is_packed(response) else response.iter_bytes():
        body += chunk
        if len(body) > _PROBLEM_BYTES:
            break
    return api_error(_problem(response, body), retry_after(response.headers))


def _problem(response: httpx.Response, body: bytes) -> Problem:
    status = response.status_code
    try:
        return Problem.model_validate_json(body).model_copy(update={"status": status})
    except MALFORMED:  # a proxy's page, or another program's
        title = response.reason_phrase or "Error"
        unexplained = f"The answer was {status} {title}, without an explanation: it may be that of a proxy."
        detail = _HINTS.get(status, unexplained)
        return Problem(type="about:blank", title=title, status=status, detail=detail)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return after how many seconds a response asks for a retry, or None if it does not ask."""
    value = headers.get("Retry-After", "").strip()
    if not value:
        return None
    if value.isascii() and value.isdecimal():
        return min(float(value[:20]), _MAX_RETRY_AFTER_SECONDS)
    now = headers.get("Date") or format_datetime(datetime.now(UTC))  # by the server's clock, like the value
    try:
        seconds = (parsedate_to_datetime(value) - parsedate_to_datetime(now)).total_seconds()
    except MALFORMED:  # also raised for a time without a zone
        return None
    return min(max(0.0, seconds), _MAX_RETRY_AFTER_SECONDS)
