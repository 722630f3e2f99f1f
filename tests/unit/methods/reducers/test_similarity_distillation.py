"""FLESD: what a client sends, and how the coordinator distils it."""

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors
from fedssl.data.batches import epoch_batches
from fedssl.engine import run_distillation
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.methods.composition.follower import KEYS
from fedssl.methods.reducers.similarity import Ensemble, pack
from fedssl.methods.reducers.similarity_distillation import AnchorQueue, SimilarityDistillation
from fedssl.protocol.methods.distillation import DistillationConfig, Packing
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import CONFIGS, PUBLIC, context, method_spec, shards
from support.rounds import aggregate, local_round, start, training

AS_THEY_ARE = {"channels": 1, "image_size": 8, "augmentation": {"crop": "none", "flip": 0, "jitter": 0, "greyscale": 0}}
TOLERANCES: dict[Packing, float] = {
    "factored-f32": 1e-5,
    "factored-f16": 2e-3,
    "representations-f32": 1e-5,
    "representations-f16": 2e-3,
    "triangle-f16": 1e-2,
    "triangle-i8": 5e-2,
}
"""Every packing, and how far the ensemble's rows may be off."""


def _spec(host: str = "flesd", reducer: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    config = {**CONFIGS["flesd"]["reducer"], "num_epochs": 2, **(reducer or {})}
    sections = {"public_data": {**PUBLIC, "num_images": 72}, **changes}
    return method_spec(host, method={"name": host, "reducer": config}, **sections)


def _public_values(spec: RunSpec) -> torch.Tensor:
    public = context(spec, 1).public
    assert public is not None
    return public.images.double() / 255


def _ensemble(representations: list[np.ndarray], temperature: float) -> np.ndarray:
    """Compute FLESD's Eq. 4 to 6 for all pairs."""
    total = np.zeros((len(representations[0]),) * 2)
    for r in representations:
        unit = r / np.linalg.norm(r, axis=1, keepdims=True)
        total += np.exp(unit @ unit.T / temperature)
    return total / len(representations)


def test_the_local_loss_has_only_the_negatives_of_the_other_view() -> None:
    state = training(_spec())
    batch = state.batch()
    (_, z1), (_, z2) = state.outputs(batch)
    n1, n2 = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z1, z2))
    logits = n1 @ n2.T / 0.4
    expected = np.mean([np.log(np.exp(row).sum()) - row[i] for i, row in enumerate(logits)])
    assert state.values(batch) == {"contrastive": pytest.approx(expected, rel=1e-5)}


def test_a_client_sends_only_similarities() -> None:
    spec = _spec()
    plan = METHODS["flesd"].bind(spec).plan
    (tensor,) = plan.update
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.kind) == ("factor", "F32", (72, 8), "similarity")
    assert {spec.name.split(".")[0] for spec in plan.broadcast} == {"encoder", "projector"}
    result = local_round(spec, start(spec).broadcast)
    assert result.state == {}
    assert result.update["factor"].shape == (72, 8)


@pytest.mark.parametrize(
    ("packing", "name", "dtype", "shape", "kind"),
    [
        ("factored-f16", "factor", "F16", (72, 8), "similarity"),
        ("representations-f32", "representations", "F32", (72, 8), "representations"),
        ("representations-f16", "representations", "F16", (72, 8), "representations"),
        ("triangle-f16", "similarities", "F16", (2556,), "similarity"),
        ("triangle-i8", "similarities", "I8", (2556,), "similarity"),
    ],
)
def test_the_plan_declares_what_each_packing_sends(
    packing: Packing, name: str, dtype: str, shape: tuple[int, ...], kind: str
) -> None:
    spec = _spec(reducer={"packing": packing})
    (tensor,) = METHODS["flesd"].bind(spec).plan.update
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.kind) == (name, dtype, shape, kind)
    assert local_round(spec, start(spec).broadcast).update.keys() == {name}


