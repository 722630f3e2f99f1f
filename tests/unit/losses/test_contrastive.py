"""NT-Xent and related losses compared with hand calculations and plain loops."""

import numpy as np
import pytest
import torch

from fedssl.losses import cross_model_contrast, cross_view_info_nce, info_nce, multi_crop_nt_xent, nt_xent
from support.tensors import standard_normal

AXES = torch.eye(2)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))


def test_nt_xent_matches_hand_calculations() -> None:
    # Every anchor: its positive at cosine 1, two others at 0. -log[e / (e + 1 + 1)] = log(1 + 2/e).
    assert float(nt_xent(AXES, AXES, 1.0)) == pytest.approx(0.5514447139320511, rel=1e-6)
    # Views swapped: the positive at cosine 0, of the others one at 1 and one at 0. -log[1 / (1 + e + 1)] = log(2 + e).
    assert float(nt_xent(AXES, AXES.flip(0), 1.0)) == pytest.approx(1.5514447139320511, rel=1e-6)
    # Half the temperature doubles the logits: log(1 + 2 e^-2).
    assert float(nt_xent(AXES, AXES, 0.5)) == pytest.approx(0.23954476622188453, rel=1e-6)


def test_multi_crop_nt_xent_matches_hand_calculations() -> None:
    # Three equal crops of two samples: each positive at cosine 1 against three rows of the other sample at 0.
    assert float(multi_crop_nt_xent([AXES] * 3, 1.0)) == pytest.approx(0.7436683806285502, rel=1e-6)
    # One sample is at (1, 0) in all crops, the other one at (0, 1), (0, 1), (1, 0). Anchors of the first: positives at
    # 1 against e + 2, twice each. Anchors (0, 1) of the second: one positive at 1, one at 0, against 3 rows at 0.
    # Anchor (1, 0): two positives at 0 against 3 rows at 1.
    second = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    crops = [torch.stack([AXES[0], row]) for row in second]
    e = np.e
    pairs = [np.log((2 * e + 2) / e)] * 6 + [np.log((e + 3) / e), np.log(4)] * 2 + [np.log(1 + 3 * e)] * 2
    assert float(multi_crop_nt_xent(crops, 1.0)) == pytest.approx(np.mean(pairs), rel=1e-6)


@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.07), (1, 0.5)])
def test_multi_crop_nt_xent_equals_its_equation(seed: int, temperature: float) -> None:
    z = standard_normal(3, 4, 5, seed=seed)
    rows = [(b, z[n, b].numpy()) for n in range(3) for b in range(4)]
    total = 0.0
    for i, (sample, anchor) in enumerate(rows):
        terms = [np.exp(cosine(anchor, row) / temperature) for _, row in rows]
        negatives = sum(term for term, (other, _) in zip(terms, rows, strict=True) if other != sample)
        for j, (other, _) in enumerate(rows):
            if other == sample and j != i:
                total -= np.log(terms[j] / (terms[j] + negatives))
    assert float(multi_crop_nt_xent([*z], temperature)) == pytest.approx(total / (12 * 2), rel=1e-12)
    two_views = float(nt_xent(z[0], z[1], temperature))
    assert float(multi_crop_nt_xent([z[0], z[1]], temperature)) == pytest.approx(two_views, rel=1e-12)


def test_multi_crop_nt_xent_needs_two_views_and_is_zero_for_a_batch_of_one() -> None:
    z = standard_normal(3, 1, 5, seed=0).requires_grad_()
    multi_crop_nt_xent([*z], 0.1).backward()  # type: ignore[no-untyped-call]
    assert float(multi_crop_nt_xent([*z.detach()], 0.1)) == 0.0
    assert z.grad is not None
    assert not z.grad.any()
    with pytest.raises(ValueError, match="fewer than 2 views"):
        multi_crop_nt_xent([AXES], 0.1)


def test_info_nce_matches_a_hand_calculation() -> None:
    query, queue = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0], [-1.0, 0.0]])
    # Logits 1 (its key), 0 and -1: log(1 + e^-1 + e^-2).
    assert float(info_nce(query, query, queue, 1.0)) == pytest.approx(0.4076059644443804, rel=1e-6)


def test_cross_view_info_nce_matches_hand_calculations() -> None:
    # Logits 1 for the positive and 0 for the one negative: log(1 + 1/e); swapped: log(1 + e).
    assert float(cross_view_info_nce(AXES, AXES, 1.0)) == pytest.approx(0.3132616875182228, rel=1e-6)
    assert float(cross_view_info_nce(AXES, AXES.flip(0), 1.0)) == pytest.approx(1.3132616875182228, rel=1e-6)


