"""Masks change no bit of fixed-point arithmetic: the unmasked sum gives the mean of `FixedPointSum`."""

import math

import numpy as np
import pytest
import torch

from fedssl.aggregation.fixed_point import COUNTED_BITS, fixed_point_mean, fixed_point_words
from fedssl.secure_aggregation import UnmaskedSum
from support.secure_rounds import SecureRound

NUM_CLIENTS, SIZE = 5, 50


@pytest.mark.parametrize("lost", [0, 1])
def test_the_unmasked_mean_has_the_bits_of_the_mean_without_masks(lost: int) -> None:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(SIZE, generator=generator)
    updates = [base + 0.01 * torch.randn(SIZE, generator=generator) for _ in range(NUM_CLIENTS)]
    weights = [60, 4039, 1, 777, 250]
    secure = SecureRound(NUM_CLIENTS, num_words=SIZE + 1)
    for name, update, weight in zip(secure.names, updates, weights, strict=True):
        words = fixed_point_words("w", update, base, weight, fraction_bits=COUNTED_BITS, num_clients=NUM_CLIENTS)
        counted = np.array([weight, *words.tolist()], np.int64)
        secure.words[name] = counted.view(np.uint64)
    outcome = secure.outcome(dict.fromkeys(secure.names[:lost], 2))
    assert isinstance(outcome, UnmaskedSum)
    total, *summed = outcome.words.view(np.int64).tolist()
    assert total == sum(weights[lost:])
    exact = torch.tensor(summed, dtype=torch.float64) / math.ldexp(float(total), COUNTED_BITS) + base.double()
    expected = fixed_point_mean([{"w": update} for update in updates[lost:]], weights[lost:], {"w": base})
    assert torch.equal(exact.float(), expected["w"])
