"""FedX: its four losses from the equations, its teacher, its ablations, and the methods that it can be added to."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.composition.modules import load_modules
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import CONFIGS, SECTIONS, method_spec, methods_of_this_run, shards
from support.rounds import Training, local_round, start, training

Matrix = np.ndarray[Any, Any]

ALL = {"nt_xent", "local_relational", "global_contrastive", "global_relational"}
LOCAL_ONLY: dict[str, Any] = {"global_contrastive": 0, "global_relational": 0}
HOSTS = (
    "fedalignuniform",
    "fedbarlow",
    "fedbyol",
    "fedca",
    "fedmoco",
    "fedprotocl",
    "fedrlc",
    "fedsimsiam",
    "fedu",
    "fedvicreg",
    "orchestra",
)


def _spec(host: str = "fedx", *others: dict[str, Any], **fedx: Any) -> RunSpec:
    section = {**CONFIGS.get(host, {}), **SECTIONS.get(host, {}).get("method", {})}
    preset = [{"name": "crossed_kl", "num_centers": 4}] if host == "fedrlc" else []
    add_ons = [*preset, {"name": "fedx", **fedx}, *others]
    return method_spec(host, method={"name": host, **section, "add_ons": add_ons})


def _drifted(broadcast: Tensors) -> Tensors:
    """Return other weights of the same shapes: a global model that differs from the client's."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: value
        if "running" in name or "num_batches" in name
        else value + 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in broadcast.items()
    }


def _with_a_teacher_of_its_own(spec: RunSpec) -> Training:
    client = training(spec, broadcast=_drifted(start(spec).broadcast))
    load_modules(client.modules, ("encoder", "projector", "fedx_predictor"), start(spec).broadcast, "test")
    return client


def _unit(z: Matrix) -> Matrix:
    unit: Matrix = z / np.linalg.norm(z, axis=1, keepdims=True)
    return unit


def _softmax(scores: Matrix) -> Matrix:
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    rows: Matrix = e / e.sum(axis=1, keepdims=True)
    return rows


def _nt_xent(a: Matrix, b: Matrix, temperature: float) -> float:
    """Compute Eq. 2, anchor by anchor: 2n anchors, without the anchor itself, with the positive in the denominator."""
    z, n = _unit(np.concatenate([a, b])), len(a)
    terms = []
    for i in range(2 * n):
        scores = {k: z[i] @ z[k] / temperature for k in range(2 * n) if k != i}
        terms.append(np.log(sum(np.exp(s) for s in scores.values())) - scores[(i + n) % (2 * n)])
    return float(np.mean(terms))


def _relational(a: Matrix, b: Matrix, references: Matrix, temperature: float, variant: str) -> float:
    """Compute Eq. 6 and 7, or Eq. 10 and 11."""
    r1, r2 = (_softmax(_unit(z) @ _unit(references).T / temperature) for z in (a, b))
    m = (r1 + r2) / 2

    def kl(p: Matrix, q: Matrix) -> float:
        return float((p * np.log(p / q)).sum(axis=1).mean())

    return (kl(m, r1) + kl(m, r2)) / 2 if variant == "reference" else (kl(r1, m) + kl(r2, m)) / 2


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_the_four_losses_are_those_of_the_equations(variant: str) -> None:
    client = _with_a_teacher_of_its_own(_spec(rel_kl=variant, temperature=0.2, global_relational=3.0))
    batch = client.batch()
    values = client.values(batch)
    modules = client.modules
    with torch.no_grad():
        streams = torch.cat([*batch.views, batch.extra["references"]])
        z = modules["projector"](modules["encoder"](streams))  # one batch: BatchNorm is shared by all three
        z1, z2, z_r = (part.double().numpy() for part in z.chunk(3))
        p1, p2 = (part.double().numpy() for part in modules["fedx_predictor"](z).chunk(3)[:2])
        teacher = client.algorithm.build(client.ctx).eval()
        load_modules(teacher, ("encoder", "projector"), client.broadcast, "test")
        _, g2, g_r = (part.double().numpy() for part in teacher["projector"](teacher["encoder"](streams)).chunk(3))
    assert values["nt_xent"] == pytest.approx(_nt_xent(z1, z2, 0.1), rel=1e-4)
    assert values["local_relational"] == pytest.approx(_relational(z1, z2, z_r, 0.2, variant), rel=1e-3)
    assert values["global_contrastive"] == pytest.approx(_nt_xent(p1, g2, 0.2), rel=1e-4)
    assert values["global_relational"] == pytest.approx(3 * _relational(p1, p2, g_r, 0.2, variant), rel=1e-3)


