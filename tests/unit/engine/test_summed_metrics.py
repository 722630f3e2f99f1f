"""The means and counts that a secure sum gives, with constants worked out by hand."""

import math

import pytest
import torch

from fedssl.engine.summed_metrics import MEANS, NUM_WORDS, fixed_mean, mean_loss, metric_words, summed_metrics
from fedssl.methods.api import Context, Metrics
from support.methods import context, method_spec

FULL: Metrics = {"loss": 0.5, "effective_rank": 3.0, "feature_std": 0.5, "embedding_std": 0.25, "divergence": 0.125}


def _ctx(**watch: object) -> Context:
    return context(method_spec("fedsimclr", watch={"first_round": 1, **watch}), 1)


def test_the_words_of_one_client_match_values_worked_out_by_hand() -> None:
    words = metric_words(3, FULL, 4, _ctx(min_effective_rank=4, max_divergence=0.1), is_clipped=True).tolist()
    one = 1 << 24
    means = [0, 3 * one // 2, 0, 9 * one, 0, 3 * one // 2, 0, 3 * one // 4, 0, 3 * one // 8]
    assert words == [3, 1, *means, 1, 0, 0, 1]
    assert len(words) == NUM_WORDS


def test_the_means_are_weighted_by_images() -> None:
    ctx = _ctx(min_effective_rank=4)
    one = metric_words(1, FULL, 2, ctx, is_clipped=False)
    other = metric_words(3, {**FULL, "loss": 2.5, "effective_rank": 5.0}, 2, ctx, is_clipped=False)
    found = summed_metrics(one + other, 2)
    assert found["num_examples"] == 4
    assert (found["loss"], found["effective_rank"]) == (2.0, 4.5)
    assert found["num_crossed/effective_rank"] == 1
    assert "num_clipped" not in found
    assert fixed_mean([2.5, 0.5], [3, 1]) == mean_loss({"a": 0.5, "b": 2.5}, {"a": 1, "b": 3})["loss"] == 2.0
    assert mean_loss({}, {"a": 1}) == {}


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, 1e30])
def test_a_metric_that_one_client_lacks_has_no_mean(loss: float | None) -> None:
    lacking = {name: value for name, value in {**FULL, "loss": loss}.items() if value is not None}
    words = metric_words(7, lacking, 2, _ctx(), is_clipped=False) + metric_words(9, FULL, 2, _ctx(), is_clipped=False)
    assert summed_metrics(words, 2).keys() == {"num_examples", *MEANS} - {"loss"}


def test_impossible_counts_are_left_out() -> None:
    words = metric_words(7, FULL, 2, _ctx(), is_clipped=False)
    words[1], words[-1], words[-2] = 3, -1, 2
    assert {name for name in summed_metrics(words, 2) if name.startswith("num_")} == {
        "num_examples",
        "num_crossed/embedding_std",
    }
    assert summed_metrics(torch.zeros(NUM_WORDS, dtype=torch.int64), 2) == {}
