"""FedVICReg: its loss from the equations, its variants, what it sends, and what it can be combined with."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import local_round, start, training


def _spec(**settings: Any) -> RunSpec:
    return method_spec("fedvicreg", method={"name": "fedvicreg", **settings})


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_the_loss_is_that_of_the_equations(variant: str) -> None:
    client = training(_spec(invariance_weight=3, variance_weight=5, covariance_weight=7, variant=variant))
    batch = client.batch()
    with torch.no_grad():  # each view is a separate batch
        z = [client.modules["projector"](client.modules["encoder"](x)).double().numpy() for x in batch.views]
    width = z[0].shape[1]
    covariances = [np.cov(each, rowvar=False) for each in z]
    variance = sum(float(np.maximum(0, 1 - np.sqrt(c.diagonal() + 1e-4)).mean()) for c in covariances)
    covariance = sum(float((c**2).sum() - (c.diagonal() ** 2).sum()) / width for c in covariances)
    distance = float(((z[0] - z[1]) ** 2).sum(axis=1).mean())
    if variant == "reference":
        distance, variance = distance / width, variance / 2
    expected = 3 * distance + 5 * variance + 7 * covariance
    assert client.values(batch)["vicreg"] == pytest.approx(expected, rel=1e-4)


def test_encoder_and_projector_are_sent_and_nothing_is_kept() -> None:
    spec = _spec()
    result = local_round(spec, start(spec).broadcast)
    assert {name.split(".")[0] for name in result.update} == {"encoder", "projector"}
    assert result.state == {}


def test_fedvicreg_trains_without_a_projector() -> None:
    spec = method_spec("fedvicreg", model={"encoder": {"widths": [8, 16]}, "projector": None})
    assert {name.split(".")[0] for name in simulate(spec, shards(spec)).model} == {"encoder"}


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    "parts",
    [
        {"add_ons": [{"name": "dsr"}, {"name": "decorrelation"}, {"name": "fur"}]},
        {"add_ons": [{"name": "proximal"}, {"name": "scaffold"}], "reducer": {"name": "ldawa"}},
        {"merge": {"name": "ema"}, "reducer": {"name": "eua", "server_learning_rate": 0.3}},
        {"merge": {"name": "local"}, "reducer": {"name": "none"}},
    ],
)
def test_fedvicreg_trains_with_the_other_parts(parts: dict[str, Any]) -> None:
    spec = _spec(**parts)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())


@pytest.mark.parametrize("name", ["fedvicreg", "fedbarlow"])
def test_hard_separation_is_refused_because_every_dimension_must_vary(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} asks every dimension to vary"):
        method_spec(name, method={"name": name, "add_ons": [{"name": "hsd", "variant": "mask"}]})


def test_a_loss_whose_three_weights_are_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="all three weights of fedvicreg are 0"):
        _spec(invariance_weight=0, variance_weight=0, covariance_weight=0)
