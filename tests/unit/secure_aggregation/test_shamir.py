"""Shamir's secret sharing: any threshold of shares gives the secret, and fewer are consistent with every secret."""

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.shamir import PRIME, combine, split
from support.secure_rounds import random_coefficients


def _is_probably_prime(number: int) -> bool:
    """Run Miller-Rabin with the first bases."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        power = pow(base, odd, number)
        if power not in (1, number - 1) and all(pow(power, 2**i, number) != number - 1 for i in range(1, twos)):
            return False
    return True


def test_the_field_has_the_smallest_prime_above_all_secrets() -> None:
    assert _is_probably_prime(PRIME)
    assert not any(_is_probably_prime(number) for number in range(2**256 + 1, PRIME, 2))


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.data())
def test_any_threshold_of_shares_gives_the_secret(secret: bytes, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 12))
    threshold = data.draw(st.integers(1, count))
    shares = split(secret, count, random_coefficients(threshold))
    points = data.draw(st.permutations(range(1, count + 1)))[:threshold]
    assert combine({point: shares[point - 1] for point in points}) == secret


def test_one_share_less_than_the_threshold_is_consistent_with_every_secret() -> None:
    shares = dict(enumerate(split(bytes([7]) * 32, 4, random_coefficients(3)), start=1))
    for other in (bytes(32), b"\xff" * 32):
        # Compute the share at a third point that gives any other secret with the first two: a polynomial through three
        # points.
        wanted = {0: other, 1: shares[1], 2: shares[2]}
        value = 0
        for x, share in wanted.items():
            factor = 1
            for y in wanted:
                if y != x:
                    factor = factor * (3 - y) * pow(x - y, -1, PRIME) % PRIME
            value = (value + int.from_bytes(share) * factor) % PRIME
        assert combine({1: shares[1], 2: shares[2], 3: value.to_bytes(33)}) == other


def test_a_changed_share_changes_the_secret() -> None:
    secret = bytes(range(32))
    shares = split(secret, 5, random_coefficients(3))
    for points in itertools.combinations(range(1, 6), 3):
        given = {point: shares[point - 1] for point in points}
        given[points[0]] = (int.from_bytes(given[points[0]]) ^ 1).to_bytes(33)
        with contextlib.suppress(InvalidMessage):  # some wrong values have more than 32 bytes
            assert combine(given) != secret


def test_shares_whose_value_is_not_a_secret_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="do not belong to one secret"):
        combine({1: (PRIME - 1).to_bytes(33)})


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="has 32 bytes, not 31"):
        split(bytes(31), 3, [1])
    with pytest.raises(ValueError, match="cannot reach a threshold of 4"):
        split(bytes(32), 3, [1, 2, 3])
