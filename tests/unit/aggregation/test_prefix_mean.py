"""A mean that was started before all updates had arrived equals `weighted_mean` bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from fedssl.aggregation import AggregationError, weighted_mean
from fedssl.aggregation.prefix_mean import PrefixMean

WEIGHTS = [13, 1, 250, 42]


@dataclass(frozen=True)
class _Load:
    """Creates the tensors of a seed, and records each call."""

    seed: int
    opened: list[int] = field(compare=False)

    def __call__(self) -> Mapping[str, Tensor]:
        self.opened.append(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        return {"w": torch.randn(300_000, generator=generator), "steps": torch.tensor(self.seed)}


def _equal(found: Mapping[str, Tensor], loads: list[_Load], weights: list[int]) -> bool:
    expected = weighted_mean([load() for load in loads], weights)
    return all(torch.equal(found[name], expected[name]) for name in expected | found)


def test_a_mean_started_early_has_the_same_bits() -> None:
    opened: list[int] = []
    loads = [_Load(seed, opened) for seed in range(4)]
    mean = PrefixMean()
    for count in (0, 1, 1, 3):
        mean.extend(loads[:count], WEIGHTS[:count])
    assert opened == [0, 1, 2]
    found = mean.of([_Load(seed, opened) for seed in range(4)], WEIGHTS)
    assert opened == [0, 1, 2, 3]  # each update was read once
    assert _equal(found, loads, WEIGHTS)
    assert _equal(mean.of(loads[:2], WEIGHTS[:2]), loads[:2], WEIGHTS[:2])  # the mean was empty again


@pytest.mark.parametrize(
    ("seeds", "weights"),
    [([1, 2, 3], [1, 250, 42]), ([0, 2], [13, 250]), ([0, 1], [13, 2]), ([0], [13]), ([9, 0, 1], [7, 13, 1])],
    ids=["the first left out", "the second left out", "another weight", "fewer", "another before them"],
)
def test_updates_other_than_the_first_ones_restart_the_mean(seeds: list[int], weights: list[int]) -> None:
    opened: list[int] = []
    mean = PrefixMean()
    mean.extend([_Load(0, opened), _Load(1, opened)], WEIGHTS[:2])
    wanted = [_Load(seed, opened) for seed in seeds]
    assert _equal(mean.of(wanted, weights), wanted, weights)


def test_an_update_that_cannot_be_added_leaves_the_sum_unchanged() -> None:
    opened: list[int] = []
    loads = [_Load(seed, opened) for seed in range(3)]
    mean = PrefixMean()
    mean.extend(loads[:1], WEIGHTS[:1])
    with pytest.raises(AggregationError, match="update 2 has w as"):
        mean.extend([*loads[:2], lambda: {"steps": torch.tensor(1), "w": torch.ones(2)}], WEIGHTS[:3])  # type: ignore[list-item]
    assert _equal(mean.of(loads, WEIGHTS[:3]), loads, WEIGHTS[:3])
    with pytest.raises(AggregationError, match="there are no updates"):
        mean.of([], [])
    with pytest.raises(AggregationError, match="weight 0 must be positive"):
        mean.extend(loads[:1], [0])
