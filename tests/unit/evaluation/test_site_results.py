"""Accuracies from counts: hand-worked constants, scikit-learn's numbers, pooling, and impossible counts."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics

from fedssl.evaluation.site import count_predictions
from fedssl.evaluation.site_results import (
    METRICS,
    WorstSite,
    measure_results,
    pooled_counts,
    summarise_sites,
    unusable_counts,
)
from fedssl.protocol.evaluation import SitesConfig
from fedssl.protocol.site_evaluation import MeasureCounts, SiteCounts

CONFIG = SitesConfig(classes=("a", "b", "c"), min_count=1, score_bins=2)


def _site(confusion, positives, negatives, classes=(0, 1), num_test=4, **more):
    own = MeasureCounts.model_validate({"confusion": confusion, "positives": positives, "negatives": negatives})
    return SiteCounts(classes=classes, min_count=1, num_train=9, num_test=num_test, measures={"knn": own}, **more)


# Four images of a, three of them right; two of b, one of them right.
FIRST = _site([[3, 1], [1, 1]], [[1, 3], [1, 1]], [[1, 1], [3, 1]], num_test=6)
# Three images of b and three of c, all of them predicted as c.
SECOND = _site([[0, 3], [0, 3]], [[3, 0], [0, 3]], [[3, 0], [3, 0]], classes=(1, 2), num_test=6)


def test_results_match_values_worked_out_by_hand():
    found = measure_results(FIRST.measures["knn"], CONFIG)
    assert found["accuracy"] == 4 / 6
    assert found["balanced_accuracy"] == (3 / 4 + 1 / 2) / 2
    assert found["macro_f1"] == pytest.approx((2 * 3 / (4 + 4) + 2 * 1 / (2 + 2)) / 2)
    # a: of the 8 pairs 3 are right and 4 are equal; b: 3 are right and 4 are equal.
    assert found["auroc"] == (5 / 8 + 5 / 8) / 2


def test_pooled_results_are_computed_from_the_summed_counts():
    pooled = pooled_counts([FIRST, SECOND], CONFIG, ["knn"])
    assert pooled.measures["knn"].confusion == ((3, 1, 0), (1, 1, 3), (0, 0, 3))
    assert pooled.measures["knn"].positives == ((1, 3), (4, 1), (0, 3))
    summary = summarise_sites({"x": FIRST, "y": SECOND}, CONFIG, ["knn"])
    assert summary.pooled["knn/accuracy"] == 7 / 12
    assert summary.mean["knn/accuracy"] == pytest.approx((4 / 6 + 3 / 6) / 2)
    assert summary.worst["knn/accuracy"] == WorstSite("y", 0.5)
    assert summary == summarise_sites({"y": SECOND, "x": FIRST}, CONFIG, ["knn"])


def test_a_diverged_site_is_the_worst_and_does_not_change_the_pooled_results():
    diverged = SiteCounts(classes=(0, 1), min_count=1, num_train=9, num_test=6, measures={})
    summary = summarise_sites({"x": FIRST, "z": diverged}, CONFIG, ["knn"])
    assert summary.pooled["knn/accuracy"] == 4 / 6
    assert summary.worst["knn/accuracy"].client_id == "z"
    assert math.isnan(summary.mean["knn/accuracy"])
    assert summarise_sites({}, CONFIG, ["knn"]).pooled == {}


def test_results_agree_with_scikit_learn():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 500)
    # The scores lie in the middle of a bin, so that binning changes neither their order nor their ties.
    scores = (rng.integers(0, 50, (500, 3)) + 0.5) / 50
    config = SitesConfig(classes=("a", "b", "c"), score_bins=50)
    found = measure_results(count_predictions(torch.tensor(scores), torch.tensor(labels), config), config)
    predicted = scores.argmax(axis=1)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(labels, predicted))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
    each = [metrics.roc_auc_score(labels == c, scores[:, c]) for c in range(3)]
    assert found["auroc"] == pytest.approx(np.mean(each))


def test_results_for_several_labels_agree_with_scikit_learn():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, (400, 3))
    scores = (rng.integers(0, 20, (400, 3)) + 0.5) / 20
    config = SitesConfig(classes=("a", "b", "c"), multi_label=True)
    found = measure_results(count_predictions(torch.tensor(scores), torch.tensor(labels), config), config)
    predicted = scores >= 0.5
    assert found["accuracy"] == pytest.approx((predicted == labels).mean())
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(labels, scores, average="macro"))
    balanced = [metrics.balanced_accuracy_score(labels[:, c], predicted[:, c]) for c in range(3)]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(balanced))
    assert set(found) == set(METRICS)


def test_a_label_that_no_site_evaluated_is_left_out_of_the_pooled_results():
    config = CONFIG.model_copy(update={"multi_label": True})
    site = _site([[2, 1, 1, 2], [3, 0, 0, 3]], [[1, 2], [0, 3]], [[2, 1], [3, 0]], num_test=6)
    summary = summarise_sites({"x": site}, config, ["knn"])
    assert summary.pooled == summary.by_site["x"]
    assert summary.pooled["knn/macro_f1"] == pytest.approx((2 * 2 / (3 + 3) + 1) / 2)
    assert unusable_counts(site, config, ["knn"]) is None


def test_counts_of_this_run_are_usable():
    assert unusable_counts(FIRST, CONFIG, ["knn"]) is None
    assert unusable_counts(SECOND, CONFIG, ["knn"]) is None


@pytest.mark.parametrize(
    ("site", "config", "message"),
    [
        (SECOND, SitesConfig(classes=("a", "b"), min_count=1, score_bins=2), "there is a class 2, but the run has 2"),
        (FIRST, CONFIG.model_copy(update={"min_count": 10}), "min_count is 1, and the run's is 10"),
        (FIRST, CONFIG.model_copy(update={"score_bins": 5}), "rows of scores need 5 bins"),
        (FIRST, CONFIG.model_copy(update={"multi_label": True}), "rows of the confusion table need 4 numbers"),
        (FIRST.model_copy(update={"num_test": 99}), CONFIG, "do not count the same 99 images"),
    ],
)
def test_counts_that_do_not_fit_the_run_are_refused(site, config, message):
    assert message in unusable_counts(site, config, ["knn"])


def test_measures_other_than_the_runs_are_refused():
    assert "the measures are knn, and the run's are probe" in unusable_counts(FIRST, CONFIG, ["probe"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": (1, 0)}, "classes must be different and in order"),
        ({"classes": (0, 1, 2)}, "one row per evaluated class"),
        ({"num_test": -1}, "greater than or equal to 0"),
        ({"classes": (0, 100)}, "less than 100"),
    ],
)
def test_inconsistent_tables_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SiteCounts.model_validate({**FIRST.model_dump(), **changes})
