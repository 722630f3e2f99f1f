"""The probe over all sites: it equals the probe of all images in one place, and leaves out impossible sums."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors
from fedssl.data import ImageData
from fedssl.data.site_labels import own_labels, with_run_classes
from fedssl.engine import run_aggregation, run_local_round, start_run
from fedssl.engine.norm_bounding import TooFewUpdates
from fedssl.engine.secure_rounds import run_secure_round
from fedssl.errors import DataError, MethodError
from fedssl.evaluation import extract_features, ridge_path
from fedssl.evaluation.suite import load_encoder
from fedssl.methods import METHODS
from fedssl.methods.api import Update
from fedssl.methods.objectives.ridge_probe import (
    CROSS_ENTROPY,
    GRAM,
    HELD_OUT,
    MOMENT,
    PENALTIES,
    RIGHT,
    SCALE,
    Solutions,
    count_held_out,
)
from fedssl.methods.site_data import client_data, wants_site_labels, with_site_labels
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import context, method_spec, shards

WIDTH = 16  # of the encoder in method_spec
METHOD = METHODS["ridge-probe"]
_OWN_ABOVE_ALL = torch.stack([torch.full((10, 41), 2e6), torch.full((10, 41), 1e6)]).double()


def _spec(num_clients: int = 3, **method: Any) -> RunSpec:
    partition = {"dataset": "digits", "num_clients": num_clients, "alpha": 0.1, "max_images": 1200}
    cohort = {"min_clients": 2}
    return method_spec("ridge-probe", method={"name": "ridge-probe", **method}, partition=partition, cohort=cohort)


def _sites(num_sites: int) -> tuple[RunSpec, dict[str, ImageData]]:
    """Return sites with a Dirichlet alpha of 0.1, and one more that has images of only one class."""
    spec = _spec(num_sites, min_images=1)
    sites = dict(shards(spec))
    pooled = np.concatenate([each.labels for each in sites.values() if each.labels is not None])
    one = int(np.bincount(pooled).argmax())
    largest = max(sites, key=lambda name: int((sites[name].labels == one).sum()))
    labels = sites[largest].labels
    assert labels is not None
    sites["one-class"] = sites[largest].subset(np.flatnonzero(labels == one))
    sites[largest] = sites[largest].subset(np.flatnonzero(labels != one))
    return spec, {name: images for name, images in sites.items() if len(images) >= 3}


def _pooled(spec: RunSpec, sites: dict[str, ImageData], model: Tensors) -> tuple[Any, Any, Any, Any]:
    """Return h and one-hot labels of all training images in one place, and h and labels of all held-out ones."""
    parts: dict[bool, list[tuple[Any, Any]]] = {False: [], True: []}
    encoder = load_encoder(model, spec)
    for name in sorted(sites):
        held_out = client_data(sites[name], spec, name).held_out
        assert held_out is not None
        for wanted, found in parts.items():
            own = sites[name].subset(np.flatnonzero(held_out.numpy() == wanted))
            found.append((extract_features(encoder, own, spec.data).double().numpy(), own.labels))
    (h, labels), (tested, judged) = (
        (np.concatenate([h for h, _ in found]), np.concatenate([labels for _, labels in found]))
        for found in parts.values()
    )
    return h, np.eye(10)[labels], tested, judged


def _central(h: Any, y: Any, ridge: float) -> Any:
    """Return the least-squares weights with one row of sqrt(ridge) per representation, computed without any sums."""
    x = np.concatenate([h, np.ones((len(h), 1))], axis=1)
    rows = np.concatenate([math.sqrt(ridge) * np.eye(h.shape[1]), np.zeros((h.shape[1], 1))], axis=1)
    stacked = np.concatenate([y, np.zeros((h.shape[1], y.shape[1]))])
    return np.linalg.lstsq(np.concatenate([x, rows]), stacked, rcond=None)[0]


def _central_scale(scores: Any, judged: Any) -> tuple[float, float]:
    """Return the best of the 41 scales for all held-out images in one place, and its cross-entropy."""
    num_images, num_classes = scores.shape
    targets = (num_images * np.eye(num_classes)[judged] + 1) / (num_images + num_classes)
    found = []
    for scale in 10 ** np.linspace(-1, 3, 41):
        logits = scale * scores
        log_p = (
            logits
            - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
            - logits.max(1, keepdims=True)
        )
        found.append((float(-(targets * log_p).sum(axis=1).mean()), scale))
    cross_entropy, scale = min(found)
    return scale, cross_entropy


@pytest.mark.parametrize("num_sites", [2, 5, 20])
def test_the_run_gives_the_probe_of_all_images_in_one_place(num_sites: int) -> None:
    spec, sites = _sites(num_sites)
    result = simulate(spec, sites)
    h, y, tested, judged = _pooled(spec, sites, result.initial)
    penalties, solutions = result.model[PENALTIES], result.model["probe.solutions"].numpy()
    x = np.concatenate([h, np.ones((len(h), 1))], axis=1)
    assert penalties.tolist() == pytest.approx(ridge_path(torch.from_numpy(x.T @ x)), rel=1e-12)
    for penalty, found in zip(penalties.tolist(), solutions, strict=True):
        expected = _central(h, y, penalty)
        assert np.abs(found - expected).max() <= 1e-8 * max(1, np.abs(expected).max())
    right = [int(((tested @ each[:-1] + each[-1]).argmax(axis=1) == judged).sum()) for each in solutions]
    chosen = max(range(10), key=lambda number: (right[number], number))
    scale, cross_entropy = _central_scale(tested @ solutions[chosen][:-1] + solutions[chosen][-1], judged)
    assert result.model[SCALE].tolist() == pytest.approx([scale], rel=1e-12)
    weight, bias = solutions[chosen][:-1].T * scale, solutions[chosen][-1] * scale
    assert np.allclose(result.model["classifier.weight"].numpy(), weight, rtol=1e-6, atol=0)
    assert np.allclose(result.model["classifier.bias"].numpy(), bias, rtol=1e-6, atol=0)
    assert result.history[1].server == pytest.approx(
        {
            "ridge_penalty": float(penalties[chosen]),
            "held_out_accuracy": right[chosen] / len(judged),
            "held_out_cross_entropy": cross_entropy,
            "scale": scale,
        }
    )
    first = result.history[0].server
    assert first.keys() == {"ridge_penalty", "probe_images"}
    assert first["probe_images"] == len(h)


def test_the_encoder_does_not_change() -> None:
    spec = _spec()
    result = simulate(spec, shards(spec))
    encoder = [name for name in result.initial if name.startswith("encoder.")]
    assert encoder
    assert all(torch.equal(result.initial[name], result.model[name]) for name in encoder)
    plan = METHOD.bind(spec).plan
    assert {tensor.kind for tensor in plan.update} == {"probe-sums"}
    assert sorted(tensor.name for tensor in plan.frozen) == encoder


def test_secure_rounds_give_the_bits_of_fixed_point_sums() -> None:
    """Each client's sums are rounded to 2^-24: up to that, the weights are those of float64."""
    usual = _spec()
    fixed, secure = (
        RunSpec.model_validate({**usual.model_dump(), "aggregation": {"arithmetic": "fixed"}, **more})
        for more in ({}, {"secure_aggregation": {"min_cohort": 3, "collusion": 0}})
    )
    one, two, exact = (simulate(spec, shards(usual)) for spec in (fixed, secure, usual))
    assert all(torch.equal(one.model[name], two.model[name]) for name in one.model)
    for record, other, usual_record in zip(one.history, two.history, exact.history, strict=True):
        assert record.server.items() <= other.server.items()
        assert record.server == pytest.approx(usual_record.server, rel=1e-3)
    assert one.history[0].server["probe_images"] == exact.history[0].server["probe_images"]
    solutions, expected = one.model["probe.solutions"], exact.model["probe.solutions"]
    assert float((solutions - expected).abs().max() / expected.abs().max()) < 1e-3
    penalties = one.model[PENALTIES].tolist()
    assert penalties == pytest.approx(exact.model[PENALTIES].tolist(), rel=1e-6)


