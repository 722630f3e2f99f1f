"""Shamir's secret sharing of 32-byte secrets over the prime field of 2^256 + 297.

Reference: Shamir 1979, "How to share a secret". The prime is the smallest above 2^256, so that every secret of 32 bytes
is an element.
"""

from collections.abc import Mapping, Sequence

from fedssl.secure_aggregation.errors import InvalidMessage

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, num_shares: int, coefficients: Sequence[int]) -> list[bytes]:
    """Return the shares at 1, ..., `num_shares` of the polynomial secret + c_1 x + c_2 x^2 + ...

    Args:
        secret: 32 bytes.
        num_shares: number of shares, at least the threshold.
        coefficients: c_1, ..., c_(t-1), random and secret, for this secret only. Any t shares give the
            secret; fewer say nothing about it.

    Returns:
        33 bytes per share, big-endian.

    Example:
        >>> [share[-1] for share in split(bytes(31) + b"\\4", 3, [1, 2])]
        [7, 14, 25]
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not len(coefficients) < num_shares:
        raise ValueError(f"{num_shares} shares cannot reach a threshold of {len(coefficients) + 1}")
    constant = int.from_bytes(secret)
    return [_value([constant, *coefficients], x).to_bytes(SHARE_BYTES) for x in range(1, num_shares + 1)]


def _value(polynomial: Sequence[int], x: int) -> int:
    result = 0
    for coefficient in reversed(polynomial):
        result = (result * x + coefficient) % PRIME
    return result


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret from exactly `threshold` shares, by their points.

    Wrong shares give a wrong secret: compare it with what its owner committed to. Raises InvalidMessage if the
    result is not a secret of 32 bytes.
    """
    value = 0
    for x, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        value += int.from_bytes(share) * numerator * pow(denominator, -1, PRIME)
    value %= PRIME
    if value >> (8 * SECRET_BYTES):
        raise InvalidMessage("the shares do not belong to one secret")
    return value.to_bytes(SECRET_BYTES)
