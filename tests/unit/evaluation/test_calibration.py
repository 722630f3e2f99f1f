"""The scale of a classifier's probabilities, computed from sums: hand-worked values and the whole computation."""

import math

import numpy as np
import pytest
import torch

from fedssl.evaluation.calibration import LARGEST, NUM_SCALES, best_scale, cross_entropy_sums, impossible_sums

SCALES = 10 ** np.linspace(-1, 3, NUM_SCALES)


def test_the_sums_of_two_images_match_values_worked_out_by_hand() -> None:
    """At the scale 1: p = (2/3, 1/3) twice, the first image is of class 0 and the second of class 1."""
    scores = torch.tensor([[math.log(2.0), 0.0]] * 2, dtype=torch.float64)
    sums = cross_entropy_sums(scores, torch.tensor([0, 1]))
    one = SCALES.tolist().index(1.0)
    assert sums[0, one].item() == pytest.approx(math.log(3 / 2) + math.log(3))
    assert sums[1, one].item() == pytest.approx(2 * (math.log(3 / 2) + math.log(3)))


def test_the_sums_of_two_labels_match_values_worked_out_by_hand() -> None:
    """At the scale 1: p = 1 / (1 + e^-0.5) for the label that the image has, and 1 - p for the other."""
    sums = cross_entropy_sums(torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([[1, 0]]))
    one, p = SCALES.tolist().index(1.0), 1 / (1 + math.exp(-0.5))
    assert sums[0, one].item() == pytest.approx(-2 * math.log(p))
    assert sums[1, one].item() == pytest.approx(-2 * (math.log(p) + math.log(1 - p)))


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_sites_sums_give_the_scale_of_all_images(*, multi_label: bool) -> None:
    rng = np.random.default_rng(0)
    num_images, num_classes = 60, 4
    labels = rng.integers(0, 2, (num_images, num_classes)) if multi_label else rng.integers(0, num_classes, num_images)
    presence = labels if multi_label else np.eye(num_classes)[labels]
    scores = presence * 0.4 + rng.normal(0.2, 0.3, (num_images, num_classes))
    targets = (num_images * presence + 1) / (num_images + (2 if multi_label else num_classes))
    losses = []
    for scale in SCALES:
        if multi_label:
            p = 1 / (1 + np.exp(-np.clip(scale * (scores - 0.5), -700, 700)))
            p = np.clip(p, 1e-300, 1 - 1e-16)
            losses.append(-(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum() / num_images)
        else:
            logits = scale * scores - (scale * scores).max(axis=1, keepdims=True)
            log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            losses.append(-(targets * log_p).sum() / num_images)
    parts = [slice(0, 7), slice(7, 7), slice(7, 60)]
    sums = [cross_entropy_sums(torch.from_numpy(scores[part]), torch.from_numpy(labels[part])) for part in parts]
    numbers = [7, 0, 53]
    for own, number in zip(sums, numbers, strict=True):
        assert impossible_sums(own, number, num_classes, multi_label=multi_label) is None
        least = impossible_sums(own, number + 9, num_classes, multi_label=multi_label)
        assert least is not None
        assert "cannot be those of" in least
    scale, cross_entropy = best_scale(sums, numbers, num_classes, multi_label=multi_label)
    assert scale == pytest.approx(SCALES[int(np.argmin(losses))], rel=1e-12)
    assert 1 < scale < 100
    assert cross_entropy == pytest.approx(min(losses), rel=1e-9)


def test_a_site_that_invents_sums_cannot_choose_the_scale() -> None:
    """The site claims 5 of 100 images, and enormous sums at all scales but one; the bound is worked out by hand."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 95)
    scores = torch.from_numpy(np.eye(3)[labels] * 0.5 + rng.normal(0.2, 0.3, (95, 3)))
    honest = cross_entropy_sums(scores, torch.from_numpy(labels))
    alone, _ = best_scale([honest], [95], 3, multi_label=False)
    invented = torch.full_like(honest, 1e12)
    invented[:, -1] = torch.tensor([0.0, 5 * 3 * math.log(3)])
    assert impossible_sums(invented, 5, 3, multi_label=False) is None
    scale, loss = best_scale([honest, invented], [95, 5], 3, multi_label=False)
    assert scale == pytest.approx(alone, rel=0.3)  # one step of the scales at most
    chosen = int(np.argmin(np.abs(SCALES - scale)))
    own = (100 * honest[0, chosen] + honest[1, chosen]) / 103
    assert loss == pytest.approx((float(own) + LARGEST * 5 * math.log(3)) / 100, rel=1e-12)
