"""A client's metrics of its encoder: compared with an independent float64 computation, and without side effects."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.methods.api import ClientData, Context
from fedssl.methods.diagnostics import observe
from fedssl.simulation import simulate
from support.methods import ALL_METHODS, method_spec, methods_of_this_run


class Flat(nn.Module):
    """Multiplies the pixels by a matrix of shape (H, 64)."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ self.weight.T


def _context(**changes: object) -> Context:
    return Context(spec=method_spec("fedsimclr", **changes), round_number=1, client_id="a")


def _images(count: int) -> ClientData:
    return ClientData(
        torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    )


def test_the_metrics_match_an_independent_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    encoder, projector = (torch.randn(5, n, generator=generator) for n in (64, 5))
    received = {"encoder.weight": encoder - 0.25 * torch.randn(5, 64, generator=generator)}
    modules = nn.ModuleDict({"encoder": Flat(encoder), "projector": nn.Linear(5, 5, bias=False)})
    with torch.no_grad():
        modules["projector"].weight.copy_(projector)
    data = _images(40)
    observed = observe(modules, data, received, _context(watch={"num_images": 30}))

    h = data.images[:30].double().numpy().reshape(30, 64) / 255 @ encoder.double().numpy().T
    sigma = np.linalg.svd(h - h.mean(axis=0), compute_uv=False)
    share = sigma / sigma.sum()
    z = h @ projector.double().numpy().T
    spread = [(x / np.linalg.norm(x, axis=1, keepdims=True)).std(axis=0).mean() * math.sqrt(5) for x in (h, z)]
    w, w_g = encoder.double().numpy(), received["encoder.weight"].double().numpy()
    assert observed == pytest.approx(
        {
            "effective_rank": math.exp(-(share * np.log(share)).sum()),
            "feature_std": spread[0],
            "embedding_std": spread[1],
            "divergence": np.linalg.norm(w - w_g) / np.linalg.norm(w_g),
        },
        rel=1e-4,
    )


def test_a_collapsed_encoder_has_no_spread() -> None:
    modules = nn.ModuleDict({"encoder": Flat(torch.ones(5, 64))})
    observed = observe(modules, _images(40), {}, _context())
    assert observed["effective_rank"] == pytest.approx(1, abs=0.01)
    assert observed["feature_std"] == pytest.approx(0, abs=1e-5)
    assert "divergence" not in observed


def test_weights_of_another_shape_give_no_divergence() -> None:
    modules = nn.ModuleDict({"encoder": Flat(torch.ones(5, 64))})
    assert "divergence" not in observe(modules, _images(4), {"encoder.weight": torch.ones(4, 64)}, _context())


def test_one_image_has_only_a_divergence_and_a_run_without_watching_has_no_metrics() -> None:
    modules = nn.ModuleDict({"encoder": Flat(torch.ones(5, 64))})
    received = {"encoder.weight": torch.full((5, 64), 2.0)}
    assert observe(modules, _images(1), received, _context()) == pytest.approx({"divergence": 0.5})
    assert observe(modules, _images(9), received, _context(watch={"num_images": 0})) == {}


def test_few_images_give_no_effective_rank() -> None:
    """Three centred images have a rank of 2 at most, which is not a collapse."""
    modules = nn.ModuleDict({"encoder": Flat(torch.randn(5, 64))})
    assert "effective_rank" not in observe(modules, _images(7), {}, _context())
    assert {"effective_rank", "feature_std"} <= observe(modules, _images(8), {}, _context()).keys()


@pytest.mark.parametrize("name", methods_of_this_run(ALL_METHODS, ["fedmoco", "orchestra"]))
def test_every_method_reports_diagnostics_that_do_not_change_its_result(name: str) -> None:
    weights = []
    for num_images in (0, 16):
        result = simulate(method_spec(name, num_rounds=1, watch={"num_images": num_images}))
        weights.append({key: tensor.numpy().tobytes() for key, tensor in result.model.items()})
        told = {key for metrics in result.history[0].clients.values() for key in metrics}
        assert {"effective_rank", "feature_std"} <= told if num_images else "effective_rank" not in told
    assert weights[0] == weights[1]


def test_training_without_uniformity_is_detected_as_a_collapse() -> None:
    spread = {}
    for weight in (0.0, 1.0):
        spec = method_spec(
            "fedalignuniform",
            method={"name": "fedalignuniform", "uniformity_weight": weight},
            training={"batch_size": 32, "local_epochs": 12},
            num_rounds=1,
        )
        record = simulate(spec).history[0]
        spread[weight] = max(metrics["embedding_std"] for metrics in record.clients.values())
    assert spread[0.0] < 0.1 < spread[1.0]
