"""A round on a GPU equals the CPU's up to the order of additions, and a round in bf16 is close to it.

docs/architecture.md derives the tolerances. Both devices get the same random numbers, so they use the same views.
"""

import pytest
import torch

from fedssl.data import normalize, random_view, to_float
from fedssl.engine import release_trainer
from fedssl.protocol.data import AugmentationConfig, DataConfig
from support.combinations import ALL_COMBINATIONS, FEATURES
from support.methods import WITHOUT_LOSS
from support.one_client import two_rounds_of_one, use_cpu_generators
from support.several_devices import assert_close, distance
from support.two_rounds import LEARNING_RATE, two_rounds_spec

DEVICE = "cuda"
BF16_DISTANCE = 0.31
"""The sine of the angle whose cosine is 0.95, which tests/unit/engine/test_precision.py demands of bf16 on a CPU."""


@pytest.mark.parametrize("name", [*ALL_COMBINATIONS, *sorted(WITHOUT_LOSS), *FEATURES])
def test_rounds_equal_the_cpus_up_to_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu_generators(monkeypatch)
    spec = two_rounds_spec(name, gpu_steps="eager")
    expected = two_rounds_of_one(spec)
    release_trainer()
    for found, wanted in zip(two_rounds_of_one(spec, DEVICE, like=expected), expected, strict=True):
        assert_close(found.result, wanted.result, wanted.received)


@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_a_step_in_bf16_is_close_to_one_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu_generators(monkeypatch)
    exact = two_rounds_spec(name, gpu_steps="eager", name="sgd", learning_rate=LEARNING_RATE)  # moves by the gradient
    training = exact.training.model_copy(update={"batch_size": 256})  # one step per round: only its gradient counts
    exact = exact.model_copy(update={"training": training})
    rounded = exact.model_copy(update={"training": training.model_copy(update={"precision": "bf16"})})
    expected = two_rounds_of_one(exact)
    release_trainer()
    for found, wanted in zip(two_rounds_of_one(rounded, DEVICE, like=expected), expected, strict=True):
        assert all(bool(tensor.isfinite().all()) for tensor in found.result.update.values())
        differs, moved = distance(found.result, wanted.result, wanted.received)
        assert differs < BF16_DISTANCE * moved


def test_views_equal_the_cpus() -> None:
    everything = AugmentationConfig(
        blur=0.5, solarize=0.3, rotation_degrees=15, flip_vertical=0.5, right_angles=0.5, stain=0.2
    )
    config = DataConfig(augmentation=everything, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), image_size=24)
    images = torch.randint(0, 256, (64, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = [
        normalize(random_view(to_float(images.to(device)), everything, torch.Generator().manual_seed(1)), config)
        for device in ("cpu", DEVICE)
    ]
    # A pixel is a sum of four, weighted by distances of up to 24 pixels in float32.
    torch.testing.assert_close(seen[1].cpu(), seen[0], rtol=1e-4, atol=1e-4)
