"""FedSimSiam: its loss from the equation, and its stopped gradient."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from support.methods import method_spec
from support.rounds import local_round, start, training


def test_the_loss_is_that_of_the_equation() -> None:
    client = training(method_spec("fedsimsiam"))
    batch = client.batch()
    with torch.no_grad():  # each view is a separate batch
        z = [client.modules["projector"](client.modules["encoder"](x)) for x in batch.views]
        p = [client.modules["predictor"](each).double().numpy() for each in z]
    z1, z2 = (each.double().numpy() for each in z)

    def cosine(
        a: np.ndarray[tuple[int, int], np.dtype[np.float64]], b: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    ) -> float:
        return float(np.mean([x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]))

    expected = -cosine(p[0], z2) / 2 - cosine(p[1], z1) / 2
    assert client.values(batch)["negative_cosine"] == pytest.approx(expected, rel=1e-5)


def test_no_gradient_flows_through_the_target() -> None:
    client = training(method_spec("fedsimsiam"))
    batch = client.batch()
    with torch.no_grad():  # a predictor that ignores its input: any gradient would be the target's
        last = list(client.modules["predictor"].children())[-1]
        assert isinstance(last, torch.nn.Linear)
        last.weight.zero_()
        last.bias.fill_(1.0)
    client.losses(batch)["negative_cosine"].backward()  # type: ignore[no-untyped-call]
    assert all(bool((p.grad == 0).all()) for p in client.modules["encoder"].parameters() if p.grad is not None)
    assert last.bias.grad is not None
    assert bool((last.bias.grad != 0).any())


def test_the_predictor_is_sent_and_nothing_is_kept() -> None:
    spec = method_spec("fedsimsiam")
    result = local_round(spec, start(spec).broadcast)
    assert {name.split(".")[0] for name in result.update} == {"encoder", "projector", "predictor"}
    assert result.state == {}


def test_fedsimsiam_requires_a_projector() -> None:
    with pytest.raises(ValidationError, match="fedsimsiam predicts embeddings"):
        method_spec("fedsimsiam", model={"projector": None})
