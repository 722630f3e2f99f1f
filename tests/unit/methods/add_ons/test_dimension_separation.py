"""SSD: soft and hard separation of dimensions, and projector distillation."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.errors import MethodError
from fedssl.losses import dimension_scaled
from fedssl.methods.add_ons.dimension_separation import own_dimensions, random_rotation
from fedssl.methods.composition.part import Online
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import context, method_spec, shards
from support.rounds import local_round, start, training

WIDTH = 16
WIDE = {"encoder": {"widths": [8, WIDTH]}, "projector": {"hidden_dims": [16], "out_dim": WIDTH}}
BARE = {"encoder": {"widths": [8, WIDTH]}, "projector": None}


def _spec(
    *add_ons: dict[str, Any], host: str = "fedalignuniform", model: dict[str, Any] = WIDE, **more: Any
) -> RunSpec:
    return method_spec(host, method={"name": host, "add_ons": list(add_ons)}, model=model, **more)


def _unit(z: Any) -> Any:
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def _align_uniform(z1: Any, z2: Any) -> tuple[float, float]:
    """Compute Eq. 3 and the sign-corrected Eq. 4 in loops."""
    z1, z2 = _unit(z1), _unit(z2)
    uniform = 0.0
    for z in (z1, z2):
        pairs = [np.exp(-2 * np.sum((z[i] - z[j]) ** 2)) for i in range(len(z)) for j in range(i + 1, len(z))]
        uniform += np.log(np.mean(pairs)) / 2
    return float(np.mean(np.sum((z1 - z2) ** 2, axis=1))), float(uniform)


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _dsr(z: Any, owned: tuple[int, ...], alpha: float, variant: str, q: Any) -> float:
    d = np.ones(WIDTH)
    d[list(owned)] = alpha
    u = _unit(z)
    if variant == "paper":
        return float(np.mean([np.sum((row - row * d) ** 2) for row in u]))
    qk = q * np.sqrt(d)  # SSD's code: columns of Q scaled by the root, then Q_k Q_k^T
    return float(np.linalg.norm(u - _unit(u @ qk @ qk.T)) / len(z))


def _pd(h: Any, z: Any, variant: str, t: float = 0.5) -> float:
    if variant == "mse":
        return float(np.mean((h - z) ** 2))
    p, q = (_softmax(h), _softmax(z)) if variant == "paper" else (_softmax(z / t), _softmax(h / t))
    return float(np.mean(np.sum(p * np.log(p / q), axis=1)))


@pytest.mark.parametrize("dsr_variant", ["reference", "paper"])
@pytest.mark.parametrize("pd_variant", ["reference", "paper", "mse"])
def test_the_objective_is_equation_10(dsr_variant: str, pd_variant: str) -> None:
    spec = _spec(
        {"name": "dsr", "gamma": 0.7, "alpha": 5, "variant": dsr_variant},
        {"name": "pd", "delta": 0.2, "variant": pd_variant},
    )
    client = training(spec, "client-1")
    assert client.ctx.dimensions is not None
    q = client.modules["dsr"].rotation.double().numpy() if dsr_variant == "reference" else None
    batch = client.batch()
    losses = client.values(batch)
    (h1, z1), (h2, z2) = client.outputs(batch)
    align, uniform = _align_uniform(z1, z2)
    dsr = np.mean([_dsr(z, client.ctx.dimensions, 5, dsr_variant, q) for z in (z1, z2)])
    pd = np.mean([_pd(h1, z1, pd_variant), _pd(h2, z2, pd_variant)])
    assert losses == pytest.approx(
        {"alignment": align, "uniformity": uniform, "dsr": 0.7 * dsr, "pd": 0.2 * pd}, rel=2e-5
    )


def test_the_defaults_are_the_reference_variant_with_gamma_1_and_delta_a_tenth() -> None:
    named = _spec({"name": "dsr", "gamma": 1, "alpha": 10}, {"name": "pd", "delta": 0.1, "temperature": 0.5})
    preset = training(method_spec("ssd"))
    batch = preset.batch()
    expected = training(named).losses(batch)
    for name, term in preset.losses(batch).items():
        torch.testing.assert_close(term, expected[name], rtol=0, atol=0)
    assert method_spec("ssd").method.reducer.weighting == "batches"


def test_the_rotation_is_orthonormal_and_the_same_for_all_clients() -> None:
    spec = method_spec("ssd")
    rotations = [training(spec, client, number).modules["dsr"].rotation for client, number in
                 (("client-0", 1), ("client-1", 1), ("client-2", 7))]  # fmt: skip
    assert all(torch.equal(rotations[0], other) for other in rotations[1:])
    torch.testing.assert_close(rotations[0] @ rotations[0].T, torch.eye(WIDTH), rtol=0, atol=1e-6)
    exact = random_rotation(64, 3)
    torch.testing.assert_close(exact.T @ exact, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-12)
    other = training(spec.model_copy(update={"seed": 12})).modules["dsr"].rotation
    assert not torch.allclose(rotations[0], other)


def test_random_rotations_include_reflections_and_have_mean_zero() -> None:
    """Half of the uniformly drawn orthonormal matrices rotate (det 1), half reflect, and each entry has mean 0."""
    drawn = torch.stack([random_rotation(3, seed) for seed in range(200)])
    assert 60 < int((torch.linalg.det(drawn) > 0).sum()) < 140
    assert float(drawn.mean(dim=0).abs().max()) < 0.15


def test_the_identity_as_rotation_scales_the_clients_coordinates() -> None:
    client = training(_spec({"name": "dsr", "alpha": 4}))
    client.modules["dsr"].rotation.copy_(torch.eye(WIDTH))
    batch = client.batch()
    term = client.values(batch)["dsr"]
    expected = []
    for _, z in client.outputs(batch):
        u, owned = _unit(z), list(client.ctx.dimensions or ())
        target = u.copy()
        target[:, owned] *= 4
        expected.append(np.linalg.norm(u - _unit(target)) / len(z))
    assert term == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_dsr_pulls_embeddings_into_the_clients_own_dimensions(variant: str) -> None:
    """A step against the gradient increases the share of the client's own (rotated) dimensions in the length of z."""
    client = training(_spec({"name": "dsr", "variant": variant}))
    part = client.algorithm.add_ons[0]
    z = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    online = Online(h=(z,), z=(z,), projected=(z,))
    part.terms(online, client.modules, client.batch(), client.ctx)[0]["dsr"].backward()
    assert z.grad is not None
    basis = client.modules["dsr"].rotation if variant == "reference" else torch.eye(WIDTH)
    owned = list(client.ctx.dimensions or ())

    def share(z: torch.Tensor) -> torch.Tensor:
        return ((torch.nn.functional.normalize(z, dim=1) @ basis)[:, owned] ** 2).sum(dim=1)

    assert bool((share(z - 0.01 * z.grad) > share(z)).all())


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 10.0])
def test_dsr_has_no_effect_only_at_alpha_1(alpha: float) -> None:
    client = training(_spec({"name": "dsr", "alpha": alpha}))
    term = client.values(client.batch())["dsr"]
    assert (term == 0) == (alpha == 1)


