"""MAE's reconstruction loss compared with hand calculations and plain loops in float64, and its symmetries."""

import math

import pytest
import torch

from fedssl.losses import masked_reconstruction

B, N, P = 3, 4, 6


def arguments(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prediction, patches = torch.randn(2, B, N, P, generator=generator, dtype=torch.float64)
    return prediction, patches, torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1], [1, 1, 0, 0]])


def test_masked_reconstruction_matches_a_hand_calculation() -> None:
    # Patch (1, 3) has mean 2 and unbiased variance 2. Its standardised pixels are -+1/sqrt 2: 1/2 each from 0.
    # Patch (4, 4) standardised is (0, 0); (2, 0) is off by 2 on average. The visible patch does not count.
    patches = torch.tensor([[[1.0, 3.0], [4.0, 4.0], [9.0, -9.0]]])
    prediction, mask = torch.tensor([[[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]]), torch.tensor([[True, True, False]])
    assert float(masked_reconstruction(prediction, patches, mask)) == pytest.approx((0.5 + 2) / 2, rel=1e-5)
    raw = masked_reconstruction(prediction, patches, mask, normalize=False)
    assert float(raw) == pytest.approx(((1 + 9) / 2 + (4 + 16) / 2) / 2, rel=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_masked_reconstruction_equals_its_equation(seed: int, normalize: bool) -> None:  # noqa: FBT001
    prediction, patches, mask = arguments(seed)
    errors = []
    for i in range(B):
        for n in range(N):
            if mask[i, n]:
                x = patches[i, n].tolist()
                mean = sum(x) / P
                variance = sum((pixel - mean) ** 2 for pixel in x) / (P - 1)
                y = [(pixel - mean) / math.sqrt(variance + 1e-6) for pixel in x] if normalize else x
                errors.append(sum((float(prediction[i, n, p]) - y[p]) ** 2 for p in range(P)) / P)
    value = masked_reconstruction(prediction, patches, mask, normalize=normalize)
    assert float(value) == pytest.approx(sum(errors) / 6, rel=1e-12)


def test_visible_patches_do_not_change_the_loss_and_get_no_gradient() -> None:
    prediction, patches, mask = arguments()
    value = masked_reconstruction(prediction, patches, mask)
    visible = (mask == 0)[..., None]
    live = torch.where(visible, prediction + 5, prediction).requires_grad_()
    changed = masked_reconstruction(live, torch.where(visible, patches * 7, patches), mask)
    torch.testing.assert_close(changed.detach(), value)
    (gradient,) = torch.autograd.grad(changed, live)
    assert bool((gradient[mask == 0] == 0).all())
    assert bool((gradient[mask == 1] != 0).all())


def test_brightness_and_contrast_of_patches_and_their_order_do_not_matter() -> None:
    prediction, patches, mask = arguments()
    value = masked_reconstruction(prediction, patches, mask)
    lit = patches * torch.linspace(50, 200, N, dtype=torch.float64)[:, None] + 100
    torch.testing.assert_close(masked_reconstruction(prediction, lit, mask), value, rtol=1e-5, atol=0)
    order = [2, 0, 3, 1]
    moved = masked_reconstruction(prediction[:, order], patches[:, order], mask[:, order])
    torch.testing.assert_close(moved, value)


def test_without_masked_patches_loss_and_gradient_are_zero() -> None:
    prediction, patches, mask = arguments()
    prediction.requires_grad_()
    value = masked_reconstruction(prediction, patches, torch.zeros_like(mask))
    assert float(value.detach()) == 0.0
    (gradient,) = torch.autograd.grad(value, prediction)
    assert float(gradient.abs().max()) == 0.0


def test_shapes_that_do_not_fit_are_refused() -> None:
    prediction, patches, mask = arguments()
    with pytest.raises(ValueError, match="must have images, patches and pixels"):
        masked_reconstruction(prediction[0], patches[0], mask[0])
    with pytest.raises(ValueError, match="must have images, patches and pixels"):
        masked_reconstruction(prediction[:0], patches[:0], mask[:0])
    with pytest.raises(ValueError, match="do not fit prediction_BNP"):
        masked_reconstruction(prediction, patches[:, :2], mask)
    with pytest.raises(ValueError, match="do not fit prediction_BNP"):
        masked_reconstruction(prediction, patches, mask[:, :2])
    with pytest.raises(ValueError, match="set normalize to False"):
        masked_reconstruction(prediction[..., :1], patches[..., :1], mask)
