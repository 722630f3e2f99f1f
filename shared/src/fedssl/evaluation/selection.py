"""The last and the best round of a run, and how the best was chosen. Does not import torch, for the command line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SMALLER_IS_BETTER = frozenset({"alignment", "loss"})


@dataclass(frozen=True, slots=True)
class BestRound:
    """One measure's values in the last and in the best of the `num_rounds` evaluated rounds."""

    measure: str
    last: float
    last_round: int
    best: float
    best_round: int
    num_rounds: int

    @property
    def chosen(self) -> str:
        """A sentence that describes how the best round was chosen."""
        if self.num_rounds == 1:
            return f"{self.measure}: only round {self.last_round} was evaluated"
        if self.best_round == self.last_round:
            return f"{self.measure}: the last round, {self.last_round}, is the best of {self.num_rounds} evaluated"
        return (
            f"{self.measure}: last is round {self.last_round}; best is round {self.best_round} of {self.num_rounds} "
            f"evaluated, chosen on the test set by {self.measure} itself: report it only next to the last"
        )


def choose_best(history: Sequence[tuple[int, Mapping[str, float]]], measure: str) -> BestRound:
    """Return the last and the best of the rounds in which a measure was taken.

    Args:
        history: rounds and their results, in any order; rounds without the measure are left out.
        measure: the name of a result of :func:`~fedssl.evaluation.suite.evaluate_encoder`. Larger is better, except for
            `alignment` and `loss`.

    If rounds are equal, the first is the best. A round whose value is NaN is never the best.

    Raises:
        ValueError: no round has the measure.

    Example:
        >>> choice = choose_best([(10, {"probe": 0.81}), (20, {"probe": 0.84}), (30, {"probe": 0.83})], "probe")
        >>> choice.last, choice.best, choice.best_round
        (0.83, 0.84, 20)
    """
    judged = sorted((number, results[measure]) for number, results in history if measure in results)
    if not judged:
        raise ValueError(f"no round of this run was evaluated by {measure}")
    sign = -1 if measure in _SMALLER_IS_BETTER else 1
    last_round, last = judged[-1]
    best_round, best = max(judged, key=lambda entry: -math.inf if math.isnan(entry[1]) else sign * entry[1])
    return BestRound(measure, last, last_round, best, best_round, len(judged))
