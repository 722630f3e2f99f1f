"""A weighted mean that is begun with the first updates of a round, while the others are still on their way."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fedssl.aggregation.mean import RunningMean, checked_weights

Load = Callable[[], Mapping[str, Tensor]]
"""Opens an update's tensors. Two that compare equal open equal tensors."""


class PrefixMean:
    """The running mean of the first updates in their order, and which these are.

    Whether it can be continued is decided by comparison only: if the updates that it has are not the first of the
    requested ones, with the same weights, it starts from scratch. So it always gives the bits of `weighted_mean`,
    whatever happened to a round in the meantime.
    """

    def __init__(self) -> None:
        self._mean, self._added = _empty()

    def extend(self, loads: Sequence[Load], weights: Sequence[float]) -> None:
        """Add those of these updates that the mean does not have yet. Raises AggregationError and what `load` raises,
        after which the mean starts from scratch the next time."""
        wanted = list(zip(loads, checked_weights(weights), strict=True))
        mean, added = self._mean, self._added
        if added != wanted[: len(added)]:
            mean, added = _empty()
        self._mean, self._added = _empty()  # if an update cannot be read, nothing is left half added
        for load, weight in wanted[len(added) :]:
            mean.add(load(), weight)
        self._mean, self._added = mean, wanted

    def of(self, loads: Sequence[Load], weights: Sequence[float]) -> dict[str, Tensor]:
        """Return `weighted_mean` of the updates. Only those that the mean does not have yet are read.

        Afterwards the mean is empty.
        """
        self.extend(loads, weights)
        result = self._mean.result()
        self._mean, self._added = _empty()  # the sums are twice as large as the result
        return result


def _empty() -> tuple[RunningMean, list[tuple[Load, float]]]:
    return RunningMean(), []
