"""Alarms about updates: they name the dishonest client, do not blame honest ones, and allow an honest spread."""

import random
from typing import Any

import pytest
import torch

from fedssl.engine.unusual_updates import find_unusual
from support.methods import method_spec
from support.rounds import aggregate, start

Numbers = dict[str, dict[str, float]]


def _cohort(*norms: float, cosine: float = 0.5, num_examples: float = 100) -> Numbers:
    return {
        f"c{index}": {"update_norm": norm, "update_cosine": cosine, "num_examples": num_examples}
        for index, norm in enumerate(norms)
    }


def _named(numbers: Numbers, history: dict[str, list[dict[str, float]]] | None = None) -> list[str]:
    return [each.client_id for each in find_unusual(numbers, history or {})]


def test_a_norm_far_above_the_others_raises_an_alarm() -> None:
    (found,) = find_unusual(_cohort(1, 1.2, 0.9, 50), {})
    assert str(found) == "c3: update_norm 50 is 50 times the median of the others (1)"
    assert found.numbers["update_norm"] == 50
    assert _named(_cohort(1, 1.2, 0.9, 9)) == []  # below 10 times: within what honest clients do
    assert _named(_cohort(1, 1.2, 0.9, 0.001)) == []  # a small update does no harm


def test_fewer_other_clients_require_a_larger_norm_for_an_alarm() -> None:
    assert _named(_cohort(1, 900)) == []
    assert _named(_cohort(1, 1, 900)) == []
    assert _named(_cohort(1, 1001)) == ["c1"]
    assert _named(_cohort(1)) == []


def test_a_client_with_more_images_may_have_a_larger_norm() -> None:
    numbers = _cohort(1, 1, 1, 200)
    assert _named(numbers) == ["c3"]
    numbers["c3"]["num_examples"] = 5000  # 50 times as many images, and steps
    assert _named(numbers) == []


def test_a_wide_honest_spread_raises_no_alarm() -> None:
    assert _named(_cohort(0.001, 0.1, 10, 1000, 30, 0.03)) == []


def test_a_number_of_images_far_above_the_others_or_its_own_earlier_one_raises_an_alarm() -> None:
    numbers = _cohort(1, 1, 1, 1)
    numbers["c0"]["num_examples"] = 10**9
    (found,) = find_unusual(numbers, {})
    assert str(found) == "c0: num_examples 1e+09 is 1e+07 times the median of the others (100)"
    assert _named(_cohort(1, 1, num_examples=201), {"c1": [{"num_examples": 100.0}]}) == ["c1"]
    assert _named(_cohort(1, 1, num_examples=199), {"c1": [{"num_examples": 100.0}]}) == []


def test_a_norm_far_above_its_own_earlier_ones_raises_an_alarm() -> None:
    steady = [{"update_norm": 1.0 + 0.01 * number} for number in range(5)]
    assert _named(_cohort(11, 11), {"c0": steady}) == ["c0"]
    assert _named(_cohort(11, 11), {"c0": steady[:4]}) == []  # too few earlier rounds to compare with
    assert _named(_cohort(0.01, 0.01), {"c0": steady}) == []


def test_an_update_against_the_others_raises_an_alarm() -> None:
    """Use four unit vectors, three with scalar products 0.5 to each other and the fourth reversed.

    The sum has length 2, and its products with the vectors are 1 + 0.5 + 0.5 - 0.5 = 1.5 and 1 - 1.5 = -0.5: cosines
    0.75 and -0.25 to the mean. To the sum of the others, of length sqrt(6), the fourth has -1.5 / sqrt(6) = -0.612, and
    each other one 0.5 / sqrt(2) = 0.354.
    """
    numbers = _cohort(1, 1, 1, 1, cosine=0.75)
    for found in numbers.values():
        found["update_weight_share"] = 0.25
    numbers["c3"]["update_cosine"] = -0.25
    (unusual,) = find_unusual(numbers, {})
    assert str(unusual) == "c3: its cosine to the others' mean is -0.612, and the median of the others is 0.354"


def test_without_shares_the_cosine_to_the_step_is_compared() -> None:
    numbers = _cohort(1, 1, 1, 1, cosine=0.75)
    numbers["c3"]["update_cosine"] = -0.7
    (unusual,) = find_unusual(numbers, {})
    assert str(unusual) == "c3: its update_cosine is -0.7, and the median of the others is 0.75"


_UNIFORM = {"name": "mean", "weighting": "uniform"}