@pytest.mark.parametrize("packing", ["factored-f32", "representations-f32"])
def test_similarities_are_those_of_plain_images_in_eval_mode(packing: Packing) -> None:
    spec = _spec(reducer={"packing": packing}, training={"local_epochs": 0, "batch_size": 32})
    state = training(spec)
    schedule = state.algorithm.schedule(len(state.data), state.ctx)
    update, _ = state.algorithm.finish(state.modules, state.data, schedule, state.ctx)
    networks = copy.deepcopy(state.modules).double().eval()
    with torch.no_grad():
        z = networks["projector"](networks["encoder"](_public_values(spec))).numpy()
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    (sent,) = (tensor.double().numpy() for tensor in update.values())
    np.testing.assert_allclose(np.linalg.norm(sent, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(sent @ sent.T, unit @ unit.T, atol=1e-5)
    assert np.allclose(sent, unit, atol=1e-5) == (packing == "representations-f32")
    assert all(module.training for module in state.modules.values())


def test_only_representations_reveal_the_networks_axes() -> None:
    """Two networks with the same similarities, one with its embedding rotated, send the same factor."""
    generator = torch.Generator().manual_seed(2)
    z_ND = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    turned = z_ND @ torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    for packing in TOLERANCES:
        one, other = (pack(z, packing).double() for z in (z_ND, turned))
        assert torch.allclose(one, other, atol=1e-2) == (not packing.startswith("representations")), packing
    torch.testing.assert_close(pack(z_ND, "factored-f32"), pack(turned, "factored-f32"), rtol=0, atol=1e-7)


@pytest.mark.parametrize("packing", TOLERANCES)
def test_every_packing_gives_the_ensembles_rows(packing: Packing) -> None:
    generator = torch.Generator().manual_seed(0)
    # The widths differ, as with clients that have different encoders.
    clients = [torch.randn(40, width, generator=generator) + 0.5 for width in (6, 9, 4)]
    rows, anchors = torch.tensor([3, 0, 39]), torch.tensor([7, 3, 3, 38, 39, 0, 21])
    ensemble = Ensemble([pack(z, packing) for z in clients], packing, 40)
    p = ensemble.rows(rows, anchors, temperature=0.2)
    m = _ensemble([z.double().numpy() for z in clients], 0.2)[np.ix_(rows, anchors)]
    np.testing.assert_allclose(p.numpy(), m / m.sum(1, keepdims=True), rtol=TOLERANCES[packing])
    torch.testing.assert_close(p.sum(dim=1), torch.ones(3))


@pytest.mark.parametrize("packing", ["triangle-f16", "triangle-i8"])
def test_a_client_cannot_dominate_the_others_with_invalid_cosines(packing: Packing) -> None:
    generator = torch.Generator().manual_seed(3)
    honest = [pack(torch.randn(12, 4, generator=generator), packing) for _ in range(2)]
    beyond, most = {"triangle-f16": (60_000, 1), "triangle-i8": (-128, -127)}[packing]
    one, other = (
        Ensemble([*honest, torch.full_like(honest[0], value)], packing, 12).rows(
            torch.arange(12), torch.arange(12), 0.1
        )
        for value in (beyond, most)
    )
    torch.testing.assert_close(one, other)


def test_shifting_a_row_does_not_change_the_target() -> None:
    """The authors' code subtracts the row's maximum, 1, from every similarity."""
    generator = torch.Generator().manual_seed(1)
    clients = [torch.randn(12, 5, generator=generator) for _ in range(3)]
    shifted = sum(np.exp((s - s.max(1, keepdims=True)) / 0.1) for s in map(_cosines, clients))
    p = Ensemble([pack(z, "factored-f32") for z in clients], "factored-f32", 12).rows(
        torch.arange(12), torch.arange(12), 0.1
    )
    np.testing.assert_allclose(p.numpy(), shifted / shifted.sum(1, keepdims=True), rtol=1e-4)


def _cosines(z: torch.Tensor) -> np.ndarray:
    return _unit(z.double().numpy()) @ _unit(z.double().numpy()).T


def _unit(z: np.ndarray) -> np.ndarray:
    return z / np.linalg.norm(z, axis=1, keepdims=True)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("packing", TOLERANCES)
def test_training_works_with_every_packing(packing: str) -> None:
    spec = _spec(reducer={"packing": packing})
    result = simulate(spec, shards(spec))
    assert any(not torch.equal(result.model[name], result.initial[name]) for name in result.model)


# --- The distillation ---------------------------------------------------------------------------------------------


def _task(spec: RunSpec) -> tuple[SimilarityDistillation, Context]:
    first = start(spec)
    updates = [local_round(spec, first.broadcast, f"client-{i}").update["factor"] for i in range(3)]
    config = spec.method.reducer
    assert isinstance(config, DistillationConfig)
    return SimilarityDistillation(config, Ensemble(updates, config.packing, 72), first.state), context(spec, 1)


def test_the_loss_of_a_step_follows_the_equations() -> None:
    """Compute Eq. 7 to 9 in float64: keys of the momentum encoder, own key included, against the clients' pairs."""
    spec = _spec(reducer={"student_temperature": 0.2}, data=AS_THEY_ARE)
    task, ctx = _task(spec)
    modules = task.build(ctx)
    modules.train()
    fresh = copy.deepcopy(modules)
    losses = list(itertools.islice(task.steps(modules, 0, ctx), 1))
    queue = modules["queue"]
    assert isinstance(queue, AnchorQueue)
    images = _public_values(spec)
    # Two batches of 16 fill the queue of 32; the third replaces the first, and is the one used for training.
    rows, oldest = queue.images[:16], queue.images[16:]
    assert len(set(rows.tolist()) | set(oldest.tolist())) == 32

    def embed(modules: torch.nn.ModuleDict, prefix: str, chosen: torch.Tensor) -> np.ndarray:
        double = copy.deepcopy(modules).double()  # training mode: the batch's own statistics
        with torch.no_grad():
            z = double[f"{prefix}projector"](double[f"{prefix}encoder"](images[chosen])).numpy()
        return z / np.linalg.norm(z, axis=1, keepdims=True)

    keys = np.concatenate([embed(fresh, "key_", rows), embed(fresh, "key_", oldest)])
    np.testing.assert_allclose(queue.keys.numpy(), keys, atol=1e-4)
    query = embed(fresh, "", rows)
    logits = query @ keys.T / 0.2
    log_q = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    m = _ensemble([r.double().numpy() for r in task.ensemble.packed], 0.05)[np.ix_(rows, queue.images)]
    p = m / m.sum(1, keepdims=True)
    assert float(losses[0]["distillation"].detach()) == pytest.approx(-(p * log_q).sum(1).mean(), rel=1e-4)
    assert all(p[i].argmax() == i for i in range(16))  # the nearest image is the image itself


@dataclass(frozen=True)
class _LinearStudent(SimilarityDistillation):
    """The distillation of a student with one linear layer, whose gradient can be written down."""

    built: list[torch.nn.ModuleDict] = field(default_factory=list)

    def build(self, ctx: Context) -> torch.nn.ModuleDict:
        linear = torch.nn.Linear(64, 6, bias=False)
        linear.weight.data = 0.1 * torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
        student = torch.nn.ModuleDict({"encoder": torch.nn.Sequential(torch.nn.Flatten(), linear)})
        self.built.append(torch.nn.ModuleDict({**student, **KEYS.built(student), "queue": AnchorQueue(32, 6)}))
        return self.built[-1]


def _distilled(
    x_ND: np.ndarray, ensemble: np.ndarray, weight: np.ndarray, epochs: list[list[np.ndarray]], skip: str
) -> tuple[np.ndarray, list[float]]:
    """Distil by Eq. 7 to 10 in plain float64: m 32, B' 16, zeta 0.8, tau_S 0.2, gradients of length 2 at most, and Adam
    with a learning rate of 0.01 and a weight decay of 0.02.

    As in the authors' code, the momentum encoder follows before it encodes, in steps that only fill the queue too.
    """
    student, slow, first, second = weight, weight, np.zeros_like(weight), np.zeros_like(weight)
    keys, images, means, number = np.zeros((0, 6)), np.zeros(0, int), [], 0
    for epoch, batches in enumerate(epochs):
        losses = []
        for place, rows in enumerate(batches):
            slow = 0.8 * slow + 0.2 * student
            keys = np.concatenate([keys, _unit(x_ND[rows] @ slow.T)])[-32:]
            images = np.concatenate([images, rows])[-32:]
            if place < 2 and (epoch == 0 or skip == "every_epoch"):
                continue
            z = x_ND[rows] @ student.T
            logits = _unit(z) @ keys.T / 0.2
            q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            p = ensemble[np.ix_(rows, images)] / ensemble[np.ix_(rows, images)].sum(1, keepdims=True)
            losses.append(-(p * np.log(q)).sum(1).mean())
            toward = (q - p) @ keys / 0.2 / len(rows)  # the gradient with respect to the unit vectors
            away = toward - _unit(z) * (toward * _unit(z)).sum(1, keepdims=True)
            gradient = (away / np.linalg.norm(z, axis=1, keepdims=True)).T @ x_ND[rows]
            gradient = gradient * min(1, 2 / np.linalg.norm(gradient)) + 0.02 * student
            number += 1
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            step = first / (1 - 0.9**number) / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
            student = student - 0.01 * step
        means.append(float(np.mean(losses)))
    return student, means


@pytest.mark.parametrize("skip", ["first_epoch", "every_epoch"])
def test_a_whole_distillation_follows_the_equations(skip: str) -> None:
    """Compare losses and weights after three epochs of five batches; the last batch is incomplete."""
    optimizer = {"name": "adam", "learning_rate": 0.01, "weight_decay": 0.02, "max_gradient_norm": 2.0}
    changes = {"num_epochs": 3, "skip": skip, "student_temperature": 0.2, "momentum": 0.8, "optimizer": optimizer}
    spec = _spec(reducer={**changes, "temperature": 0.1}, data=AS_THEY_ARE)
    ctx, config = context(spec, 1), spec.method.reducer
    assert isinstance(config, DistillationConfig)
    clients = [torch.randn(72, 6, generator=torch.Generator().manual_seed(seed)) + 0.3 for seed in range(3)]
    task = _LinearStudent(config, Ensemble([pack(z, config.packing) for z in clients], config.packing, 72), {})
    progress: list[float | None] = []
    run_distillation(task, ctx, lambda reached: progress.append(reached.loss))
    orders = [torch.Generator().manual_seed(ctx.seed(f"distillation/order/{epoch}")) for epoch in range(3)]
    epochs = [[rows.numpy() for rows in epoch_batches(72, 16, order, drop_last=False)] for order in orders]
    (built,) = task.built
    fresh = task.build(ctx)["encoder"].state_dict()["1.weight"].double().numpy()
    ensemble = _ensemble([z.double().numpy() for z in clients], 0.1)
    weight, losses = _distilled(_public_values(spec).flatten(1).numpy(), ensemble, fresh, epochs, skip)
    assert progress == pytest.approx(losses, rel=1e-6)
    np.testing.assert_allclose(built["encoder"].state_dict()["1.weight"], weight, atol=1e-5)


def test_only_the_parameters_of_the_momentum_encoder_follow() -> None:
    spec = _spec(reducer={"momentum": 0.75})
    task, ctx = _task(spec)
    modules = task.build(ctx)
    modules.train()
    steps = task.steps(modules, 0, ctx)
    next(steps)
    before = modules["encoder"].state_dict()["blocks.0.conv.weight"].clone()
    with torch.no_grad():
        modules["encoder"].get_parameter("blocks.0.conv.weight").add_(1.0)  # the optimiser's step
    next(steps)
    moved = modules["key_encoder"].state_dict()["blocks.0.conv.weight"]
    torch.testing.assert_close(moved, 0.75 * before + 0.25 * (before + 1))
    assert not any(parameter.requires_grad for parameter in modules["key_encoder"].parameters())


@pytest.mark.parametrize(("skip", "trained"), [("first_epoch", [3, 5]), ("every_epoch", [3, 3])])
def test_the_first_steps_of_the_first_or_of_every_epoch_only_fill_the_queue(skip: str, trained: list[int]) -> None:
    """72 images are 5 batches of 16; filling a queue of 32 takes two batches."""
    task, ctx = _task(_spec(reducer={"skip": skip}))
    modules = task.build(ctx)
    assert [len(list(task.steps(modules, epoch, ctx))) for epoch in (0, 1)] == trained


def test_the_queue_is_a_ring() -> None:
    queue = AnchorQueue(3, 2)
    for number in range(4):
        queue.push_of(torch.tensor([[0.0, 1.0 + number]]), torch.tensor([number]))
    assert queue.images.tolist() == [3, 1, 2]
    assert queue.keys.tolist() == [[0, 1]] * 3


def test_the_student_starts_from_the_global_model() -> None:
    """With a learning rate too small to move anything, the next global model has the parameters of the previous one."""
    spec = _spec(reducer={"optimizer": {"name": "sgd", "learning_rate": 1e-30, "weight_decay": 0}})
    first = start(spec)
    updates = [(10, local_round(spec, first.broadcast, f"client-{i}").update) for i in range(3)]
    second = aggregate(spec, first.state, updates)
    for name in (name for name in first.state if name.endswith(("weight", "bias"))):
        torch.testing.assert_close(second.broadcast[name], first.state[name], rtol=0, atol=1e-20)
    assert second.metrics["distillation_loss"] > 0


def test_the_ensemble_does_not_depend_on_the_number_of_images_of_a_client() -> None:
    spec = _spec()
    first = start(spec)
    tensors = [local_round(spec, first.broadcast, f"client-{i}").update for i in range(3)]
    one, other = (aggregate(spec, first.state, list(zip(n, tensors, strict=True))) for n in ((1, 1, 1), (9, 2, 5)))
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


def test_distillation_teaches_similarities_whatever_the_clients_axes() -> None:
    """The teachers see the same pairs along different axes; the student learns the pairs."""
    spec = _spec(reducer={"num_epochs": 40, "temperature": 0.2}, data=AS_THEY_ARE)
    ctx, first = context(spec, 1), start(spec)
    pixels_ND = _public_values(spec).flatten(1)
    seen_ND = (pixels_ND - pixels_ND.mean(dim=0)).float()
    generator = torch.Generator().manual_seed(3)
    axes = [torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q for _ in range(3)]
    ensemble = Ensemble([pack(seen_ND @ rotation, "factored-f32") for rotation in axes], "factored-f32", 72)
    config, rows = spec.method.reducer, torch.arange(72)
    assert isinstance(config, DistillationConfig)
    target = ensemble.rows(rows, rows, 0.2)

    def divergence(weights: Tensors) -> float:
        modules = SimilarityDistillation(config, ensemble, weights).build(ctx)
        with torch.no_grad():
            z = modules["projector"](modules["encoder"](_public_values(spec).float()))
        found = Ensemble([pack(z, "factored-f32")], "factored-f32", 72).rows(rows, rows, 0.2)
        return float((target * (target / found).log()).sum(dim=1).mean())

    taught, metrics = run_distillation(SimilarityDistillation(config, ensemble, first.state), ctx)
    assert divergence(taught) < 0.5 * divergence(first.state)
    assert metrics.keys() == {"distillation_loss"}


def test_a_run_of_one_round_is_flesd_cc() -> None:
    spec = _spec(num_rounds=1)
    result = simulate(spec, shards(spec))
    assert [record.round_number for record in result.history] == [1]


# --- Supported and unsupported combinations -----------------------------------------------------------------------


@pytest.mark.full(but=1)
@pytest.mark.parametrize("host", ["fedsimclr", "fedmoco", "fedalignuniform"])
def test_other_objectives_can_be_distilled(host: str) -> None:
    spec = _spec(host)
    result = simulate(spec, shards(spec))
    assert {name.split(".")[0] for name in result.model} == {"encoder", "projector"}
    assert METHODS[host].bind(spec).plan.update[0].kind == "similarity"


@pytest.mark.parametrize("add_ons", [[], [{"name": "proximal"}]])
def test_flesds_objective_also_trains_with_federated_averaging(add_ons: list[dict[str, str]]) -> None:
    method = {"name": "flesd", "reducer": {"name": "mean", "weighting": "uniform"}, "add_ons": add_ons}
    spec = method_spec("flesd", method=method, public_data=None)
    result = simulate(spec, shards(spec))
    assert result.history[-1].clients["client-0"].keys() >= {"loss/contrastive"}


def test_public_images_can_be_passed_to_a_simulation() -> None:
    """FLESD's experiments make the first client's images public, and that client does not train."""
    spec = _spec(cohort={"clients": ["client-1", "client-2"], "min_clients": 2})
    everybody = shards(spec)
    first = everybody["client-0"].subset(np.arange(72))
    result = simulate(spec, everybody, public=first)
    assert set(result.history[0].clients) == {"client-1", "client-2"}
    assert any(not torch.equal(v, simulate(spec, everybody).model[n]) for n, v in result.model.items())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"public_data": None}, r"add a \[public_data\] section"),
        ({"public_data": {**PUBLIC, "num_images": 32}}, "needs more than 32 public images, and there are 32"),
        ({"public_data": {**PUBLIC, "num_images": 20}}, "needs more than 32 public images, and there are 20"),
        ({"reducer": {"batch_size": 33}}, "a batch must fit into the queue"),
        ({"reducer": {"skip": "every_epoch", "num_anchors": 71}}, "only fill its queue and never train"),
        ({"reducer": {"num_epochs": 1, "num_anchors": 71}}, "only fill its queue and never train"),
        (
            {"reducer": {"packing": "triangle-i8"}, "public_data": {**PUBLIC, "num_images": 50_000}},
            "1,249,975,000 pairs",
        ),
        ({"reducer": {"optimizer": {"schedule": "cosine"}}}, "must be constant"),
        ({"host": "fedbyol"}, "fedbyol shares more than these"),
        ({"host": "supervised"}, "supervised shares more than these"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        _spec(**changes)


@pytest.mark.parametrize("add_on", ["fedx", "scaffold"])
def test_add_ons_that_send_weights_are_refused(add_on: str) -> None:
    reducer = CONFIGS["flesd"]["reducer"]
    with pytest.raises(ValidationError, match=f"{add_on} must send weights"):
        method_spec("flesd", method={"name": "flesd", "reducer": reducer, "add_ons": [{"name": add_on}]})
