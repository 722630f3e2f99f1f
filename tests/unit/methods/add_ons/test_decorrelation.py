"""Decorrelation and FUR as add-ons: their values, and the effect of their options."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import start, training


def _spec(add_on: dict[str, Any], host: str = "fedalignuniform", **more: Any) -> RunSpec:
    return method_spec(host, method={"name": host, "add_ons": [add_on]}, **more)


def _decorrelation(x: Any) -> float:
    """Compute the loss of FedDecorr's code: unbiased standardisation, off-diagonal mean of squares of x^T x, over N."""
    n, d = x.shape
    x = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0, ddof=1) + 1e-8)
    products = (x.T @ x) ** 2
    return float((products.sum() - np.trace(products)) / (d * (d - 1)) / n)


@pytest.mark.parametrize("on", ["z", "h"])
def test_decorrelation_is_the_sum_over_the_views_of_the_chosen_outputs(on: str) -> None:
    client = training(_spec({"name": "decorrelation", "weight": 0.2, "on": on}))
    batch = client.batch()
    term = client.values(batch)["decorrelation"]
    outputs = [z if on == "z" else h for h, z in client.outputs(batch)]
    assert term == pytest.approx(0.2 * sum(_decorrelation(x) for x in outputs), rel=1e-4)


def test_decorrelations_paper_variant_is_the_norm_of_the_correlations() -> None:
    client = training(_spec({"name": "decorrelation", "weight": 1, "variant": "paper"}))
    batch = client.batch()
    expected = sum(float(np.mean(np.corrcoef(z.T) ** 2)) for _, z in client.outputs(batch))
    assert client.values(batch)["decorrelation"] == pytest.approx(expected, rel=1e-4)


def test_feddecorr_decorrelates_embeddings_with_a_weight_of_a_tenth() -> None:
    spec = method_spec("feddecorr")
    (add_on,) = spec.method.add_ons
    assert (add_on.name, add_on.on, add_on.weight, add_on.variant) == ("decorrelation", "z", 0.1, "reference")


def test_decorrelation_needs_two_features() -> None:
    one = {"encoder": {"widths": [8, 16]}, "projector": {"hidden_dims": [16], "out_dim": 1}}
    with pytest.raises(ValidationError, match="decorrelation on z needs two features"):
        _spec({"name": "decorrelation"}, model=one)
    _spec({"name": "decorrelation", "on": "h"}, model=one)


def _fur(z: Any, samples: Any, tangents: Any, directions: Any, divisor: float) -> float:
    """Compute FUR in loops: log maps at every tangent point, and sorted projections."""
    z, samples, tangents = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (z, samples, tangents))

    def log_map(t: Any, x: Any) -> Any:
        tangential = x - (x @ t) * t
        return np.arccos(np.clip(x @ t, -1, 1)) * tangential / np.linalg.norm(tangential)

    total = 0.0
    for j, t in enumerate(tangents):
        logs_z, logs_s = np.array([log_map(t, x) for x in z]), np.array([log_map(t, x) for x in samples])
        total += np.mean([np.mean((np.sort(logs_z @ w) - np.sort(logs_s @ w)) ** 2) for w in directions[j]])
    return total / divisor


def test_fur_is_the_sum_over_tangent_planes_of_a_sliced_distance() -> None:
    spec = _spec({"name": "fur", "weight": 0.5, "num_projections": 3, "divisor": 2}, training={"batch_size": 8})
    client = training(spec)
    batch = client.batch()
    generator = client.ctx.generator("fur")
    term = client.values(batch)["fur"]
    expected = 0.0
    for _, z in client.outputs(batch):
        shapes = (z.shape, z.shape, (len(z), 3, z.shape[1]))
        tangents, samples, directions = (torch.randn(shape, generator=generator).double().numpy() for shape in shapes)
        expected += 0.5 * _fur(z, samples, tangents, directions, 2)
    assert term == pytest.approx(expected, rel=1e-4)


def test_fur_draws_new_numbers_in_every_step_that_depend_only_on_the_round() -> None:
    client, again = training(method_spec("fedu2")), training(method_spec("fedu2"))
    batch = client.batch()
    first, second = client.values(batch)["fur"], client.values(batch)["fur"]
    assert first != second
    assert (again.values(batch)["fur"], again.values(batch)["fur"]) == (first, second)
    assert training(method_spec("fedu2"), number=2).values(batch)["fur"] != first


@pytest.mark.parametrize("name", ["feddecorr", "fedu2"])
def test_a_weight_of_zero_leaves_only_the_hosts_losses(name: str) -> None:
    add_on = {"feddecorr": "decorrelation", "fedu2": "fur"}[name]
    spec = method_spec(name, method={"name": name, "add_ons": [{"name": add_on, "weight": 0}]})
    client, host = training(spec), training(method_spec("fedalignuniform"))
    batch = client.batch()
    values = client.values(batch)
    assert values.pop({"feddecorr": "decorrelation", "fedu2": "fur"}[name]) == 0
    assert values == host.values(batch)


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("host", "add_on"),
    [
        ("supervised", {"name": "decorrelation", "on": "h"}),
        ("fedsimclr", {"name": "fur"}),
        ("fedbyol", {"name": "decorrelation"}),
        ("fedbyol", {"name": "fur"}),
    ],
)
def test_both_add_ons_work_with_other_methods(host: str, add_on: dict[str, Any]) -> None:
    spec = _spec(add_on, host)
    result = simulate(spec, shards(spec))
    assert f"loss/{add_on['name']}" in result.history[-1].clients["client-0"]
    assert result.model.keys() == start(method_spec(host)).broadcast.keys()  # nothing more is sent