def test_clients_have_different_dimensions_and_therefore_different_terms() -> None:
    spec = method_spec("ssd")
    terms = []
    for client in ("client-0", "client-1"):
        state = training(spec, "client-0")
        other = dataclasses.replace(state, ctx=context(spec, 1, client))
        other.algorithm.merge(other.modules, other.broadcast, None, other.data, other.ctx)
        terms.append(other.values(state.batch())["dsr"])
    assert terms[0] != terms[1]


def test_hard_separation_passes_only_the_clients_own_dimensions_to_the_losses() -> None:
    client = training(_spec({"name": "hsd", "variant": "mask"}, {"name": "pd"}))
    batch = client.batch()
    losses = client.values(batch)
    (h1, z1), (h2, z2) = client.outputs(batch)
    owned = list(client.ctx.dimensions or ())
    align, uniform = _align_uniform(z1[:, owned], z2[:, owned])
    pd = 0.1 * np.mean([_pd(h1, z1, "reference"), _pd(h2, z2, "reference")])  # of the whole z
    assert losses == pytest.approx({"alignment": align, "uniformity": uniform, "pd": pd}, rel=2e-5)


def test_hard_separation_stops_the_gradient_of_the_other_dimensions() -> None:
    client = training(_spec({"name": "hsd", "variant": "mask"}))
    torch.stack(list(client.losses(client.batch()).values())).sum().backward()  # type: ignore[no-untyped-call]
    last = client.modules["projector"][-1].weight.grad
    owned = own_dimensions(client.ctx)
    assert bool((last[~owned] == 0).all())
    assert bool((last[owned] != 0).any())


