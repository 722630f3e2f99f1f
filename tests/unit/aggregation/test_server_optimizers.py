"""FedAvgM and FedAdam, compared with constants worked out by hand, a second implementation, and invariances."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.aggregation import AggregationError, fedadam_step, fedavgm_step


def test_two_rounds_of_fedavgm_match_a_hand_calculation() -> None:
    """x = 10, eta = 0.5, beta = 0.5. Means 8 and 7: m = 2, x = 9; m = 0.5 * 2 + 2 = 3, x = 7.5."""
    x, m = torch.tensor([10.0]), torch.tensor([0.0])
    x, m = fedavgm_step(x, torch.tensor([8.0]), m, learning_rate=0.5, beta=0.5)
    assert (x.item(), m.item()) == (9.0, 2.0)
    x, m = fedavgm_step(x, torch.tensor([7.0]), m, learning_rate=0.5, beta=0.5)
    assert (x.item(), m.item()) == (7.5, 3.0)


def test_two_rounds_of_fedadam_match_a_hand_calculation() -> None:
    """x = 1, eta = 1, beta_1 = beta_2 = 0.5, tau = 1, and v starts from tau^2 = 1.

    Round 1, d = 7: m = 3.5, v = (1 + 49) / 2 = 25, x = 1 + 3.5 / (5 + 1) = 19/12.
    Round 2, d = 5: m = (3.5 + 5) / 2 = 4.25, v = (25 + 25) / 2 = 25, x = 19/12 + 4.25 / 6 = 55/24.
    """
    x, m, v = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])
    settings = {"learning_rate": 1.0, "beta_1": 0.5, "beta_2": 0.5, "tau": 1.0}
    x, m, v = fedadam_step(x, x + 7, m, v, **settings)
    assert (m.item(), v.item()) == (3.5, 25.0)
    assert x.item() == pytest.approx(19 / 12, abs=1e-6)
    x, m, v = fedadam_step(x, x + 5, m, v, **settings)
    assert (m.item(), v.item()) == pytest.approx((4.25, 25.0), abs=1e-5)
    assert x.item() == pytest.approx(55 / 24, abs=1e-6)


def _numbers(seed: int, count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=generator) for _ in range(count)]


def test_fedavgm_equals_torchs_sgd_on_the_difference() -> None:
    """torch's SGD with momentum keeps the same m, because its first m is also the gradient."""
    x, *means = _numbers(0)
    theirs = x.double().clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9)
    m = torch.zeros_like(x)
    for mean in means:
        theirs.grad = theirs.detach() - mean.double()
        optimizer.step()
        x, m = fedavgm_step(x, mean, m, learning_rate=0.7, beta=0.9)
        torch.testing.assert_close(x.double(), theirs.detach(), rtol=1e-5, atol=1e-5)


def test_fedadam_matches_its_equations_in_plain_numbers() -> None:
    x, *means = _numbers(1)
    m, v = torch.zeros_like(x), torch.full_like(x, 1e-6)
    theirs = [(float(value), 0.0, 1e-6) for value in x]
    for mean in means:
        x, m, v = fedadam_step(x, mean, m, v, learning_rate=0.05, beta_1=0.9, beta_2=0.99, tau=1e-3)
        for place, (value, first, second) in enumerate(theirs):
            difference = float(mean[place]) - value
            first = 0.9 * first + 0.1 * difference
            second = 0.99 * second + 0.01 * difference**2
            theirs[place] = (value + 0.05 * first / (math.sqrt(second) + 1e-3), first, second)
    torch.testing.assert_close(x.double(), torch.tensor([each[0] for each in theirs]).double(), rtol=1e-5, atol=1e-5)


def test_fedavgm_with_neutral_settings_is_the_mean() -> None:
    x, mean, *_ = _numbers(2)
    after, m = fedavgm_step(x, mean, torch.zeros_like(x), learning_rate=1, beta=0)
    assert torch.equal(after, mean)
    assert torch.equal(m, x - mean)


def test_without_a_difference_and_momentum_the_weights_do_not_change() -> None:
    x, zero = _numbers(3, 1)[0], torch.zeros(7)
    assert torch.equal(fedavgm_step(x, x, zero, learning_rate=1, beta=0.9)[0], x)
    after, m, v = fedadam_step(x, x, zero, zero + 4, learning_rate=1, beta_1=0.9, beta_2=0.5, tau=2)
    assert torch.equal(after, x)
    assert torch.equal(m, zero)
    assert torch.equal(v, zero + 2)


def test_the_first_step_of_fedadam_does_not_depend_on_the_scale_if_tau_is_small() -> None:
    x, zero = torch.zeros(2), torch.zeros(2)
    settings = {"learning_rate": 0.1, "beta_1": 0.0, "beta_2": 0.0, "tau": 1e-9}
    after, _, _ = fedadam_step(x, torch.tensor([3.0, -300.0]), zero, zero, **settings)
    torch.testing.assert_close(after, torch.tensor([0.1, -0.1]))


@pytest.mark.parametrize("mean", [torch.zeros(3), torch.zeros(7, dtype=torch.float64)])
def test_tensors_of_different_shapes_or_dtypes_are_refused(mean: Tensor) -> None:
    x, zero = torch.zeros(7), torch.zeros(7)
    with pytest.raises(AggregationError, match="a server optimiser has the weights as"):
        fedavgm_step(x, mean, zero, learning_rate=1, beta=0.9)
    with pytest.raises(AggregationError, match="a server optimiser has the weights as"):
        fedadam_step(x, mean, zero, zero, learning_rate=1, beta_1=0.9, beta_2=0.9, tau=1)


def test_integers_are_refused() -> None:
    x = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(AggregationError, match="a server optimiser takes floating-point weights"):
        fedavgm_step(x, x, x, learning_rate=1, beta=0.9)
