"""Optimisers of the coordinator: the clients' mean gives a direction, and not the next weights themselves.

Also an average of the weights over the rounds. The pseudo-gradient of a round is g = x - mean_k x_k, where x are the
weights that the clients received. SGD with the learning rate 1 and without momentum on g is FedAvg.
"""

from torch import Tensor

from fedssl.aggregation.mean import AggregationError, check_like, rounded


def fedavgm_step(
    previous: Tensor, mean: Tensor, momentum: Tensor, *, learning_rate: float, beta: float
) -> tuple[Tensor, Tensor]:
    """Return a tensor's next value, and the momentum to keep, of one round of FedAvgM.

        m <- beta m + (previous - mean)
        x <- previous - eta m

    Everything is computed in float64, and rounded once to the tensor's dtype.

    Args:
        previous: the tensor that the clients received, floating-point, of any shape.
        mean: the weighted mean of what they returned, of the same shape and dtype.
        momentum: m of the round before, of the same shape and dtype; zeros before the first round.
        learning_rate: eta, of the coordinator.
        beta: the momentum's factor.

    Returns:
        The tensor's next value x, and the momentum m to keep, both of its shape and dtype.

    Raises:
        AggregationError: the tensors differ in shape or dtype, or are not floating-point.

    Example:
        >>> import torch
        >>> x, m = torch.tensor([1.0]), torch.tensor([2.0])
        >>> fedavgm_step(x, torch.tensor([0.0]), m, learning_rate=0.5, beta=0.25)  # m = 0.25 * 2 + 1
        (tensor([0.2500]), tensor([1.5000]))

    Reference: Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, Section 3.3, where eta is 1; the learning rate is that of FedAvgM in Reddi et al. 2021.
    """
    _check(previous, mean, momentum)
    x, m = previous.double(), beta * momentum.double() + (previous.double() - mean.double())
    return rounded(x - learning_rate * m, previous.dtype), rounded(m, previous.dtype)


def fedadam_step(
    previous: Tensor,
    mean: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    learning_rate: float,
    beta_1: float,
    beta_2: float,
    tau: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tensor's next value, and the two moments to keep, of one round of FedAdam.

        d = mean - previous
        m <- beta_1 m + (1 - beta_1) d
        v <- beta_2 v + (1 - beta_2) d^2
        x <- previous + eta m / (sqrt(v) + tau)

    Everything is computed in float64, and rounded once to the tensor's dtype. As in the paper, the moments are not
    corrected for their start, and v starts from tau^2.

    Args:
        previous: the tensor that the clients received, floating-point, of any shape.
        mean: the weighted mean of what they returned, of the same shape and dtype.
        first: m of the round before, of the same shape and dtype; zeros before the first round.
        second: v of the round before, likewise; tau^2 before the first round.
        learning_rate: eta, of the coordinator.
        beta_1, beta_2: the factors of the moments.
        tau: how adaptive the step is: the smaller, the more.

    Returns:
        The tensor's next value x, and the moments m and v to keep, all of its shape and dtype.

    Raises:
        AggregationError: the tensors differ in shape or dtype, or are not floating-point.

    Example:
        >>> import torch
        >>> zero = torch.tensor([0.0])
        >>> fedadam_step(zero, torch.tensor([4.0]), zero, zero, learning_rate=1, beta_1=0.5, beta_2=0.75, tau=2)
        (tensor([0.5000]), tensor([2.]), tensor([4.]))

    Reference: Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2. Deviation: the mean over the clients has
    the run's weights, as in the paper's experiments (Appendix), and not equal ones.
    """
    _check(previous, mean, first, second)
    x, difference = previous.double(), mean.double() - previous.double()
    m = beta_1 * first.double() + (1 - beta_1) * difference
    v = beta_2 * second.double() + (1 - beta_2) * difference.square()
    after = x + learning_rate * m / (v.sqrt() + tau)
    return rounded(after, previous.dtype), rounded(m, previous.dtype), rounded(v, previous.dtype)


def moving_average(average: Tensor, new: Tensor, *, decay: float) -> Tensor:
    """Return the next exponential moving average of a tensor over the rounds: decay average + (1 - decay) new.

    It is computed in float64, and rounded once to the tensor's dtype.

    Args:
        average: of the rounds before, floating-point, of any shape.
        new: the tensor after this round, of the same shape and dtype.
        decay: the factor of the average, in 0..1.

    Returns:
        The next average, of their shape and dtype.

    Raises:
        AggregationError: the tensors differ in shape or dtype, or are not floating-point.

    Example:
        >>> import torch
        >>> moving_average(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 2.0]), decay=0.75)
        tensor([2., 2.])

    Reference: Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging;
    here with exponential weights.
    """
    _check(average, new, what="a moving average")
    return rounded(decay * average.double() + (1 - decay) * new.double(), average.dtype)


def _check(previous: Tensor, *others: Tensor, what: str = "a server optimiser") -> None:
    if not previous.is_floating_point():
        raise AggregationError(f"{what} takes floating-point weights, and these are {previous.dtype}")
    for other in others:
        check_like("the weights", previous, other, what)