@pytest.mark.parametrize(
    ("reducer", "changes", "shares"),
    [
        ({"name": "mean"}, {}, [0.95238] + [0.0119] * 4),  # 4000 of 4200 images
        ({"name": "mean", "weighting": "batches"}, {}, [125 / 129] + [1 / 129] * 4),  # of 32 images
        (_UNIFORM, {}, [0.2] * 5),
        ({"name": "ldawa", "num_plain_rounds": 1}, {}, [0.2] * 5),
        ({"name": "ldawa", "num_plain_rounds": 0}, {}, []),
        ({"name": "median"}, {}, []),
        ({"name": "eua"}, {}, []),
        (_UNIFORM, {"robustness": {"max_update_norm": 0.9}}, []),  # all are clipped
        (_UNIFORM, {"aggregation": {"server_optimizer": {"name": "fedavgm", "learning_rate": 1.0}}}, []),
    ],
)
def test_shares_are_those_of_the_mean_so_honest_clients_with_many_images_raise_no_alarm(
    reducer: dict[str, Any], changes: dict[str, Any], shares: list[float]
) -> None:
    """Five updates of length 1 have scalar products of 1/4 with each other.

    Each has 1/4 / sqrt(4/16 + 12/64) = 0.378 as its cosine to the mean of the others. With 4000 of 4200 images as the
    first one's share of a mean with equal weights, it would seem to have (0.4 - 0.952) / sqrt(0.545) = -0.748.
    """
    sections: dict[str, Any] = {"cohort": {"min_clients": 3, "min_updates": 3}, **changes}
    spec = method_spec("fedsimclr", method={"name": "fedsimclr", "reducer": reducer}, **sections)
    begun, name = start(spec), "projector.0.weight"
    updates = []
    for number in range(5):
        moved = torch.zeros(begun.received[name].numel())
        moved[0], moved[1 + number] = 0.5, 0.75**0.5
        tensors = {**begun.received, name: begun.received[name] + moved.view_as(begun.received[name])}
        updates.append((50 if number else 4000, tensors))
    measures = aggregate(spec, begun.state, updates).norms.measures
    found = [each["update_weight_share"] for each in measures.values() if "update_weight_share" in each]
    assert found == pytest.approx(shares, rel=1e-3)
    assert find_unusual({client: {**each, "num_examples": 100} for client, each in measures.items()}, {}) == []


def test_a_slightly_negative_cosine_raises_no_alarm() -> None:
    numbers = _cohort(1, 1, 1, 1)
    numbers["c2"]["update_cosine"] = -0.39
    assert _named(numbers, {"c2": [{"update_cosine": 0.9}] * 6}) == []
    numbers["c2"]["update_cosine"] = -0.59
    assert _named(numbers) == []
    numbers["c2"]["update_cosine"] = -0.61
    assert _named(numbers) == ["c2"]
    numbers = _cohort(1, 1, cosine=0.9)  # two clients: only its own earlier rounds can be compared
    numbers["c1"]["update_cosine"] = -0.45
    assert _named(numbers) == []
    assert _named(numbers, {"c1": [{"update_cosine": 0.5}] * 5}) == ["c1"]


def test_honest_clients_are_not_blamed_if_one_client_dominates_the_mean() -> None:
    numbers = _cohort(1, 1, 1, 1000, cosine=-0.4)
    numbers["c3"]["update_cosine"] = 1.0
    earlier = [{"update_cosine": 0.6, "update_norm": 1.0}] * 6
    assert _named(numbers, dict.fromkeys(numbers, earlier)) == ["c3"]
    numbers["c3"]["update_norm"] = 5.0  # not far enough to be detected, but enough to reverse the mean
    assert _named(numbers, dict.fromkeys(numbers, earlier)) == []


@pytest.mark.parametrize("num_clients", [2, 3, 4, 10, 100])
def test_honest_cohorts_of_unequal_sizes_raise_no_alarm(num_clients: int) -> None:
    """Norms have a log-normal spread, sizes are between 60 and 4000 as in the papers' partitions, over 40 rounds."""
    draw = random.Random(num_clients)
    sizes = [draw.uniform(60, 4000) for _ in range(num_clients)]
    history: dict[str, list[dict[str, float]]] = {f"c{index}": [] for index in range(num_clients)}
    for number in range(40):
        numbers = {
            f"c{index}": {
                "update_norm": 3.0 / (1 + 0.1 * number) * (size / 1000) ** 0.7 * draw.lognormvariate(0, 0.3),
                "update_cosine": min(1.0, max(-1.0, draw.gauss(0.4, 0.15))),
                "num_examples": size,
            }
            for index, size in enumerate(sizes)
        }
        assert _named(numbers, {name: each[-20:] for name, each in history.items()}) == []
        for name, found in numbers.items():
            history[name].append(found)
