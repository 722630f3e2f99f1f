"""Addresses of callers: how they are counted, and which of them are proxies that speak for others."""

import functools
import ipaddress
from collections.abc import Callable


@functools.lru_cache(maxsize=10_000)
def address_key(host: str) -> str:
    """Return the IPv4 address or IPv6 network to count by, because a caller can use every address of its /64 network.

    >>> address_key("192.0.2.7"), address_key("::ffff:192.0.2.7"), address_key("2001:db8::1:2"), address_key("")
    ('192.0.2.7', '192.0.2.7', '2001:db8::', 'unknown')
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return str(address)


def proxies(text: str | None) -> Callable[[str], bool]:
    """Return a function that decides whether a host is one of the proxies, which are listed as uvicorn reads them.

    >>> is_proxy = proxies("127.0.0.1, 10.0.0.0/8")
    >>> is_proxy("10.1.2.3"), is_proxy("192.0.2.7"), proxies(None)("127.0.0.1"), proxies("*")("192.0.2.7")
    (True, False, False, True)
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    networks = []
    for part in parts:
        try:
            networks.append(ipaddress.ip_network(part))
        except ValueError:  # "*", or a name, which no peer has
            continue

    def is_proxy(host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return parts == ["*"] or any(address in network for network in networks)

    return is_proxy
