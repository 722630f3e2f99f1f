"""FedRLC: the objective compared with its equations, and how a client updates its centers on download."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors
from fedssl.methods import METHODS
from fedssl.methods.add_ons.crossed_kl import num_used
from fedssl.methods.merges.centers import center_divergence, mixed_centers
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import context, method_spec, shards
from support.rounds import aggregate, client_data, local_round, start, training

AS_THEY_ARE = {"channels": 1, "image_size": 8, "augmentation": {"crop": "none", "flip": 0, "jitter": 0, "greyscale": 0}}


def _spec(crossed_kl: dict[str, Any] | None = None, merge: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    method = {
        "name": "fedrlc",
        "add_ons": [{"name": "crossed_kl", "num_centers": 5, **(crossed_kl or {})}],
        "merge": {"name": "centers", **(merge or {})},
    }
    return method_spec("fedrlc", method=method, **changes)


def _assigned(z: np.ndarray, centers: np.ndarray, exponent: float = -0.5) -> np.ndarray:
    """Compute the soft assignments of FedRLC Eq. 4."""
    kernel = (1 + ((z[:, None, :] - centers[None, :, :]) ** 2).sum(-1)) ** exponent
    return kernel / kernel.sum(1, keepdims=True)


def _kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(1)


def _crossed(online: list[np.ndarray], target: list[np.ndarray]) -> float:
    """Compute the crossed divergence of FedRLC Eq. 6 and 8, sample by sample."""
    total = 0.0
    for q_online, q_target in ((online[0], target[1]), (online[1], target[0])):
        weight = q_target**2 / q_target.sum(0)
        p = weight / weight.sum(1, keepdims=True)
        for i in range(len(p)):
            if q_target[i].argmax() == q_online[i].argmax():
                total += float((p[i] * np.log(p[i] / q_online[i])).sum())
    return total / len(online[0])


@pytest.mark.parametrize("exponent", [-0.5, -1.0])
def test_the_objective_is_byols_plus_the_crossed_divergence(exponent: float) -> None:
    spec = _spec({"exponent": exponent})
    state = training(spec, number=2, state=local_round(spec, start(spec).broadcast).state)
    batch, modules = state.batch(), copy.deepcopy(state.modules).double()
    views = [view.double() for view in batch.views]
    with torch.no_grad():
        p = [modules["predictor"](modules["projector"](modules["encoder"](view))).numpy() for view in views]
        t = [modules["target_projector"](modules["target_encoder"](view)).numpy() for view in views]
    centers = modules["centers"].mu.detach().numpy()
    unit = [[z / np.linalg.norm(z, axis=1, keepdims=True) for z in side] for side in (p, t)]
    instance = sum((2 - 2 * (unit[0][i] * unit[1][1 - i]).sum(1)).mean() for i in (0, 1))
    crossed = _crossed([_assigned(z, centers, exponent) for z in p], [_assigned(z, centers, exponent) for z in t])
    values = state.values(batch)
    assert values["regression"] == pytest.approx(instance, rel=1e-4)
    assert values["crossed_kl"] == pytest.approx(crossed, rel=1e-4)
    assert crossed > 0


def test_centers_and_online_network_get_a_gradient_but_not_the_target() -> None:
    state = training(_spec())
    losses, measurements = state.terms(state.batch())
    assert not measurements["centers_used"].requires_grad
    losses["crossed_kl"].backward()  # type: ignore[no-untyped-call]
    for name in ("centers", "encoder", "projector", "predictor"):
        assert any(p.grad is not None and bool(p.grad.any()) for p in state.modules[name].parameters()), name
    for name in ("target_encoder", "target_projector"):
        assert all(p.grad is None for p in state.modules[name].parameters()), name


def test_each_network_runs_once_per_view() -> None:
    """The predictor and the target network serve both losses."""
    state = training(_spec())
    calls: dict[str, int] = {}
    for name in ("encoder", "predictor", "target_encoder"):
        state.modules[name].register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    state.losses(state.batch())
    assert calls == {"encoder": 2, "predictor": 2, "target_encoder": 2}


def test_the_number_of_used_centers_is_the_exponential_of_their_entropy() -> None:
    assert float(num_used(torch.eye(4))) == pytest.approx(4)
    assert float(num_used(torch.tensor([[0.6, 0.4], [0.9, 0.1]]))) == pytest.approx(1)
    shares = np.array([3 / 4, 1 / 4])
    three_to_one = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 1]])
    assert float(num_used(three_to_one)) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))


def test_the_number_of_used_centers_is_reported_and_not_minimised() -> None:
    metrics = local_round(_spec(), start(_spec()).broadcast).metrics
    assert 1 <= metrics["centers_used"] <= 5
    assert metrics["loss"] == pytest.approx(metrics["loss/regression"] + metrics["loss/crossed_kl"], rel=1e-5)


def test_centers_are_sent_as_centers_and_averaged_by_images() -> None:
    spec = _spec()
    plan = METHODS["fedrlc"].bind(spec).plan
    kinds = {tensor.name: tensor.kind for tensor in plan.update}
    assert {name for name, kind in kinds.items() if kind == "centers"} == {"centers.mu"}
    assert plan.broadcast == plan.update
    first = start(spec)
    updates = [(30, first.broadcast), (10, {n: v + 4 if v.is_floating_point() else v for n, v in first.state.items()})]
    mean = aggregate(spec, first.state, updates).broadcast["centers.mu"]
    torch.testing.assert_close(mean, first.broadcast["centers.mu"] + 1)


@pytest.mark.parametrize("reducer", [{"name": "ldawa", "num_plain_rounds": 0}, {"name": "eua"}, {"name": "mean"}])
def test_centers_are_averaged_by_images_whichever_reducer_combines_the_weights(reducer: dict[str, Any]) -> None:
    """L-DAWA would scale them, and EUA would take a direction; with equal weights they would not count by images."""
    if reducer["name"] == "mean":
        reducer = {**reducer, "weighting": "uniform"}
    spec = method_spec("fedbyol", method={"name": "fedbyol", "add_ons": [{"name": "crossed_kl"}], "reducer": reducer})
    rules = {tensor.name: tensor.reduce for tensor in METHODS["fedbyol"].bind(spec).plan.update}
    assert rules["centers.mu"] == "mean"
    assert rules["encoder.blocks.0.conv.weight"] == ("mean" if reducer["name"] == "mean" else "method")
    first = start(spec)
    generator = torch.Generator().manual_seed(2)
    moved = [
        {name: v + torch.rand(v.shape, generator=generator) if v.is_floating_point() else v for name, v in tensors}
        for tensors in (first.state.items(), first.state.items())
    ]
    mean = aggregate(spec, first.state, [(30, moved[0]), (10, moved[1])]).broadcast["centers.mu"]
    torch.testing.assert_close(mean, 0.75 * moved[0]["centers.mu"] + 0.25 * moved[1]["centers.mu"])


def test_centers_of_clients_that_train_alone_are_not_sent() -> None:
    alone = {"merge": {"name": "local"}, "reducer": {"name": "none"}}
    spec = method_spec("fedbyol", method={"name": "fedbyol", "add_ons": [{"name": "crossed_kl"}], **alone})
    result = simulate(spec, shards(spec))
    assert torch.equal(result.model["centers.mu"], result.initial["centers.mu"])
    assert METHODS["fedbyol"].bind(spec).plan.update == ()


def test_centers_are_mixed_by_epsilon() -> None:
    received, local = torch.tensor([[0.0, 4.0]]), torch.tensor([[8.0, 0.0]])
    assert torch.equal(mixed_centers(received, local, torch.tensor(0.0)), received)
    assert mixed_centers(received, local, torch.tensor(3.0)).tolist() == [[6.0, 1.0]]  # (3 mu_k + mu_*) / 4


def _download(spec: RunSpec, number: int = 2) -> tuple[Any, Tensors, Tensors]:
    broadcast = start(spec).broadcast
    generator = torch.Generator().manual_seed(1)
    later = {
        name: value + torch.rand(value.shape, generator=generator) / 10 if value.is_floating_point() else value
        for name, value in broadcast.items()
    }
    state = local_round(spec, broadcast).state
    return training(spec, number=number, broadcast=later, state=state), later, state


@pytest.mark.parametrize("scale", ["raw", "unit"])
def test_epsilon_is_the_divergence_of_the_global_from_the_local_assignments(scale: str) -> None:
    """The views are the images themselves, so that z is the output of the network in eval mode."""
    spec = _spec({"scale": scale}, data=AS_THEY_ARE)
    received, broadcast, state = _download(spec)
    images = received.data.images.double() / 255

    def assigned(weights: Tensors, prefix: str) -> np.ndarray:
        modules = METHODS["fedrlc"].bind(spec).client.build(context(spec, 0)).double().eval()
        for name in ("encoder", "projector", "centers"):
            own = f"{prefix}{name}."
            modules[name].load_state_dict({n.removeprefix(own): v for n, v in weights.items() if n.startswith(own)})
        with torch.no_grad():
            z = modules["projector"](modules["encoder"](images)).numpy()
        if scale == "unit":
            z = z / np.linalg.norm(z, axis=1, keepdims=True)
        return _assigned(z, modules["centers"].mu.detach().numpy())

    epsilon = _kl(assigned(broadcast, ""), assigned(state, "ema.local.")).mean()
    assert float(received.modules["ema"].epsilon) == pytest.approx(epsilon, rel=1e-3)
    local = state["ema.local.centers.mu"].double().numpy()
    mixed = (epsilon * local + broadcast["centers.mu"].double().numpy()) / (1 + epsilon)
    np.testing.assert_allclose(received.modules["centers"].mu.detach().numpy(), mixed, atol=1e-5)
    assert epsilon > 0


def test_equal_networks_and_centers_have_an_epsilon_of_zero() -> None:
    spec = _spec()
    modules = METHODS["fedrlc"].bind(spec).client.build(context(spec, 0))
    data = client_data(spec, "client-0")
    assert float(center_divergence(modules, modules, data, context(spec, 2, "client-0"))) == 0


def test_computing_epsilon_changes_no_statistics_and_networks_are_mixed_as_in_fedema() -> None:
    received, broadcast, _ = _download(_spec())
    plain, *_ = _download(_spec(merge={"centers": "global"}))
    for name in ("encoder", "projector", "predictor", "target_encoder", "target_projector"):
        one, other = received.modules[name].state_dict(), plain.modules[name].state_dict()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert torch.equal(plain.modules["centers"].mu, broadcast["centers.mu"])
    assert not torch.equal(received.modules["centers"].mu, broadcast["centers.mu"])
    name = "encoder.blocks.0.bn.running_mean"
    assert torch.equal(received.modules["encoder"].state_dict()[name.removeprefix("encoder.")], broadcast[name])
    assert received.modules["ema"].coefficient == torch.tensor(0.7)


def test_a_clients_first_round_and_one_after_a_missed_round_take_the_global_weights() -> None:
    spec = _spec()
    for received, broadcast in ((_download(spec, number=3)[:2]), (training(spec), start(spec).broadcast)):
        assert torch.equal(received.modules["centers"].mu, broadcast["centers.mu"])
        assert all(
            torch.equal(v, broadcast[f"encoder.{n}"]) for n, v in received.modules["encoder"].state_dict().items()
        )
        assert float(received.modules["ema"].epsilon) == 0


def test_a_client_that_joins_late_takes_the_global_centers_even_if_stale_networks_are_mixed() -> None:
    spec = _spec(merge={"selective": False})
    _, later, _ = _download(spec)
    joined = training(spec, number=3, broadcast=later).modules
    assert torch.equal(joined["centers"].mu, later["centers.mu"])
    assert float(joined["ema"].epsilon) == 0


@pytest.mark.parametrize("scale", ["raw", "unit"])
def test_every_client_starts_from_the_coordinators_centers(scale: str) -> None:
    """See algorithm 1, line 1. Centers with one index mean the same cluster at all clients, so their mean does, too."""
    spec = _spec({"scale": scale})
    sent = start(spec).broadcast["centers.mu"]
    for client in ("client-0", "client-1"):
        assert torch.equal(training(spec, client, number=1).modules["centers"].mu, sent)


def test_centers_at_unit_scale_start_with_unit_length() -> None:
    torch.testing.assert_close(start(_spec({"scale": "unit"})).broadcast["centers.mu"].norm(dim=1), torch.ones(5))


def test_fedx_can_be_added_to_fedrlc() -> None:
    add_ons = [{"name": "crossed_kl"}, {"name": "fedx"}]
    spec = method_spec("fedrlc", num_rounds=2, method={"name": "fedrlc", "add_ons": add_ons})
    result = simulate(spec, shards(spec))
    terms = result.history[-1].clients["client-0"]
    assert {"loss/regression", "loss/crossed_kl"} < terms.keys()
    assert len([name for name in terms if name.startswith("loss/")]) == 5


@pytest.mark.full(but=1)
@pytest.mark.parametrize("host", ["fedbyol", "fedu", "fedema"])
def test_the_crossed_divergence_can_be_added_to_the_byol_family(host: str) -> None:
    spec = method_spec(host, method={"name": host, "add_ons": [{"name": "crossed_kl", "num_centers": 3}]})
    result = simulate(spec, shards(spec))
    assert result.model["centers.mu"].shape == (3, 8)
    assert not torch.equal(result.model["centers.mu"], result.initial["centers.mu"])


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ({"name": "fedsimclr", "add_ons": [{"name": "crossed_kl"}]}, "fedsimclr does not have both"),
        ({"name": "fedsimsiam", "add_ons": [{"name": "crossed_kl"}]}, "fedsimsiam does not have both"),
        ({"name": "fedrlc", "add_ons": []}, "fedrlc without crossed_kl is fedema"),
        ({"name": "fedrlc", "add_ons": [{"name": "fedx"}]}, "fedrlc without crossed_kl is fedema"),
        ({"name": "fedbyol", "merge": {"name": "centers"}}, "mixes the centers of crossed_kl"),
        ({"name": "fedbyol", "add_ons": [{"name": "crossed_kl", "exponent": 0.5}]}, "less than 0"),
    ],
)
def test_invalid_combinations_are_refused_with_the_reason(method: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        method_spec(method["name"], method=method)