def _printed_contrast(local: Matrix, teacher: Matrix, temperature: float) -> float:
    """Compute Eq. 9 as printed, anchor by anchor: local anchors, and no positive in the denominator."""
    p, g, terms = _unit(local), _unit(teacher), []
    for i in range(len(p)):
        others = [z[k] for z in (p, g) for k in range(len(p)) if k != i]
        terms.append(np.log(sum(np.exp(p[i] @ z / temperature) for z in others)) - p[i] @ g[i] / temperature)
    return float(np.mean(terms))


def test_the_papers_variant_of_the_global_contrast_is_equation_9_as_printed() -> None:
    client = _with_a_teacher_of_its_own(_spec(variant="paper", temperature=0.2, global_contrastive=3.0))
    batch = client.batch()
    values, modules = client.values(batch), client.modules
    with torch.no_grad():
        z = modules["projector"](modules["encoder"](torch.cat([*batch.views, batch.extra["references"]])))
        p1 = modules["fedx_predictor"](z).chunk(3)[0].double().numpy()
        teacher = client.algorithm.build(client.ctx).eval()
        load_modules(teacher, ("encoder", "projector"), client.broadcast, "test")
        g2 = teacher["projector"](teacher["encoder"](batch.views[1])).double().numpy()
    assert values["global_contrastive"] == pytest.approx(3 * _printed_contrast(p1, g2, 0.2), rel=1e-4)
    reference = _with_a_teacher_of_its_own(_spec(temperature=0.2, global_contrastive=3.0)).values(batch)
    assert abs(values["global_contrastive"] - reference["global_contrastive"]) > 0.01
    others = ALL - {"global_contrastive"}
    assert {name: values[name] for name in others} == {name: reference[name] for name in others}


@pytest.mark.parametrize("host", ["fedbyol", "fedsimsiam"])
@pytest.mark.parametrize("local_contrastive", [1.0, 0.0])
def test_relations_of_predictions_follow_equation_5(host: str, local_contrastive: float) -> None:
    client = training(_spec(host, relational="predictions", temperature=0.2, local_contrastive=local_contrastive))
    batch = client.batch()
    values, modules = client.values(batch), client.modules
    with torch.no_grad():  # the views and the random images pass one after another
        streams = (*batch.views, batch.extra["references"])
        embedded = [modules["projector"](modules["encoder"](images)) for images in streams]
        predicted = [modules["predictor"](z) for z in embedded]
    q1, q2, q_r = (part.double().numpy() for part in predicted)
    assert values["local_relational"] == pytest.approx(_relational(q1, q2, q_r, 0.2, "reference"), rel=1e-3)
    z1, z2, z_r = (part.double().numpy() for part in embedded)
    assert values["local_relational"] != pytest.approx(_relational(z1, z2, z_r, 0.2, "reference"), rel=1e-2)
    projections = training(_spec(host, temperature=0.2)).values(batch)
    assert projections["local_relational"] == pytest.approx(_relational(z1, z2, z_r, 0.2, "reference"), rel=1e-3)


def test_specs_with_the_variants_of_the_authors_code_are_serialised_as_before() -> None:
    (add_on,) = _spec().method.model_dump(mode="json")["add_ons"]
    assert add_on.keys().isdisjoint({"variant", "relational"})
    (printed,) = _spec("fedbyol", variant="paper", relational="predictions").method.model_dump(mode="json")["add_ons"]
    assert (printed["variant"], printed["relational"]) == ("paper", "predictions")


