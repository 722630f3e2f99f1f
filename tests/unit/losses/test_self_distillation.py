"""DINO's loss and center compared with hand calculations and plain loops in float64, and their symmetries."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedssl.losses import dino, dino_center

B, P = 4, 5


def logits(num_views: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(num_views, B, P, generator=generator, dtype=torch.float64))


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(scores)
    shares: NDArray[np.float64] = exponentials / exponentials.sum()
    return shares


def test_dino_matches_a_hand_calculation() -> None:
    # The teacher's p is (3/4, 1/4) on view 1, the student's q on view 2 is (1/2, 1/2): log 2. On view 2 the centred
    # teacher is uniform, and the student's q on view 1 is (4/5, 1/5): -(log 4/5 + log 1/5)/2.
    student = [torch.tensor([[math.log(2), 0.0]]), torch.tensor([[1.0, 1.0]])]
    teacher = [torch.tensor([[math.log(3) / 4 + 1, 0.0]]), torch.tensor([[1.0, 0.0]])]
    value = dino(student, teacher, torch.tensor([1.0, 0.0]), student_temperature=0.5, teacher_temperature=0.25)
    assert float(value) == pytest.approx((math.log(2) - (math.log(0.8) + math.log(0.2)) / 2) / 2, rel=1e-6)


@pytest.mark.parametrize(("num_students", "num_teachers"), [(2, 1), (2, 2), (5, 2)])
def test_dino_equals_its_equation(num_students: int, num_teachers: int) -> None:
    student, teacher, center = logits(num_students, 1), logits(num_teachers, 2), logits(1, 3)[0][0]
    terms = []
    for u in range(num_teachers):
        for v in range(num_students):
            for i in range(B if u != v else 0):
                p = _softmax((teacher[u][i] - center).numpy() / 0.04)
                q = _softmax(student[v][i].numpy() / 0.1)
                terms.append(-sum(p[k] * math.log(q[k]) for k in range(P)))
    assert float(dino(student, teacher, center, 0.1, 0.04)) == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_dino_ignores_an_offset_of_logits_and_the_order_of_prototypes_and_small_views() -> None:
    student, teacher, center = logits(4, 1), logits(2, 2), logits(1, 3)[0][0]
    value = dino(student, teacher, center, 0.1, 0.04)
    shifted = [s + torch.arange(B, dtype=torch.float64)[:, None] for s in student]
    torch.testing.assert_close(dino(shifted, teacher, center, 0.1, 0.04), value)
    order = [3, 1, 4, 0, 2]
    moved_student, moved_teacher = ([z[:, order] for z in views] for views in (student, teacher))
    torch.testing.assert_close(dino(moved_student, moved_teacher, center[order], 0.1, 0.04), value)
    torch.testing.assert_close(dino([*student[:2], student[3], student[2]], teacher, center, 0.1, 0.04), value)
    torch.testing.assert_close(dino([student[1], student[0], *student[2:]], teacher[::-1], center, 0.1, 0.04), value)


def test_dinos_center_is_a_moving_average_of_the_teachers_mean() -> None:
    teacher = [torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([[5.0, 2.0], [7.0, 2.0]])]
    assert dino_center(torch.tensor([10.0, 1.0]), teacher, 0.75).tolist() == [8.5, 1.0]  # means 4 and 1
    assert dino_center(torch.tensor([10.0, 1.0]), teacher, 1).tolist() == [10.0, 1.0]
    assert dino_center(torch.tensor([10.0, 1.0]), teacher, 0).tolist() == [4.0, 1.0]


@pytest.mark.parametrize("seed", range(3))
def test_dinos_center_equals_its_equation(seed: int) -> None:
    teacher, center = logits(2, seed), logits(1, seed + 10)[0][0]
    mean = np.mean([view[i].numpy() for view in teacher for i in range(B)], axis=0)
    found = dino_center(center, teacher, 0.9)
    np.testing.assert_allclose(found.numpy(), 0.9 * center.numpy() + 0.1 * mean, rtol=1e-12)
    torch.testing.assert_close(dino_center(center, teacher[::-1], 0.9), found)
    live = [view.requires_grad_() for view in teacher]
    assert not dino_center(center.requires_grad_(), live, 0.9).requires_grad


def test_views_that_do_not_fit_are_refused() -> None:
    two, three, center = logits(2), logits(3), torch.zeros(P)
    with pytest.raises(ValueError, match="at least 2 views"):
        dino(two[:1], two[:1], center, 0.1, 0.04)
    with pytest.raises(ValueError, match="but has 2, and the teacher 3"):
        dino(two, three, center, 0.1, 0.04)
    with pytest.raises(ValueError, match="at least one view of the teacher"):
        dino_center(center, [], 0.9)
    with pytest.raises(ValueError, match="does not fit 5 prototypes"):
        dino(two, two, torch.zeros(P + 1), 0.1, 0.04)
    with pytest.raises(ValueError, match="one batch size"):
        dino(two, [two[0][:2]], center, 0.1, 0.04)


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_invalid_temperatures_and_momenta_are_refused(number: float) -> None:
    two, center = logits(2), torch.zeros(P)
    with pytest.raises(ValueError, match="student_temperature must be positive"):
        dino(two, two, center, number, 0.04)
    with pytest.raises(ValueError, match="teacher_temperature must be positive"):
        dino(two, two, center, 0.1, number)
    with pytest.raises(ValueError, match="momentum must be between"):
        dino_center(center, two, number - 1)
