"""Why a message, a request or a whole round of secure aggregation is refused.

SecureAggregationError
├── InvalidMessage   a message that its sender must correct; it changed nothing
├── Conflict         a second message of the same kind with other bytes
├── PhaseClosed      a message for a phase that is over, or has not begun
├── Refused          a client does not do what the coordinator asked, and has sent nothing
└── NoSum            the round ends without a sum
"""

from fedssl.errors import FedSSLError


class SecureAggregationError(FedSSLError):
    """A step of secure aggregation was refused."""


class InvalidMessage(SecureAggregationError):
    """A message is not what its phase requires. It changed nothing."""


class Conflict(SecureAggregationError):
    """The sender has already sent another message for this phase."""


class PhaseClosed(SecureAggregationError):
    """The phase that the message belongs to is over, or has not begun."""


class Refused(SecureAggregationError):
    """A client does not do what the coordinator asked, because it could disclose an update or gives no sum. Nothing has
    left."""


class NoSum(SecureAggregationError):
    """The round ends without a sum. `clients`: those whose messages were wrong, if that is the reason."""

    def __init__(self, reason: str, clients: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.clients = clients
