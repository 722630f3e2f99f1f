"""The sites' classifier: compared with steps in float64, started from the exact probe, and with few labels."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors, load_tensors, save_tensors
from fedssl.data import ImageData
from fedssl.data.site_labels import SiteLabels, with_run_classes
from fedssl.engine import run_local_round, start_run
from fedssl.errors import DataError, SpecError
from fedssl.evaluation import extract_features
from fedssl.evaluation.suite import load_encoder
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData
from fedssl.methods.site_data import client_data, with_site_labels
from fedssl.models.classifier import BIAS, CLASSES, WEIGHT, classes_digest
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import context, method_spec, shards

METHOD = METHODS["classifier"]
RATE = 10.0  # large, so that one step exceeds the float32 rounding of weights around 100
NONE = {"crop": "none", "flip": 0.0, "jitter": 0.0, "greyscale": 0.0}
ONE_STEP = {
    "batch_size": 4096,
    "local_epochs": 1,
    "optimizer": {"name": "sgd", "learning_rate": RATE, "momentum": 0.0, "weight_decay": 0.0},
}


def _spec(initial: Path | None = None, **method: Any) -> RunSpec:
    model: dict[str, Any] = {"encoder": {"widths": [8, 16]}}
    if initial is not None:
        model["initial"] = {"weights": str(initial)}
    return method_spec(
        "classifier",
        method={"name": "classifier", **method},
        model=model,
        data={"channels": 1, "image_size": 8, "augmentation": NONE},
        training=ONE_STEP,
        num_rounds=1,
    )


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the weights of a ridge-probe run on the same sites, whose encoder has random weights."""
    spec = method_spec("ridge-probe", model={"encoder": {"widths": [8, 16]}})
    path = tmp_path_factory.mktemp("probe") / "model.safetensors"
    save_tensors(simulate(spec, shards(spec)).model, path)
    return path


def _trained(spec: RunSpec, name: str, model: Tensors) -> tuple[Any, Any, Any, Any]:
    """Return h and the labels of a site's training images, and of its held-out ones, in float64."""
    data = client_data(shards(spec)[name], spec, name)
    assert data.held_out is not None
    encoder, found = load_encoder(model, spec), []
    for wanted in (False, True):
        own = shards(spec)[name].subset(np.flatnonzero(data.held_out.numpy() == wanted))
        found += [extract_features(encoder, own, spec.data).double().numpy(), own.labels]
    return found[0], found[1], found[2], found[3]


def _stepped(weight: Any, bias: Any, h: Any, labels: Any) -> tuple[Any, Any]:
    """Return the classifier after one step of gradient descent on the cross-entropy of all images."""
    logits = h @ weight.T + bias
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    error = (p - np.eye(len(bias))[labels]) / len(h)
    return weight - RATE * error.T @ h, bias - RATE * error.sum(axis=0)


def test_a_round_is_the_mean_of_the_sites_steps_from_the_exact_probe(probe: Path) -> None:
    """Steps are weighted by the number of images that a site trained on. The encoder is neither changed nor sent."""
    spec = _spec(probe)
    result = simulate(spec, shards(spec))
    assert f"classifier of {len(spec.method.classes)} classes" in result.loaded  # type: ignore[attr-defined]
    weight, bias = (result.initial[name].double().numpy() for name in (WEIGHT, BIAS))
    assert weight.any()
    sizes, weights, biases = [], [], []
    for name in shards(spec):
        h, labels, tested, judged = _trained(spec, name, result.initial)
        stepped = _stepped(weight, bias, h, labels)
        sizes.append(len(h))
        weights.append(stepped[0])
        biases.append(stepped[1])
        accuracy = float(((tested @ weight.T + bias).argmax(axis=1) == judged).mean())
        assert result.history[0].clients[name]["held_out_accuracy"] == pytest.approx(accuracy)
        assert result.history[0].num_examples[name] == len(h)
    expected = np.average(weights, axis=0, weights=sizes), np.average(biases, axis=0, weights=sizes)
    moved = expected[0] - weight, expected[1] - bias
    assert min(np.abs(each).max() for each in moved) > 1e-2
    assert np.allclose(result.model[WEIGHT].double().numpy() - weight, moved[0], rtol=1e-3, atol=1e-4)
    assert np.allclose(result.model[BIAS].double().numpy() - bias, moved[1], rtol=1e-3, atol=1e-4)
    plan = METHOD.bind(spec).plan
    assert {tensor.name for tensor in plan.update} == {WEIGHT, BIAS}
    kept = [name for name in result.initial if name not in (WEIGHT, BIAS)]
    assert all(torch.equal(result.initial[name], result.model[name]) for name in kept)


