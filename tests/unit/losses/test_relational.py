"""FedX's relational loss compared with hand calculations and plain loops."""

import math

import numpy as np
import pytest
import torch

from fedssl.losses import relational_divergence

VARIANTS = ["reference", "paper"]


def views(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    return a, b, torch.randn(7, 5, generator=generator, dtype=torch.float64)


def test_relational_divergence_matches_hand_calculations() -> None:
    a, b, references = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]]), torch.eye(2)
    # r(a) = (e, 1)/(1+e) = (0.7311, 0.2689), r(b) the other way round, m = (1/2, 1/2).
    # KL(m || r) = [log(0.5/0.7311) + log(0.5/0.2689)]/2 = (-0.3799 + 0.6201)/2, the same for b.
    assert float(relational_divergence(a, b, references, 1.0)) == pytest.approx(0.12011450695827758, rel=1e-6)
    # KL(r || m) = 0.7311 log(1.4621) + 0.2689 log(0.5379) = 0.2777 - 0.1668.
    paper = relational_divergence(a, b, references, 1.0, variant="paper")
    assert float(paper) == pytest.approx(0.11094407167172735, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_relational_divergence_equals_its_equation(seed: int, variant: str) -> None:
    a, b, references = views(seed)

    def relation(row: torch.Tensor) -> list[float]:
        weights = [math.exp(float(torch.cosine_similarity(row, r, dim=0)) / 0.1) for r in references]
        return [weight / sum(weights) for weight in weights]

    def kl(p: list[float], q: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))

    losses = []
    for row_a, row_b in zip(a, b, strict=True):
        r_a, r_b = relation(row_a), relation(row_b)
        m = [(x + y) / 2 for x, y in zip(r_a, r_b, strict=True)]
        if variant == "paper":
            losses.append((kl(r_a, m) + kl(r_b, m)) / 2)
        else:
            losses.append((kl(m, r_a) + kl(m, r_b)) / 2)
    assert float(relational_divergence(a, b, references, 0.1, variant)) == pytest.approx(np.mean(losses), rel=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_relational_divergence_is_zero_for_coinciding_views_and_positive_otherwise(variant: str) -> None:
    for seed in range(5):
        a, b, references = views(seed)
        assert float(relational_divergence(a, 2 * a, references, 0.1, variant)) == pytest.approx(0, abs=1e-12)
        assert float(relational_divergence(a, b, references, 0.1, variant)) > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_neither_the_order_of_the_views_nor_that_of_the_references_matters(variant: str) -> None:
    a, b, references = views(0)
    value = float(relational_divergence(a, b, references, 0.1, variant))
    assert float(relational_divergence(b, a, references, 0.1, variant)) == pytest.approx(value, rel=1e-12)
    assert float(relational_divergence(a, b, references.flip(0), 0.1, variant)) == pytest.approx(value, rel=1e-12)


def test_the_paper_variant_is_bounded_by_log_2_and_the_reference_is_not() -> None:
    # At a low temperature each view is related to one reference only: disjoint distributions.
    a, b, references = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.eye(2)
    assert float(relational_divergence(a, b, references, 0.01, "paper")) == pytest.approx(math.log(2), rel=1e-6)
    assert float(relational_divergence(a, b, references, 0.01)) > 10


def test_a_single_reference_gives_no_divergence() -> None:
    a, b, references = views(0)
    assert float(relational_divergence(a, b, references[:1], 0.1)) == 0.0


def test_an_unknown_variant_is_refused() -> None:
    a, b, references = views(0)
    with pytest.raises(ValueError, match="unknown variant 'js'; there are reference, paper"):
        relational_divergence(a, b, references, 0.1, "js")  # type: ignore[arg-type]