def test_cross_model_contrast_matches_hand_calculations() -> None:
    # Positive at cosine 1; the other sample's prediction and teacher at 0: log(1 + 1) - 1.
    assert float(cross_model_contrast(AXES, AXES, 1.0)) == pytest.approx(-0.3068528194400547, rel=1e-6)
    # Teacher swapped: positive at 0, the other prediction at 0, the other teacher at 1: log(1 + e).
    assert float(cross_model_contrast(AXES, AXES.flip(0), 1.0)) == pytest.approx(1.3132616875182228, rel=1e-6)
    # Half the temperature: log(2) - 2.
    assert float(cross_model_contrast(AXES, AXES, 0.5)) == pytest.approx(-1.3068528194400547, rel=1e-6)
    # Predictions alike, teachers apart. First anchor: positive 1, the other prediction 1, the other teacher 0:
    # log(e + 1) - 1. Second: positive 0, the other prediction 1, the other teacher 1: log(2 e) - 0.
    first, second = 0.3132616875182228, 1.6931471805599454
    alike = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    assert float(cross_model_contrast(alike, AXES, 1.0)) == pytest.approx((first + second) / 2, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_cross_model_contrast_equals_its_equation(seed: int, temperature: float) -> None:
    local, other = standard_normal(5, 4, seed=seed), standard_normal(5, 4, seed=seed + 100)
    p, g = local.numpy(), other.numpy()
    total = 0.0
    for i in range(5):
        negatives = [z[k] for z in (p, g) for k in range(5) if k != i]
        denominator = sum(np.exp(cosine(p[i], z) / temperature) for z in negatives)
        total -= np.log(np.exp(cosine(p[i], g[i]) / temperature) / denominator)
    assert float(cross_model_contrast(local, other, temperature)) == pytest.approx(total / 5, rel=1e-12)


def test_cross_model_contrast_uses_only_local_anchors() -> None:
    local, other = standard_normal(5, 4, seed=1), standard_normal(5, 4, seed=2)
    assert abs(float(cross_model_contrast(local, other, 0.1) - cross_model_contrast(other, local, 0.1))) > 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_nt_xent_equals_its_equation(seed: int, temperature: float) -> None:
    z1, z2 = standard_normal(5, 4, seed=seed), standard_normal(5, 4, seed=seed + 100)
    points = [row.numpy() for row in torch.cat([z1, z2])]
    total = 0.0
    for i in range(10):
        positive = np.exp(cosine(points[i], points[(i + 5) % 10]) / temperature)
        everyone = sum(np.exp(cosine(points[i], points[k]) / temperature) for k in range(10) if k != i)
        total -= np.log(positive / everyone)
    assert float(nt_xent(z1, z2, temperature)) == pytest.approx(total / 10, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_info_nce_equals_its_equation(seed: int) -> None:
    query, key, queue = (
        standard_normal(5, 4, seed=seed),
        standard_normal(5, 4, seed=seed + 100),
        standard_normal(7, 4, seed=seed + 200),
    )
    total = 0.0
    for q, k in zip(query.numpy(), key.numpy(), strict=True):
        positive = np.exp(cosine(q, k) / 0.2)
        total -= np.log(positive / (positive + sum(np.exp(cosine(q, u) / 0.2) for u in queue.numpy())))
    assert float(info_nce(query, key, queue, 0.2)) == pytest.approx(total / 5, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_cross_view_info_nce_equals_its_equation(seed: int) -> None:
    z1, z2 = standard_normal(5, 4, seed=seed), standard_normal(5, 4, seed=seed + 100)
    total = 0.0
    for i in range(5):
        logits = [cosine(z1[i].numpy(), z2[j].numpy()) / 0.4 for j in range(5)]
        total += np.log(np.sum(np.exp(logits))) - logits[i]
    assert float(cross_view_info_nce(z1, z2, 0.4)) == pytest.approx(total / 5, rel=1e-12)


def test_nt_xent_is_symmetric_in_the_views_and_cross_view_info_nce_is_not() -> None:
    z1, z2 = standard_normal(6, 4, seed=0), standard_normal(6, 4, seed=1)
    assert float(nt_xent(z1, z2, 0.1)) == pytest.approx(float(nt_xent(z2, z1, 0.1)), rel=1e-12)
    assert abs(float(cross_view_info_nce(z1, z2, 0.1)) - float(cross_view_info_nce(z2, z1, 0.1))) > 1e-3


def test_equal_views_have_a_smaller_loss_than_different_ones() -> None:
    z = standard_normal(6, 4, seed=0)
    for loss in (nt_xent, cross_view_info_nce):
        assert float(loss(z, z, 0.1)) < float(loss(z, z + 0.5 * standard_normal(6, 4, seed=1), 0.1))


@pytest.mark.parametrize("loss", [nt_xent, cross_view_info_nce, cross_model_contrast])
def test_a_batch_of_one_has_neither_loss_nor_gradient(loss) -> None:
    z1, z2 = standard_normal(1, 4, seed=0).requires_grad_(), standard_normal(1, 4, seed=1).requires_grad_()
    value = loss(z1, z2, 0.1)
    value.backward()
    assert float(value.detach()) == 0.0
    assert z1.grad is not None
    assert z1.grad.abs().max() == 0


def test_info_nce_ignores_the_order_of_the_queue() -> None:
    query, key, queue = standard_normal(5, 4, seed=0), standard_normal(5, 4, seed=1), standard_normal(7, 4, seed=2)
    assert float(info_nce(query, key, queue, 0.1)) == pytest.approx(float(info_nce(query, key, queue.flip(0), 0.1)))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_must_be_positive(temperature: float) -> None:
    for loss in (nt_xent, cross_view_info_nce):
        with pytest.raises(ValueError, match="temperature must be positive"):
            loss(AXES, AXES, temperature)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one width"):
        info_nce(AXES, AXES, torch.ones(3, 4), 0.1)
    with pytest.raises(ValueError, match="queue_QD must be a matrix with rows"):
        info_nce(AXES, AXES, torch.ones(0, 2), 0.1)
    with pytest.raises(ValueError, match="one batch size"):
        nt_xent(AXES, torch.ones(3, 2), 0.1)
    with pytest.raises(ValueError, match="z1_BD must be a matrix"):
        nt_xent(torch.ones(4), torch.ones(4), 0.1)