def test_training_starts_from_the_probe_or_from_zeros(probe: Path) -> None:
    """By default the classifier starts as the probe, and with `zero` as zeros. The encoder is the same in both."""
    given, zero = (
        start_run(METHOD, context(_spec(probe, start=start), 0), initial=load_tensors(probe))
        for start in (None, "zero")
    )
    assert torch.equal(given.state[WEIGHT], load_tensors(probe)[WEIGHT])
    assert not zero.state[WEIGHT].any()
    assert all(torch.equal(given.state[name], zero.state[name]) for name in given.state if name.startswith("encoder."))


def test_the_encoder_has_its_own_learning_rate() -> None:
    """With a tenth of its rate, a step of SGD moves the encoder a tenth as far, and the classifier as far as before."""
    moved = {}
    for rate in (RATE, RATE / 10):
        spec = _spec(encoder_learning_rate=rate)
        # With a classifier of zeros the encoder would have no gradient.
        first = start_run(METHOD, context(spec, 0)).received
        generator = torch.Generator().manual_seed(0)
        broadcast = {**first, WEIGHT: torch.randn(first[WEIGHT].shape, generator=generator)}
        data = client_data(shards(spec)["client-0"], spec, "client-0")
        update = run_local_round(METHOD, broadcast, None, data, context(spec, 1, "client-0")).update
        moved[rate] = {name: update[name] - broadcast[name] for name in update if update[name].is_floating_point()}
    fast, slow = moved[RATE], moved[RATE / 10]
    weights = [name for name in fast if name.endswith((".weight", ".bias"))]
    assert any(name.startswith("encoder.") for name in weights)
    for name in weights:
        factor = 10 if name.startswith("encoder.") else 1
        assert fast[name].any()
        torch.testing.assert_close(factor * slow[name], fast[name], rtol=2e-2, atol=1e-6)


def test_training_the_whole_network_improves_the_held_out_accuracy() -> None:
    training = {"batch_size": 16, "local_epochs": 2, "optimizer": {"name": "adam", "learning_rate": 0.05}}
    method = {"name": "classifier", "encoder_learning_rate": 0.005}
    spec = method_spec("classifier", method=method, num_rounds=5, training=training)
    result = simulate(spec, shards(spec))
    losses = [record.loss for record in result.history]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < 0.9 * losses[0]
    first, last = (
        np.mean([each["held_out_accuracy"] for each in result.history[at].clients.values()]) for at in (0, -1)
    )
    assert last > first + 0.2


@pytest.mark.full
def test_parallel_processes_give_the_same_bits() -> None:
    spec = method_spec("classifier", num_rounds=1)
    one, two = (simulate(spec, shards(spec), jobs=jobs) for jobs in (1, 2))
    assert all(torch.equal(one.model[name], two.model[name]) for name in one.model)
    assert one.history[0].clients == two.history[0].clients


def _few(images: ImageData, spec: RunSpec, name: str, num_labelled: int) -> ClientData:
    """Return a site's images. Only the first are labelled, and all of these are used for training."""
    assert images.labels is not None
    labels = images.labels.copy()
    labels[num_labelled:] = -1
    fixed = np.zeros(len(labels), np.bool_)
    own = SiteLabels(labels, tuple(map(str, range(10))), tuple(map(str, range(10))), fixed_test=fixed)
    return with_site_labels(torch.from_numpy(images.images), own, spec, name)


def test_a_site_with_three_labels_counts_as_three_examples() -> None:
    spec = _spec()
    images = shards(spec)["client-0"]
    broadcast = start_run(METHOD, context(spec, 0)).received
    data = _few(images, spec, "client-0", 3)
    result = run_local_round(METHOD, broadcast, None, data, context(spec, 1, "client-0"))
    assert result.num_examples == 3
    assert "held_out_accuracy" not in result.metrics
    assert images.labels is not None
    h = extract_features(load_encoder(broadcast, spec), images.subset(np.arange(3)), spec.data).double().numpy()
    expected = _stepped(np.zeros((10, 16)), np.zeros(10), h, images.labels[:3])
    assert np.allclose(result.update[WEIGHT].numpy(), expected[0], rtol=1e-4, atol=1e-6)
    assert np.allclose(result.update[BIAS].numpy(), expected[1], rtol=1e-4, atol=1e-6)


