"""The optimisers compute what torch's do, and do not import torch's compiler."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedssl import optimizers

KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    "Adam": {"lr": 0.01, "weight_decay": 1e-3},
    "AdamW": {"lr": 0.01, "weight_decay": 1e-3},
    "LBFGS": {"max_iter": 3, "line_search_fn": "strong_wolfe"},
}

TRAINS = """
import sys
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
simulate(RunSpec.model_validate({
    "num_rounds": 1,
    "model": {"encoder": {"widths": [4, 8]}, "projector": {"hidden_dims": [8], "out_dim": 4}},
    "data": {"channels": 1, "image_size": 8},
    "partition": {"dataset": "digits", "num_clients": 2, "max_images": 64},
}))
print(*sorted({"torch._dynamo", "sympy", "scipy", "sklearn", "torchvision"} & sys.modules.keys()))
"""


def _trained(kind: Callable[..., torch.optim.Optimizer], settings: dict[str, Any]) -> list[Tensor]:
    """Return a network's parameters after six steps, half of them by an optimiser that continues from a state."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    inputs, targets = torch.randn(8, 6), torch.randn(8, 3)
    optimizer = kind(network.parameters(), **settings)

    def loss() -> float:
        optimizer.zero_grad(set_to_none=True)
        found = nn.functional.mse_loss(network(inputs), targets)
        found.backward()
        return float(found.detach())

    for step in range(6):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = kind(network.parameters(), **settings)
            optimizer.load_state_dict(state)
        loss()
        optimizer.step(loss if kind.__name__ == "LBFGS" else None)
    return list(network.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_the_parameters_equal_torchs_bit_for_bit(name: str) -> None:
    own = _trained(getattr(optimizers, name), KINDS[name])
    reference = _trained(getattr(torch.optim, name), KINDS[name])
    assert all(torch.equal(mine, other) for mine, other in zip(own, reference, strict=True))


def test_a_fused_step_accepts_a_parameter_whose_first_gradient_comes_late() -> None:
    """torch's own optimiser fails here: "expected Tensor as element 1 in argument 2, but got NoneType"."""
    found = []
    for fused in (True, None):
        parameters = [nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2)]
        optimizer = optimizers.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused)
        for step in range(3):
            for parameter in parameters[: 1 if step == 0 else 2]:
                parameter.grad = torch.tensor([0.5, -1.0])
            optimizer.step()
        found.append(torch.cat(parameters))
    torch.testing.assert_close(*found)


@pytest.mark.full
def test_training_imports_neither_the_compiler_nor_scikit_learn() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_lars_scales_the_step_by_the_norm_of_the_weight() -> None:
    """w = (3, 4) has norm 5, g = (0, 1) has norm 1, so u = 0.001 * 5 g. With momentum 0.9 the second step is 1.9 u."""
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    bias = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = optimizers.LARS([weight, bias], lr=2.0, momentum=0.9)
    weight.grad, bias.grad = torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, 1.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[3.0, 3.99]]))
    torch.testing.assert_close(bias.detach(), torch.tensor([3.0, 2.0]))
    optimizer.step()
    length = (9 + 3.99**2) ** 0.5
    torch.testing.assert_close(weight.detach(), torch.tensor([[3.0, 3.99 - 2 * (0.9 * 0.005 + 0.001 * length)]]))


def test_lars_matches_its_equation_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(3, 4, generator=generator), torch.randn(5, 3, 4, generator=generator)
    weight = nn.Parameter(start.clone())
    optimizer = optimizers.LARS([weight], lr=0.3, momentum=0.8, weight_decay=0.1)
    w, v = start.double().numpy().copy(), 0.0
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
        u = gradient.double().numpy() + 0.1 * w
        v = 0.8 * v + 1e-3 * (w**2).sum() ** 0.5 / (u**2).sum() ** 0.5 * u
        w = w - 0.3 * v
    torch.testing.assert_close(weight.detach().double(), torch.from_numpy(w), rtol=1e-5, atol=1e-6)


def test_lars_moves_weights_of_norm_zero_by_their_gradient() -> None:
    weight = nn.Parameter(torch.zeros(1, 2))
    optimizer = optimizers.LARS([weight], lr=0.5, momentum=0.0)
    weight.grad = torch.tensor([[2.0, 0.0]])
    optimizer.step()
    assert weight.tolist() == [[-1.0, 0.0]]
    weight.grad = torch.zeros(1, 2)
    optimizer.step()
    assert weight.tolist() == [[-1.0, 0.0]]
