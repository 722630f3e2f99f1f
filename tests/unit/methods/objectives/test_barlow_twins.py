"""FedBarlow: its loss from the equations, what it sends, and what it can be combined with."""

from typing import Any

import numpy as np
import pytest
import torch

from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import local_round, start, training


def _spec(**settings: Any) -> RunSpec:
    return method_spec("fedbarlow", method={"name": "fedbarlow", **settings})


def test_the_loss_is_that_of_the_equation() -> None:
    client = training(_spec(off_diagonal_weight=0.3))
    batch = client.batch()
    with torch.no_grad():  # each view is a separate batch
        z1, z2 = (client.modules["projector"](client.modules["encoder"](x)).double().numpy() for x in batch.views)
    a, b = ((z - z.mean(axis=0)) / np.sqrt(z.var(axis=0) + 1e-5) for z in (z1, z2))
    correlation = a.T @ b / len(a)
    squares = np.where(np.eye(len(correlation)) == 1, (1 - correlation) ** 2, 0.3 * correlation**2)
    assert client.values(batch)["barlow_twins"] == pytest.approx(float(squares.sum()), rel=1e-4)


def test_encoder_and_projector_are_sent_and_nothing_is_kept() -> None:
    spec = _spec()
    result = local_round(spec, start(spec).broadcast)
    assert {name.split(".")[0] for name in result.update} == {"encoder", "projector"}
    assert result.state == {}


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
def test_fedbarlow_trains_with_the_other_parts(parts: dict[str, Any]) -> None:
    spec = _spec(**parts)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())