def test_a_site_without_labels_is_refused() -> None:
    spec = _spec()
    broadcast = start_run(METHOD, context(spec, 0)).received
    ctx = context(spec, 1, "client-0")
    whole = client_data(shards(spec)["client-0"], spec, "client-0")
    with pytest.raises(DataError, match="client-0 has no labels, which classifier needs"):
        run_local_round(METHOD, broadcast, None, dataclasses.replace(whole, labels=None), ctx)
    with pytest.raises(DataError, match="client-0 has no labelled image to train on"):
        run_local_round(METHOD, broadcast, None, _few(shards(spec)["client-0"], spec, "client-0", 0), ctx)


def test_several_labels_per_image_are_trained_as_binary_labels() -> None:
    spec = _spec(multi_label=True, classes=["odd", "large"])
    images = shards(spec)["client-0"]
    assert images.labels is not None
    presence = np.stack([images.labels % 2, images.labels >= 5], axis=1).astype(np.int64)
    own = SiteLabels(presence, ("odd", "large"), ("a", "b"), fixed_test=np.zeros(len(presence), np.bool_))
    data = with_site_labels(torch.from_numpy(images.images), own, spec, "client-0")
    broadcast = start_run(METHOD, context(spec, 0)).received
    found = run_local_round(METHOD, broadcast, None, data, context(spec, 1, "client-0")).update
    h = extract_features(load_encoder(broadcast, spec), images, spec.data).double().numpy()
    error = (0.5 - presence) / presence.size  # every probability is 1/2
    assert np.allclose(found[WEIGHT].numpy(), -RATE * error.T @ h, rtol=1e-4, atol=1e-6)
    assert np.allclose(found[BIAS].numpy(), -RATE * error.sum(axis=0), rtol=1e-4, atol=1e-7)


def test_a_class_without_a_column_of_labels_is_refused() -> None:
    spec = _spec(multi_label=True, classes=["odd", "large"])
    images = shards(spec)["client-0"]
    assert images.labels is not None
    odd = SiteLabels(images.labels[:, None] % 2, ("odd",), ("labels.csv, line 1",))
    own = with_run_classes(odd, ("odd", "large"), multi_label=True)
    with pytest.raises(DataError, match="table of labels has no column of large"):
        with_site_labels(torch.from_numpy(images.images), own, spec, "client-0")


def test_a_classifier_of_other_classes_is_refused_as_a_start(probe: Path) -> None:
    tensors, swapped = load_tensors(probe), ["1", "0", *map(str, range(2, 10))]
    for method in ({"classes": swapped}, {"classes": swapped, "start": "given"}):
        with pytest.raises(SpecError, match=r"has other classes than method\.classes, or the same in another order"):
            start_run(METHOD, context(_spec(probe, **method), 0), initial=tensors)
    assert (
        not start_run(METHOD, context(_spec(probe, classes=swapped, start="zero"), 0), initial=tensors)
        .state[WEIGHT]
        .any()
    )
    encoder = {name: each for name, each in tensors.items() if name.startswith("encoder.")}
    with pytest.raises(SpecError, match="hold no classifier of named classes: give a run of ridge-probe"):
        start_run(METHOD, context(_spec(probe, start="given"), 0), initial=encoder)
    assert not start_run(METHOD, context(_spec(probe), 0), initial=encoder).state[WEIGHT].any()