def test_the_projection_variant_adds_a_term_of_the_clients_own_columns() -> None:
    client = training(_spec({"name": "hsd", "variant": "projection", "gamma": 0.7}), "client-1")
    batch = client.batch()
    losses = client.values(batch)
    (_, z1), (_, z2) = client.outputs(batch)
    assert client.ctx.dimensions is not None
    q_k = client.modules["hsd"].rotation.double().numpy()[:, list(client.ctx.dimensions)]
    align, uniform = _align_uniform(z1, z2)
    distances = []
    for z in (z1, z2):
        u = _unit(z)
        distances.append(np.linalg.norm(u - _unit(u @ q_k @ q_k.T)) / len(z))
    assert losses.keys() == {"alignment", "uniformity", "hsd"}
    assert losses["hsd"] == pytest.approx(0.7 * np.mean(distances), rel=1e-4)
    assert losses["alignment"] == pytest.approx(align, rel=1e-4), "on the whole z"
    assert losses["uniformity"] == pytest.approx(uniform, rel=1e-4)


def test_a_projection_matches_a_hand_calculation() -> None:
    # The first dimension is the client's own. (0.6, 0.8) is projected to (0.6, 0), of unit length (1, 0): distance
    # sqrt(0.16 + 0.64). (0, 1) has the projection (0, 0), and (1, 0) is its own: distances 1 and 0.
    z = torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    own = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert float(dimension_scaled(z, own, torch.eye(2))) == pytest.approx(math.sqrt(0.8 + 1) / 3, rel=1e-12)


def test_a_projection_is_the_limit_of_dsr() -> None:
    z = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = (torch.arange(WIDTH) < 4).double()
    rotation = random_rotation(WIDTH, 1)
    limit = float(dimension_scaled(z, own, rotation))
    apart = [abs(float(dimension_scaled(z, 1 + (alpha - 1) * own, rotation)) - limit) for alpha in (10, 100, 1e4, 1e6)]
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < 1e-5


def test_the_projection_variant_moves_embeddings_into_the_clients_own_columns() -> None:
    def inside(add_on: dict[str, Any]) -> float:
        client = training(_spec(add_on), "client-1")
        assert client.ctx.dimensions is not None
        optimizer = torch.optim.SGD(client.modules.parameters(), lr=0.1)
        batch = client.batch()
        for _ in range(30):
            optimizer.zero_grad()
            torch.stack(list(client.losses(batch).values())).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        q_k = client.modules["hsd"].rotation.double().numpy()[:, list(client.ctx.dimensions)]
        return float(np.square(_unit(client.outputs(batch)[0][1]) @ q_k).sum())

    weak, strong = ({"name": "hsd", "variant": "projection", "gamma": gamma} for gamma in (0.0, 30.0))
    assert inside(strong) > 1.5 * inside(weak)


def test_the_variant_is_always_serialised() -> None:
    (masked,) = _spec({"name": "hsd", "variant": "mask"}).method.model_dump(mode="json")["add_ons"]
    assert masked == {"name": "hsd", "num_clients": None, "variant": "mask"}
    (projected,) = _spec({"name": "hsd", "gamma": 2}).method.model_dump(mode="json")["add_ons"]
    assert projected == {"name": "hsd", "num_clients": None, "variant": "projection", "gamma": 2.0}


