"""The total loss that a step minimises."""

import pytest
import torch

from fedssl.engine.optimization import total_loss
from fedssl.errors import MethodError


def test_the_total_is_the_sum_of_the_terms_in_float32() -> None:
    a, b = (torch.tensor(value, requires_grad=True) for value in (1.5, 2.0))
    total = total_loss({"a": a.bfloat16(), "b": b})
    assert total.dtype == torch.float32
    assert float(total.detach()) == 3.5


def test_a_loss_without_a_gradient_is_refused() -> None:
    losses = {"trained": torch.ones((), requires_grad=True), "counted": torch.ones(())}
    with pytest.raises(MethodError, match="the loss 'counted' has no gradient: return it among the measurements"):
        total_loss(losses)