def test_relational_losses_are_zero_for_coinciding_views() -> None:
    client = training(_spec())
    batch = client.batch()
    same = type(batch)((batch.views[0], batch.views[0]), batch.indices, batch.labels, batch.extra)
    values = client.values(same)
    assert values["local_relational"] == pytest.approx(0, abs=1e-6)
    assert values["global_relational"] == pytest.approx(0, abs=1e-6)


def test_references_are_other_images_in_an_independent_order() -> None:
    client = training(_spec())
    plain = training(_spec(local_relational=0, global_relational=0))
    batches = list(client.algorithm.batches(client.data, 0, client.ctx))
    assert all(batch.extra["references"].shape == batch.views[0].shape for batch in batches)
    assert not plain.batch().extra
    torch.testing.assert_close(plain.batch().views[0], client.batch().views[0])


def test_the_teacher_is_the_broadcast_in_evaluation_mode_and_is_not_trained() -> None:
    client = _with_a_teacher_of_its_own(_spec())
    teacher = client.modules["fedx_teacher"]
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    assert all(torch.equal(value, client.broadcast[name]) for name, value in before.items())
    assert not any(module.training for module in teacher.modules())
    losses = client.losses(client.batch())
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    for name in ("encoder", "projector", "fedx_predictor"):
        assert all(parameter.grad is not None for parameter in client.modules[name].parameters())


def test_the_teacher_is_the_global_model_whichever_merge_rule_is_used() -> None:
    add_ons = [{"name": "fedx"}]
    spec = method_spec("fedbyol", method={"name": "fedbyol", "add_ons": add_ons, "merge": {"name": "ema", "tau": 0.7}})
    received = start(spec).broadcast
    first = local_round(spec, received)
    client = training(spec, number=2, broadcast=_drifted(received), state=first.state)
    teacher = client.modules["fedx_teacher"].state_dict()
    assert all(torch.equal(value, client.broadcast[name]) for name, value in teacher.items())
    name = "encoder.blocks.0.conv.weight"
    assert not torch.equal(client.modules.state_dict()[name], client.broadcast[name])


@pytest.mark.parametrize(
    ("ablation", "terms", "has_predictor", "has_references"),
    [
        ({}, ALL, True, True),
        ({"local_contrastive": 0}, ALL - {"nt_xent"}, True, True),
        ({"local_relational": 0}, ALL - {"local_relational"}, True, True),
        ({"global_contrastive": 0}, ALL - {"global_contrastive"}, True, True),
        ({"global_relational": 0}, ALL - {"global_relational"}, True, True),
        ({"local_relational": 0, "global_relational": 0}, {"nt_xent", "global_contrastive"}, True, False),
        (LOCAL_ONLY, {"nt_xent", "local_relational"}, False, True),
    ],
)
def test_ablations_leave_out_their_terms_and_the_networks_that_only_these_need(
    *, ablation: dict[str, Any], terms: set[str], has_predictor: bool, has_references: bool
) -> None:
    client = training(_spec(**ablation))
    batch = client.batch()
    full = training(_spec()).values(training(_spec()).batch())
    values = client.values(batch)
    assert values.keys() == terms
    if has_references:  # the same batch, so the other terms do not change
        assert values == {name: pytest.approx(full[name], rel=1e-5) for name in terms}
    assert ("references" in batch.extra) == has_references
    assert any(name.startswith("fedx_predictor.") for name in client.broadcast) == has_predictor
    assert ("fedx_teacher" in client.modules) == has_predictor


def test_weights_multiply_their_terms() -> None:
    doubled: dict[str, Any] = dict.fromkeys(("local_contrastive", *(ALL - {"nt_xent"})), 2.0)
    one, two = training(_spec()), training(_spec(**doubled))
    ones, twos = one.values(one.batch()), two.values(two.batch())
    assert twos == {name: pytest.approx(2 * value) for name, value in ones.items()}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("other", [{"name": "proximal", "mu": 0.01}, {"name": "scaffold"}])
def test_local_distillation_trains_with_proximal_or_scaffold_as_in_table_2(other: dict[str, Any]) -> None:
    spec = _spec("fedx", other, **LOCAL_ONLY)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())
    plain = simulate(_spec(**LOCAL_ONLY), shards(spec))
    assert any(not torch.equal(result.model[name], value) for name, value in plain.model.items())