def test_without_a_projector_dsr_works_on_the_representation() -> None:
    client = training(_spec({"name": "dsr"}, model=BARE))
    assert set(client.losses(client.batch())) == {"alignment", "uniformity", "dsr"}
    assert client.modules["dsr"].scale.shape == (WIDTH,)


def test_nothing_of_the_separation_is_sent_or_kept() -> None:
    spec = method_spec("ssd")
    result = local_round(spec, start(spec).broadcast)
    assert result.state == {}
    assert {name.split(".")[0] for name in result.update} == {"encoder", "projector"}


@pytest.mark.parametrize(
    ("host", "model", "add_ons", "reason"),
    [
        ("fedalignuniform", BARE, [{"name": "pd"}], "needs a projector"),
        ("supervised", WIDE, [{"name": "pd"}], "needs a projector"),
        (
            "fedalignuniform",
            {"encoder": {"widths": [8]}, "projector": {"out_dim": 16}},
            [{"name": "pd"}],
            "pd compares h, 8 wide, with z, 16 wide: set model.projector.out_dim to 8",
        ),
        ("fedalignuniform", WIDE, [{"name": "dsr", "num_clients": 17}], "16 dimensions among 17 clients"),
        ("fedalignuniform", WIDE, [{"name": "hsd", "variant": "mask"}, {"name": "dsr"}], "choose one"),
        ("fedsimclr", WIDE, [{"name": "hsd", "variant": "projection"}, {"name": "dsr"}], "choose one"),
        ("fedsimclr", WIDE, [{"name": "hsd", "variant": "mask", "gamma": 2}], "gamma of hsd weighs the term"),
        ("fedbyol", WIDE, [{"name": "hsd", "variant": "mask"}], "fedbyol compares them with something else"),
        ("supervised", WIDE, [{"name": "hsd", "variant": "mask"}], "supervised compares them with something else"),
        ("fedalignuniform", WIDE, [{"name": "dsr"}, {"name": "dsr"}], "'dsr' twice"),
    ],
)
def test_invalid_combinations_are_refused(host: str, model: Any, add_ons: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        _spec(*add_ons, host=host, model=model)


def test_a_client_without_valid_dimensions_is_refused() -> None:
    spec = method_spec("ssd")
    without = dataclasses.replace(context(spec, 1, "client-0"), dimensions=None)
    with pytest.raises(MethodError, match="client-0 was assigned no dimensions"):
        own_dimensions(without)
    with pytest.raises(MethodError, match="not all within the embedding's 16"):
        own_dimensions(dataclasses.replace(without, dimensions=(3, 16)))


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("host", "add_ons"),
    [
        ("fedalignuniform", [{"name": "pd", "variant": "mse"}]),
        ("fedsimclr", [{"name": "dsr"}, {"name": "pd"}]),
        ("fedsimclr", [{"name": "hsd", "variant": "mask"}, {"name": "pd"}, {"name": "proximal"}]),
        ("fedbyol", [{"name": "hsd", "variant": "projection"}, {"name": "fedx"}]),
        ("fedbyol", [{"name": "dsr"}, {"name": "pd"}, {"name": "scaffold"}]),
        ("supervised", [{"name": "dsr"}]),
    ],
)
def test_separation_can_be_added_to_other_methods(host: str, add_ons: Any) -> None:
    spec = _spec(*add_ons, host=host)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())
    metrics = result.history[-1].clients["client-0"]
    terms = {add_on["name"] for add_on in add_ons} & {"dsr", "pd", "proximal"}
    assert terms <= {name.removeprefix("loss/") for name in metrics}


def test_ssd_trains_with_fedemas_merge() -> None:
    spec = method_spec("ssd", method={"name": "ssd", "merge": {"name": "ema"}})
    result = simulate(spec, shards(spec))
    assert {"loss/dsr", "loss/pd"} <= result.history[-1].clients["client-0"].keys()
