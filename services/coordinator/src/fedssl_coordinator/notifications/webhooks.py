"""Sends a notification to a webhook, signed as the Standard Webhooks specification describes (version 1, HMAC-SHA256).

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import base64
import hmac
import time
from uuid import UUID

import httpcore
import httpx

from fedssl_coordinator.core.settings import Settings
from fedssl_coordinator.notifications.public_network import ForbiddenAddress, PublicNetwork

SECONDS = 10.0
"""How long a receiver may take, from the resolution of its name to the status of its answer."""


class NotDelivered(Exception):
    """A notification was not accepted. The text is for people, and contains neither the secret nor the URL's path."""


def secret_text(key: bytes) -> str:
    """Return a key as receivers configure it.

    >>> secret_text(bytes(24))
    'whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA'
    """
    return "whsec_" + base64.b64encode(key).decode()


def signature(key: bytes, delivery_id: UUID, timestamp: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature`."""
    signed = f"{delivery_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def send(url: str, key: bytes, delivery_id: UUID, body: bytes, settings: Settings) -> None:
    """Post a signed notification. Raises NotDelivered unless the receiver answers with a status 2xx.

    Only the head of the answer is read, and a redirect is not followed.
    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise NotDelivered(str(error)) from None
    if address.scheme != "https" and not settings.notify_allow_http:
        raise NotDelivered("http is not allowed: use https, or set FEDSSL_NOTIFY_ALLOW_HTTP")
    timestamp = int(time.time())
    headers: dict[bytes | str, bytes | str] = {
        "Host": address.netloc.decode(),
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "User-Agent": "fedssl",
        "webhook-id": str(delivery_id),
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(key, delivery_id, timestamp, body),
    }
    network = PublicNetwork(settings.allowed_networks(), SECONDS)
    try:
        with (
            httpcore.ConnectionPool(ssl_context=settings.outgoing_tls(), network_backend=network) as pool,
            pool.stream("POST", url, headers=headers, content=body) as response,
        ):
            status = response.status
    except httpcore.TimeoutException:
        raise NotDelivered(f"no answer within {SECONDS:g} s") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, ForbiddenAddress, OSError) as error:
        raise NotDelivered(f"{type(error).__name__}: {error}") from None
    if not 200 <= status < 300:
        hint = ", a redirect, which is not followed: use the address that it leads to" if 300 <= status < 400 else ""
        raise NotDelivered(f"answered with {status}{hint}")