def test_local_distillation_works_without_a_federation() -> None:
    add_ons = [{"name": "fedx", **LOCAL_ONLY}]
    alone = {"name": "fedsimclr", "add_ons": add_ons, "merge": {"name": "local"}, "reducer": {"name": "none"}}
    spec = method_spec("fedsimclr", method=alone)
    assert local_round(spec, start(spec).broadcast).update == {}


@pytest.mark.parametrize("host", methods_of_this_run(HOSTS, ["fedmoco"]))
def test_fedx_can_be_added_to_every_host_and_changes_its_result(host: str) -> None:
    spec = _spec(host)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())
    assert any(name.startswith("fedx_predictor.") for name in result.model)
    last = next(iter(result.history[-1].clients.values()))
    assert {"loss/local_relational", "loss/global_contrastive", "loss/global_relational"} < last.keys()
    without = spec.method.model_copy(update={"add_ons": spec.method.add_ons[:-1]})
    plain = simulate(spec.model_copy(update={"method": without}), shards(spec))
    assert not torch.equal(plain.model["encoder.blocks.0.conv.weight"], result.model["encoder.blocks.0.conv.weight"])


def test_byols_and_fedxs_predictors_are_separate() -> None:
    client = training(_spec("fedbyol"))
    mine, theirs = client.modules["fedx_predictor"], client.modules["predictor"]
    assert not any(isinstance(module, nn.BatchNorm1d) for module in mine.modules())  # as in FedX's code
    assert any(isinstance(module, nn.BatchNorm1d) for module in theirs.modules())
    assert {id(p) for p in mine.parameters()}.isdisjoint(id(p) for p in theirs.parameters())


def test_the_predictor_can_be_configured() -> None:
    client = training(_spec(predictor={"hidden_dims": [5], "batch_norm": True}))
    assert [tuple(p.shape) for p in client.modules["fedx_predictor"].parameters() if p.ndim == 2] == [(5, 8), (8, 5)]


def test_dapu_applies_only_to_fedus_own_predictor() -> None:
    spec = _spec("fedu")
    merge = spec.method.merge.model_copy(update={"mu": 0.0})
    spec = spec.model_copy(update={"method": spec.method.model_copy(update={"merge": merge})})
    received = start(spec).broadcast
    first = local_round(spec, received)
    client = training(spec, number=2, broadcast=_drifted(received), state=first.state)
    now = client.modules.state_dict()
    theirs = [
        torch.equal(now[name], value) for name, value in client.broadcast.items() if name.startswith("predictor.")
    ]
    mine = [torch.equal(now[n], value) for n, value in client.broadcast.items() if n.startswith("fedx_predictor.")]
    assert not all(theirs)
    assert mine
    assert all(mine)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": {"name": "supervised", "add_ons": [{"name": "fedx"}]}}, "two views of an image"),
        ({"method": {"name": "fedx"}, "model": {"projector": None}}, "describe model.projector"),
        ({"method": {"name": "fedx", "add_ons": []}}, "is fedsimclr: use fedsimclr, or add fedx to method.add_ons"),
        (
            {"method": {"name": "fedsimclr", "add_ons": [{"name": "fedx", **dict.fromkeys(
                ("local_contrastive", "local_relational", "global_contrastive", "global_relational"), 0)}]}},
            "so there is no loss",
        ),
        (
            {"method": {"name": "fedsimclr", "add_ons": [{"name": "fedx"}, {"name": "hsd", "variant": "mask"}]}},
            "choose one",
        ),
        (
            {"method": {"name": "fedsimclr", "add_ons": [{"name": "fedx", "relational": "predictions"}]}},
            'fedsimclr has none: set "projections"',
        ),
        (
            {"method": {"name": "fedx", "merge": {"name": "local"}, "reducer": {"name": "none"}}},
            "there is none: set global_contrastive",
        ),
    ],
)  # fmt: skip
def test_invalid_combinations_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        method_spec("fedx", **changes)
