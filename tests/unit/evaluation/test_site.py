"""Evaluation at one site: it equals a central evaluation of its images, and reveals nothing about small classes."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedssl.data import ImageData
from fedssl.data.site_labels import UNLABELLED, SiteLabels, split_labels
from fedssl.errors import DataError
from fedssl.evaluation import extract_features, knn_accuracy, linear_probe
from fedssl.evaluation.probe import fit_probe
from fedssl.evaluation.site import evaluate_at_site, evaluate_head
from fedssl.evaluation.site_heads import packed, unpacked
from fedssl.evaluation.site_results import measure_results
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteHead
from fedssl.seeding import derive_seed

CLASSES = ("a", "b", "c")


def _spec(sites=None, **changes):
    sites = {"classes": CLASSES, "min_count": 3, **(sites or {})}
    evaluation = {"at": "sites", "max_train": None, "sites": sites, **changes}
    return RunSpec.model_validate({"seed": 5, "data": {"channels": 1, "image_size": 8}, "evaluation": evaluation})


class _Encoder(torch.nn.Module):
    """Returns the mean of each row and of each column."""

    def forward(self, x_BCHW):
        return torch.cat([x_BCHW.mean(dim=(1, 2)), x_BCHW.mean(dim=(1, 3))], dim=1)


def _images(labels, seed=0):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (len(labels), 1, 8, 8)).astype(np.uint8)
    pixels[np.arange(len(labels)), 0, labels] //= 2
    return ImageData(pixels)


def _labels(numbers, **more):
    return SiteLabels(np.asarray(numbers), CLASSES, ("", "", ""), **more)


def test_counts_give_the_accuracies_of_a_central_evaluation():
    numbers = np.arange(300) % 3
    images, labels, spec = _images(numbers), _labels(numbers), _spec()
    counts = evaluate_at_site(_Encoder(), images.subset, labels, spec, "hospital-a").counts
    split = split_labels(labels, 0.2, derive_seed(5, 0, "hospital-a", "site labels"))
    sides = []
    for part in (split.train, split.test):
        sides += [extract_features(_Encoder(), images.subset(part), spec.data), torch.from_numpy(numbers[part])]
    found = {name: measure_results(own, spec.evaluation.sites) for name, own in counts.measures.items()}
    assert found["probe"]["accuracy"] == linear_probe(*sides).accuracy
    assert found["knn"]["accuracy"] == knn_accuracy(*sides)
    assert (counts.num_train, counts.num_test) == (240, 60)
    assert counts == evaluate_at_site(_Encoder(), images.subset, labels, spec, "hospital-a").counts
    assert counts != evaluate_at_site(_Encoder(), images.subset, labels, spec, "hospital-b").counts


def test_statistics_are_recalibrated_on_the_sites_training_images_only_if_the_run_does_so():
    numbers = np.arange(300) % 3
    images, labels = _images(numbers), _labels(numbers)
    for policy in ("average", "recalibrate"):
        data = {"channels": 1, "image_size": 8, "mean": (0.5,), "std": (0.25,)}
        spec = RunSpec.model_validate(_spec().model_dump() | {"data": data, "model": {"batch_norm": policy}})
        encoder = torch.nn.Sequential(torch.nn.BatchNorm2d(1), _Encoder())
        evaluate_at_site(encoder, images.subset, labels, spec, "hospital-a")
        train = split_labels(labels, 0.2, derive_seed(5, 0, "hospital-a", "site labels")).train
        pixels = (images.subset(train).images / 255.0 - 0.5) / 0.25
        expected = np.mean([part.mean() for part in np.array_split(pixels, len(train) // 128)])
        wanted = expected if policy == "recalibrate" else 0.0
        assert float(encoder[0].running_mean) == pytest.approx(wanted, rel=1e-5)


def test_images_of_small_classes_are_not_counted():
    numbers = np.array([0] * 50 + [1] * 50 + [2] * 12 + [UNLABELLED] * 9)
    labels = _labels(numbers)
    counts = evaluate_at_site(_Encoder(), _images(numbers % 3).subset, labels, _spec(), "x").counts
    assert (counts.classes, counts.num_train, counts.num_test) == ((0, 1), 80, 20)  # c has two test images
    assert all(len(own.confusion) == 2 for own in counts.measures.values())


def test_the_site_may_require_more_images_per_class_than_the_run():
    numbers = np.array([0] * 50 + [1] * 50 + [2] * 20)
    counts = evaluate_at_site(_Encoder(), _images(numbers).subset, _labels(numbers), _spec(), "x", min_count=5).counts
    assert (counts.classes, counts.min_count) == ((0, 1), 5)
    with pytest.raises(DataError, match="0 of the run's 3 classes have at least 11 training and 11 test images"):
        evaluate_at_site(_Encoder(), _images(numbers).subset, _labels(numbers), _spec(), "x", min_count=11)


def test_a_site_with_one_class_is_refused():
    numbers = np.zeros(100, np.int64)
    with pytest.raises(DataError, match=r"1 of the run's 3 classes have at least 3 .* a classifier needs 2"):
        evaluate_at_site(_Encoder(), _images(numbers).subset, _labels(numbers), _spec(), "x")


def test_several_labels_are_evaluated_separately():
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 2, (200, 3))
    rows[:, 2] = 0
    rows[0, 2] = 1  # too few images have this label
    pixels = rng.integers(0, 256, (200, 1, 8, 8)).astype(np.uint8)
    pixels[:, 0, 0] = pixels[:, 0, 0] // 4 + 128 * rows[:, [0]]
    spec = _spec({"multi_label": True}, measures=["knn", "probe"])
    counts = evaluate_at_site(_Encoder(), ImageData(pixels).subset, _labels(rows), spec, "x").counts
    assert counts.classes == (0, 1)
    for own in counts.measures.values():
        assert [sum(row) for row in own.confusion] == [counts.num_test] * 2
    tn, fn, fp, tp = counts.measures["probe"].confusion[0]
    assert (tn + tp) > 10 * (fn + fp)


def test_a_diverged_encoder_gives_no_measures():
    class Diverged(torch.nn.Module):
        def forward(self, x_BCHW):
            return x_BCHW.flatten(1) * float("nan")

    numbers = np.arange(300) % 3
    counts = evaluate_at_site(Diverged(), _images(numbers).subset, _labels(numbers), _spec(), "x").counts
    assert counts.measures == {}


def test_the_limits_of_the_spec_apply_to_the_sites_images():
    numbers = np.arange(300) % 3
    spec = _spec(max_train=90, max_test=30)
    counts = evaluate_at_site(_Encoder(), _images(numbers).subset, _labels(numbers), spec, "x").counts
    assert (counts.num_train, counts.num_test) == (90, 30)


def test_probabilities_of_several_labels_agree_with_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randn(400, 6, generator=generator), torch.randn(50, 6, generator=generator)
    noise = torch.randn(400, 2, generator=generator)
    targets = (train[:, :2] + noise > 0.3).long()
    found = fit_probe(train, targets).scores(test)
    mean, std = train.mean(dim=0), train.std(dim=0, correction=0)
    for label in range(2):
        reference = LogisticRegression(C=1 / 30, tol=1e-8, max_iter=1000)
        reference.fit(((train - mean) / std).numpy(), targets[:, label].numpy())
        expected = reference.predict_proba(((test - mean) / std).numpy())[:, 1]
        assert np.abs(found[:, label].numpy() - expected).max() < 2e-3


def test_a_sites_probe_is_sent_as_weights_for_raw_representations():
    torch.manual_seed(3)
    train, test = torch.randn(90, 6) * 5 + 3, torch.randn(40, 6) * 5 + 3
    probe = fit_probe(train, torch.arange(90) % 3)
    rows = unpacked(packed(probe.rows(), (0, 1, 2)), 3)
    own = torch.cat([test.double(), torch.ones(40, 1).double()], dim=1) @ rows.double().T
    assert torch.allclose(own.softmax(dim=1), probe.scores(test).double(), atol=1e-5)
    assert torch.equal(probe.scores(test), fit_probe(train, torch.arange(90) % 3).scores(test))


def test_another_sites_classifier_is_evaluated_on_this_sites_test_images():
    """At its own site it gives its own counts; images of a class that it does not have are never right."""
    numbers = np.arange(300) % 3
    images, labels, spec = _images(numbers), _labels(numbers), _spec({"cross_site": "probe"})
    counts, head, _ = evaluate_at_site(_Encoder(), images.subset, labels, spec, "a")
    assert head.classes == (0, 1, 2)
    again = evaluate_head(_Encoder(), images.subset, labels, spec, "a", head)
    assert again.measures == {"probe": counts.measures["probe"]}
    assert (again.classes, again.num_test, again.num_train) == (counts.classes, counts.num_test, counts.num_train)
    two = evaluate_at_site(_Encoder(), _images(numbers % 2).subset, _labels(numbers % 2), spec, "b").head
    assert two.classes == (0, 1)
    found = evaluate_head(_Encoder(), images.subset, labels, spec, "a", two).measures["probe"]
    assert [row[2] for row in found.confusion] == [0, 0, 0]
    assert sum(map(sum, found.confusion)) == counts.num_test
    assert found.positives[2][0] == sum(found.confusion[2])  # its scores for this class are all 0


@pytest.mark.parametrize(
    ("rows", "classes", "message"),
    [
        (torch.zeros(1, 17), (2,), "has none of the classes with enough images at this site"),
        (torch.zeros(2, 4), (0, 1), "representations of width 3, and this encoder's have width 16"),
        (torch.full((2, 17), 3e38), (0, 1), "scores that are not finite numbers: its weights are too large"),
    ],
)
def test_another_sites_classifier_that_cannot_be_used_is_refused(rows, classes, message):
    numbers = np.arange(100) % 2
    spec = _spec({"cross_site": "probe"})
    with pytest.raises(DataError, match=message):
        evaluate_head(_Encoder(), _images(numbers).subset, _labels(numbers), spec, "a", packed(rows, classes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": (1, 0)}, "classes must be different and in order"),
        ({"weights": "AAAA"}, "weights are not float32 numbers"),
        ({"weights": "%"}, "weights are not float32 numbers"),
        ({"weights": "AACAfwAAgH8AAIB/AACAfw=="}, "weights are not all finite numbers"),
        ({"weights": "AAAAAAAAAAAAAAAA"}, "weights have 3 numbers, which are not 2 rows"),
    ],
)
def test_an_invalid_classifier_is_refused_on_arrival(changes, message):
    whole = packed(torch.zeros(2, 3), (0, 1)).model_dump()
    with pytest.raises(ValueError, match=message):
        SiteHead.model_validate(whole | changes)
