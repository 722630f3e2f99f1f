"""Parses and classifies the addresses to which requests are sent."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from fedssl.client.errors import ClientError

_MAX_PORT = 65535


def parsed(url: str) -> httpx.URL | None:
    """Return the address of a server, or None if it is not an http or https URL, or contains a user name.

    >>> parsed("https://fed.example.org/v1"), parsed("https://user@host"), parsed("file:///etc/passwd")
    (URL('https://fed.example.org/v1'), None, None)
    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        return None
    is_one = address.scheme in ("http", "https") and address.host and not address.userinfo
    return address if is_one and 0 < (address.port or 1) <= _MAX_PORT else None


def origin(address: httpx.URL) -> str:
    """Return the server of an address (scheme, host and port), without the path and the query.

    >>> origin(httpx.URL("https://store.example.org:443/bucket/key?signature=x"))
    'https://store.example.org'
    """
    return f"{address.scheme}://{address.netloc.decode()}"


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address, which only this machine can reach.

    The only name that counts is localhost, because any other may stand for any address.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(url: str) -> bool:
    """Return whether no one on the way can read what is sent to this URL.

    >>> is_private("https://id.example.org"), is_private("http://127.0.0.1:5000"), is_private("http://id.example.org")
    (True, True, False)
    """
    address = parsed(url)
    return address is not None and (address.scheme == "https" or is_loopback(address.host))


def no_cookies() -> CookieJar:
    """Return a cookie jar that keeps none: a proxy could set cookies until every further request was too large."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))


@contextmanager
def proxies_of_environment() -> Iterator[None]:
    """Raise ClientError if the block creates a client that cannot use the proxies which the environment names."""
    try:
        yield
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ClientError(
            f"the proxies of the environment cannot be used ({error}): check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY "
            "and NO_PROXY. A proxy is http://HOST:PORT, and NO_PROXY lists names and single addresses, without brackets"
        ) from None
