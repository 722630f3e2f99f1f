"""What addresses say of who can reach them."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, and nobody else's; a name other than localhost may mean any.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
