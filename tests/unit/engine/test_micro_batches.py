"""Micro-batches and clipped gradients."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.engine.optimization import move
from fedssl.engine.steps import eager_step, micro_batches
from fedssl.methods.api import Batch
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import TrainingConfig
from support.methods import method_spec
from support.rounds import training


def _batch(size: int) -> Batch:
    numbers = torch.arange(size)
    view = numbers.float().view(-1, 1, 1, 1)
    return Batch(views=(view, -view), indices=numbers, labels=numbers * 2, extra={"references": view + 0.5})


@pytest.mark.parametrize(
    ("size", "num_parts", "sizes"),
    [(8, 1, [8]), (8, 4, [2, 2, 2, 2]), (9, 4, [3, 2, 2, 2]), (5, 4, [3, 2]), (3, 4, [3]), (1, 2, [1])],
)
def test_parts_have_at_least_two_images_and_cover_the_whole_batch(size: int, num_parts: int, sizes: list[int]) -> None:
    batch = _batch(size)
    parts = micro_batches(batch, num_parts)
    assert [len(part.indices) for part in parts] == sizes
    assert torch.equal(torch.cat([part.indices for part in parts]), batch.indices)
    for part in parts:
        assert torch.equal(part.views[0].flatten(), part.indices.float())
        assert torch.equal(part.views[1], -part.views[0])
        assert part.labels is not None
        assert torch.equal(part.labels, part.indices * 2)
        assert torch.equal(part.extra["references"], part.views[0] + 0.5)


def _spec(**changes: Any) -> RunSpec:
    """Return a spec whose loss is a mean over images, and whose encoder has no BatchNorm.

    Therefore the mean of the parts' gradients is the gradient of the whole batch.
    """
    model = {"encoder": {"widths": [8, 16], "norm": "group"}, "projector": None}
    settings = {"batch_size": 32, "optimizer": {"learning_rate": 1.0, "momentum": 0, "weight_decay": 0}}
    return method_spec("supervised", model=model, training={**settings, **changes})


def _stepped(spec: RunSpec) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return how far each parameter moved in one step of SGD at learning rate 1, and what the step reported."""
    client = training(spec)
    parameters = dict(client.modules.named_parameters())
    before = {name: each.detach().clone() for name, each in parameters.items()}
    optimizer = torch.optim.SGD(client.modules.parameters(), lr=1.0)
    names, values = eager_step(client.algorithm, client.modules, optimizer, client.ctx)(client.batch())
    moved = {name: before[name] - each.detach() for name, each in parameters.items()}
    return moved, dict(zip(names, values.tolist(), strict=True))


def test_the_average_over_parts_equals_the_step_of_the_whole_batch() -> None:
    (whole, reported), (parts, averaged) = _stepped(_spec()), _stepped(_spec(num_micro_batches=4))
    assert averaged == pytest.approx(reported, rel=1e-5)
    for name, moved in whole.items():
        torch.testing.assert_close(parts[name], moved, rtol=1e-4, atol=1e-6)


def test_a_contrastive_loss_sees_only_the_negatives_of_its_part() -> None:
    """NT-Xent of 16 images is at most about log 31, that of 4 about log 7."""
    settings = {"batch_size": 16, "local_epochs": 1}
    losses = [
        _stepped(method_spec("fedsimclr", training={**settings, "num_micro_batches": parts}))[1]["loss"]
        for parts in (1, 4)
    ]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("batch_size", "parts"), [(32, 3), (4, 4), (2, 2)])
def test_parts_that_do_not_divide_the_batch_are_refused(batch_size: int, parts: int) -> None:
    with pytest.raises(ValidationError, match="cannot be cut into"):
        TrainingConfig(batch_size=batch_size, num_micro_batches=parts)


def test_orchestra_refuses_micro_batches_because_it_rotates_images_by_position() -> None:
    values = method_spec("orchestra").model_dump(mode="json")
    values["training"]["num_micro_batches"] = 2
    with pytest.raises(ValidationError, match="turns images by their places"):
        RunSpec.model_validate(values)
    values["method"]["rotation_weight"] = 0
    assert RunSpec.model_validate(values).training.num_micro_batches == 2


def test_a_gradient_is_scaled_to_the_norm_over_all_parameters() -> None:
    """Gradients (3, 0) and (0, 4) together have the norm 5: a limit of 1 leaves a fifth of each."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for limit, share in ((1.0, 0.2), (5.5, 1.0), (None, 1.0)):
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, ([3.0, 0.0], [0.0, 4.0]), strict=True):
                parameter.zero_()
                parameter.grad = torch.tensor(gradient)
        move(optimizer, limit)
        torch.testing.assert_close(parameters[0].detach(), torch.tensor([-3.0 * share, 0.0]))
        torch.testing.assert_close(parameters[1].detach(), torch.tensor([0.0, -4.0 * share]))


@pytest.mark.parametrize("parts", [1, 4])
def test_the_length_of_a_step_is_limited(parts: int) -> None:
    spec = _spec(num_micro_batches=parts, optimizer={"learning_rate": 1.0, "max_gradient_norm": 0.01})
    moved, _ = _stepped(spec)
    length = torch.stack([each.double().norm() for each in moved.values()]).norm()
    assert float(length) == pytest.approx(0.01, rel=1e-3)