def test_the_digest_depends_on_the_classes_their_order_and_multi_label() -> None:
    digest = classes_digest(["a", "b"], multi_label=False)
    assert digest.tolist() == classes_digest(("a", "b"), multi_label=False).tolist()
    others = (["b", "a"], False), (["a", "b"], True), (['a","b'], False)
    assert all(digest.tolist() != classes_digest(names, multi_label=several).tolist() for names, several in others)
    spec = _spec()
    assert torch.equal(
        start_run(METHOD, context(spec, 0)).state[CLASSES],
        classes_digest(spec.method.classes, multi_label=False),  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize(
    ("method", "model", "words"),
    [
        ({"start": "given"}, {}, "set model.initial to a run of ridge-probe"),
        ({}, {"trainable": ["blocks.1.*"]}, "set method.encoder_learning_rate, or leave"),
        ({"add_ons": [{"name": "scaffold"}]}, {}, "cannot be combined with the add-on scaffold"),
        ({"merge": {"name": "local"}}, {}, "leave method.merge out"),
        ({"reducer": {"name": "ldawa"}}, {}, "no reducer ldawa: choose mean or a robust one"),
        ({"classes": ["a", "a"]}, {}, "names a class twice"),
    ],
)
def test_invalid_combinations_are_refused(method: dict[str, Any], model: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        method_spec(
            "classifier", method={"name": "classifier", **method}, model={"encoder": {"widths": [8, 16]}, **model}
        )


def test_a_personal_classifier_follows_its_own_loss_and_is_pulled_to_the_shared_one() -> None:
    """Two rounds of one step are computed in float64. The shared classifier is the same as without personal ones."""
    pull, spec = 0.05, _spec(personal_pull=0.05).model_copy(update={"num_rounds": 2})
    found, plain = simulate(spec, shards(spec)), simulate(_spec().model_copy(update={"num_rounds": 2}), shards(spec))
    assert all(torch.equal(found.model[name], plain.model[name]) for name in (WEIGHT, BIAS))
    assert METHOD.bind(spec).plan == METHOD.bind(_spec()).plan
    first = simulate(_spec(personal_pull=pull), shards(spec))
    for name in shards(spec):
        h, labels, *_ = _trained(spec, name, found.model)
        received = [np.zeros((10, h.shape[1])), np.zeros(10)]
        own = _stepped(*received, h, labels)
        assert np.allclose(first.client_states[name]["personal.weight"], own[0], rtol=1e-4, atol=1e-4)
        received = [first.model[WEIGHT].double().numpy(), first.model[BIAS].double().numpy()]
        stepped = _stepped(*own, h, labels)
        expected = [new - RATE * pull * (old - base) for new, old, base in zip(stepped, own, received, strict=True)]
        state = found.client_states[name]
        assert sorted(state) == ["personal.bias", "personal.weight"]
        assert np.allclose(state["personal.weight"], expected[0], rtol=1e-4, atol=1e-3)
        assert np.allclose(state["personal.bias"], expected[1], rtol=1e-4, atol=1e-3)
        metrics = found.history[-1].clients[name]
        assert {"held_out_accuracy", "personal_held_out_accuracy"} <= metrics.keys()


def test_sites_evaluate_their_personal_classifiers_and_those_of_others() -> None:
    """One of three sites has images of two classes and one has images of one class: each evaluates what it can."""
    sites = {
        "classes": list("0123456789"), "min_count": 1, "heads": ["classifier", "personal"], "cross_site": "personal",
    }  # fmt: skip
    evaluation = {"at": "sites", "measures": ["knn"], "every": 1, "sites": sites}
    document = _spec(personal_pull=0.0).model_dump() | {"evaluation": evaluation, "cohort": {"min_clients": 3}}
    spec = RunSpec.model_validate(document)
    whole = shards(spec)
    first = next(iter(whole.values()))
    data = {
        "a": first,
        "b": first.subset(np.flatnonzero(first.labels < 2)),
        "c": first.subset(np.flatnonzero(first.labels == 1)),
    }
    found = simulate(spec, data)
    for number in (0, 1):
        own, cross = found.site_evaluations[number], found.cross_site[number]
        assert "a classifier needs 2" in str(own["c"])
        assert own.keys() - {"c"} == cross.keys() == {"a", "b"}
        assert {name: set(judges) for name, judges in cross.items()} == {"a": {"b"}, "b": {"a"}}
        assert set(own["a"].measures) == {"knn", "classifier", "personal"}
    assert found.site_evaluations[0]["b"].measures["classifier"] == found.site_evaluations[0]["b"].measures["personal"]
    at_a = found.cross_site[1]["b"]["a"].measures["personal"].confusion
    assert all(not any(row[2:]) for row in at_a)  # the classifier of b has two classes
    sent = found.cross_site[1]["a"]["b"].measures["personal"]
    assert sum(map(sum, sent.confusion)) == found.site_evaluations[1]["b"].num_test


@pytest.mark.parametrize(
    ("method", "sites", "message"),
    [
        ({}, {"heads": ["personal"]}, "set method.personal_pull"),
        ({}, {"heads": ["classifier"], "test_share": 0.5}, "evaluation.sites.test_share differs from"),
        ({"classes": ["x", "y"]}, {"heads": ["classifier"]}, "evaluation.sites.classes differs from method.classes"),
        ({}, {"cross_site": "probe"}, "needs probe in evaluation.measures"),
        ({"personal_pull": 1.0, "add_ons": [{"name": "proximal"}]}, {}, "cannot be combined"),
    ],
)
def test_personal_classifiers_that_no_site_could_evaluate_are_refused(method: Any, sites: Any, message: str) -> None:
    evaluation = {"at": "sites", "measures": ["knn"], "sites": {"classes": list("0123456789"), **sites}}
    with pytest.raises(ValidationError, match=message):
        RunSpec.model_validate(
            {"method": {"name": "classifier", **method}, "model": {"projector": None}, "evaluation": evaluation}
        )