def test_impossible_sums_are_not_sent_in_a_secure_round() -> None:
    spec = RunSpec.model_validate(
        {
            **_spec(4).model_dump(),
            "aggregation": {"arithmetic": "fixed"},
            "secure_aggregation": {"min_cohort": 3, "collusion": 0},
        }
    )
    state, sent = _first_round(spec)
    update, size = sent["client-0"]
    broken = {**sent, "client-0": (HOSTILE["not symmetric"][0](update), size)}
    updates = [Update(name, size, lambda own=own: own) for name, (own, size) in broken.items()]  # type: ignore[misc]
    secure = run_secure_round(METHOD, state, state, updates, context(spec, 1))
    assert secure.rejected == ("client-0",)
    plain = spec.model_copy(update={"secure_aggregation": None})
    expected = _aggregate(plain, state, {name: own for name, own in sent.items() if name != "client-0"})
    assert all(torch.equal(secure.result.state[name], expected.state[name]) for name in expected.state)


@pytest.mark.full
def test_parallel_processes_give_the_same_bits() -> None:
    spec = _spec()
    one, two = (simulate(spec, shards(spec), jobs=jobs).model for jobs in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_unlabelled_images_are_left_out_of_the_sums() -> None:
    spec = _spec()
    images = shards(spec)["client-0"]
    whole = client_data(images, spec, "client-0")
    assert whole.labels is not None
    assert whole.held_out is not None
    unlabelled = whole.labels.clone()
    unlabelled[whole.held_out | (torch.arange(len(unlabelled)) < 20)] = -1
    broadcast = start_run(METHOD, context(spec, 0)).received
    sent = run_local_round(
        METHOD, broadcast, None, dataclasses.replace(whole, labels=unlabelled), context(spec, 1, "client-0")
    ).update
    num_classes = torch.bincount(unlabelled[(unlabelled >= 0) & ~whole.held_out], minlength=10)
    assert torch.equal(sent[MOMENT][-1], num_classes.double())


def test_several_labels_per_image_are_counted_separately() -> None:
    solutions = Solutions(width=2, num_classes=2)
    solutions.penalties[:2] = 1.0
    solutions.weights[0] = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    h_NH = torch.tensor([[0.5, 0.2], [0.4, 0.9], [0.1, 0.1]])
    found = count_held_out(h_NH, torch.tensor([[1, 0], [1, 1], [0, 0]]), solutions)
    assert found[HELD_OUT].tolist() == [6]
    assert found[RIGHT].tolist() == [5, 3, *[0] * 8]  # the second predicts no label; the others were not determined


def test_a_site_with_too_few_labelled_images_is_refused() -> None:
    spec = _spec()
    few = shards(spec)["client-0"].subset(np.arange(30))
    broadcast = start_run(METHOD, context(spec, 0)).received
    with pytest.raises(DataError, match=r"client-0 has \d+ labelled training images, and sums of fewer than 32 do not"):
        run_local_round(METHOD, broadcast, None, client_data(few, spec, "client-0"), context(spec, 1, "client-0"))
    unlabelled = dataclasses.replace(client_data(few, spec, "client-0"), labels=None)
    with pytest.raises(DataError, match="client-0 has no labels, which ridge-probe needs"):
        run_local_round(METHOD, broadcast, None, unlabelled, context(spec, 1, "client-0"))


def test_classes_of_a_site_that_the_run_does_not_have_are_reported() -> None:
    spec = _spec(classes=["0", "1"])
    with pytest.raises(DataError, match=r"the images of client-0, class .* is not a class of the run"):
        simulate(spec, shards(spec))


def test_representations_that_are_not_finite_end_the_round() -> None:
    spec = _spec()
    broadcast = start_run(METHOD, context(spec, 0)).received
    name = next(name for name in broadcast if name.startswith("encoder.") and name.endswith("weight"))
    broken = {**broadcast, name: torch.full_like(broadcast[name], math.inf)}
    with pytest.raises(MethodError, match="the run's encoder cannot be probed: the features must be finite"):
        run_local_round(
            METHOD, broken, None, client_data(shards(spec)["client-0"], spec, "client-0"), context(spec, 1, "client-0")
        )


def _first_round(spec: RunSpec) -> tuple[Tensors, dict[str, tuple[Tensors, int]]]:
    first = start_run(METHOD, context(spec, 0))
    found = {}
    for name, images in shards(spec).items():
        local = run_local_round(METHOD, first.received, None, client_data(images, spec, name), context(spec, 1, name))
        found[name] = (local.update, local.num_examples)
    return first.state, found


def _aggregate(spec: RunSpec, state: Tensors, sent: dict[str, tuple[Tensors, int]], number: int = 1) -> Any:
    updates = [Update(name, size, lambda own=own: own) for name, (own, size) in sent.items()]  # type: ignore[misc]
    return run_aggregation(METHOD, state, updates, context(spec, number))


def _set(name: str, where: Any, value: float) -> Callable[[Tensors], Tensors]:
    def change(sent: Tensors) -> Tensors:
        changed = sent[name].clone()
        changed[where] = value
        return {**sent, name: changed}

    return change


HOSTILE = {
    "not symmetric": (_set(GRAM, (0, 1), 1e6), "not symmetric"),
    "not finite": (_set(GRAM, (0, 0), math.nan), "not finite"),
    "too many images": (_set(GRAM, (-1, -1), 1e6), "claim 1,000,000 images, but there are only"),
    "fewer than no images": (_set(MOMENT, (-1, 0), -1.0), "fewer than 0 or more than all"),
    "too few images": (
        lambda sent: {name: torch.zeros_like(own) for name, own in sent.items()},
        "sums are of 0 images",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_sums_are_left_out_and_the_others_are_used(case: str) -> None:
    change, words = HOSTILE[case]
    spec = _spec()
    state, sent = _first_round(spec)
    update, size = sent["client-0"]
    result = _aggregate(spec, state, {**sent, "client-0": (change(update), size)})
    without = _aggregate(spec, state, {name: own for name, own in sent.items() if name != "client-0"})
    assert result.norms.rejected.keys() == {"client-0"}
    assert words in result.norms.rejected["client-0"]
    assert all(torch.equal(result.broadcast[name], without.broadcast[name]) for name in without.broadcast)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({RIGHT: torch.tensor([5, *[0] * 9]), HELD_OUT: torch.tensor([4])}, "right predictions of 4"),
        ({RIGHT: torch.tensor([-1, *[0] * 9])}, "right predictions of"),
        ({HELD_OUT: torch.tensor([10_000])}, "predictions of 10000, and at most"),
        ({CROSS_ENTROPY: torch.full((2, 10, 41), -1.0, dtype=torch.float64)}, "cross-entropies are not finite, or"),
        ({CROSS_ENTROPY: torch.zeros(2, 10, 41, dtype=torch.float64)}, "cross-entropies cannot be those of"),
        ({CROSS_ENTROPY: _OWN_ABOVE_ALL}, "cross-entropies cannot be those of"),
        ({GRAM: torch.eye(WIDTH + 1, dtype=torch.float64)}, "has sums in a round that only counts"),
    ],
)
def test_hostile_counts_are_left_out(changes: Tensors, words: str) -> None:
    spec = _spec()
    state, sent = _first_round(spec)
    second = _aggregate(spec, state, sent)
    counted = {}
    for name, images in shards(spec).items():
        local = run_local_round(METHOD, second.received, None, client_data(images, spec, name), context(spec, 2, name))
        counted[name] = (local.update, local.num_examples)
    update, size = counted["client-0"]
    result = _aggregate(spec, second.state, {**counted, "client-0": ({**update, **changes}, size)}, 2)
    assert words in result.norms.rejected["client-0"]
    assert result.norms.rejected.keys() == {"client-0"}


def test_a_round_of_only_hostile_sums_has_no_result() -> None:
    spec = _spec()
    state, sent = _first_round(spec)
    hostile = {name: (_set(GRAM, (0, 1), 1e6)(own), size) for name, (own, size) in sent.items()}
    with pytest.raises(TooFewUpdates, match="not symmetric"):
        _aggregate(spec, state, hostile)


def test_labels_of_one_class_give_no_classifier() -> None:
    spec = _spec(min_images=1)
    sites = {}
    for name, images in shards(spec).items():
        assert images.labels is not None
        sites[name] = dataclasses.replace(images, labels=np.zeros_like(images.labels))
    with pytest.raises(MethodError, match=r"the labels of the .* images do not differ"):
        simulate(spec, sites)


@pytest.mark.parametrize(
    "method",
    [
        {"add_ons": [{"name": "proximal"}]},
        {"merge": {"name": "local"}},
        {"reducer": {"name": "median"}},
    ],
)
def test_parts_that_train_a_network_are_refused(method: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="ridge-probe trains no network: leave method"):
        _spec(**method)


def test_an_optimiser_of_the_coordinator_is_refused() -> None:
    with pytest.raises(ValidationError, match="ridge-probe averages none; leave the optimiser out"):
        method_spec("ridge-probe", aggregation={"server_optimizer": {"name": "fedavgm", "learning_rate": 1}})


def test_a_class_named_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="names a class twice"):
        _spec(classes=["a", "a"])


def test_a_patients_images_are_either_all_training_or_all_held_out() -> None:
    spec = _spec()
    images = shards(spec)["client-0"]
    labels = with_run_classes(own_labels(images, "here"), [str(n) for n in range(10)], multi_label=False)
    groups = np.arange(len(images)) // 4
    data = with_site_labels(
        torch.from_numpy(images.images), dataclasses.replace(labels, groups=groups), spec, "client-0"
    )
    assert data.held_out is not None
    assert data.held_out.any()
    sides = [set(groups[data.held_out.numpy() == side].tolist()) for side in (False, True)]
    assert not sides[0] & sides[1]


def test_other_methods_use_the_labels_of_the_data_set() -> None:
    spec = method_spec("supervised")
    assert wants_site_labels(spec) is None
    assert client_data(shards(spec)["client-0"], spec, "client-0").held_out is None
