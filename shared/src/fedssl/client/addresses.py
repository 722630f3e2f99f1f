"""Addresses that requests go to."""

import ipaddress

import httpx

_MAX_PORT = 65535


def parsed(url: str) -> httpx.URL | None:
    """A server's address, over http or https and without a user in it; None: it is none.

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
    """Its server, without path and query.

    >>> origin(httpx.URL("https://store.example.org:443/bucket/key?signature=x"))
    'https://store.example.org'
    """
    return f"{address.scheme}://{address.netloc.decode()}"


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, and nobody else's; a name other than localhost may mean any.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(url: str) -> bool:
    """Return whether no one in between can read what is sent to this URL.

    >>> is_private("https://id.example.org"), is_private("http://127.0.0.1:5000"), is_private("http://id.example.org")
    (True, True, False)
    """
    address = parsed(url)
    return address is not None and (address.scheme == "https" or is_loopback(address.host))
