"""The fitted classifier, compared with scikit-learn's ridge regression, SciPy's minimum, and hand calculations."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.linear_model import Ridge

from fedssl.classification.fit import best_scale, fit_head
from fedssl.classification.labelled import label_images, open_labelled
from fedssl.data import load_conformed
from fedssl.data.site_labels import split_labels
from fedssl.embeddings.encoders import Model
from fedssl.embeddings.sources import open_source
from fedssl.errors import DataError

from .conftest import Scans


@pytest.mark.parametrize("num", [1, 3, 100])
def test_the_scale_for_images_that_are_all_right_is_that_of_the_smoothed_targets(num: int) -> None:
    # softmax(a, 0) = (n + 1) / (n + 2), so a = log(n + 1).
    scale, loss = best_scale(torch.tensor([[1.0, 0.0]] * num).double(), torch.zeros(num, dtype=torch.int64))
    right = (num + 1) / (num + 2)
    assert scale == pytest.approx(math.log(num + 1), rel=1e-3)
    assert loss == pytest.approx(-right * math.log(right) - (1 - right) * math.log(1 - right), abs=1e-6)
    # sigmoid(a / 2) = (n + 1) / (n + 2), so a = 2 log(n + 1); the loss is a sum over two labels.
    targets = torch.tensor([[1, 0]] * num)
    scale, several = best_scale(torch.tensor([[1.0, 0.0]] * num).double(), targets)
    assert scale == pytest.approx(2 * math.log(num + 1), rel=1e-3)
    assert several == pytest.approx(2 * loss, abs=1e-6)


def test_the_scale_minimises_the_cross_entropy_as_scipy_does() -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 200)
    scores = rng.normal(0, 0.3, (200, 4)) + 0.3 * np.eye(4)[labels]
    smoothed = (200 * np.eye(4)[labels] + 1) / 204
    expected = minimize_scalar(
        lambda a: -(smoothed * log_softmax(a * scores, axis=1)).sum(axis=1).mean(), bounds=(0.1, 1000), method="bounded"
    )
    scale, loss = best_scale(torch.from_numpy(scores), torch.from_numpy(labels))
    assert scale == pytest.approx(expected.x, rel=1e-3)
    assert loss == pytest.approx(expected.fun, abs=1e-7)


def test_the_classifier_equals_scikit_learns_ridge_regression_on_all_images(
    tmp_path: Path, model: Model, scans: Scans
) -> None:
    folder = scans(tmp_path / "labelled", 30, 20, 25)
    labelled = open_labelled(str(folder), None)
    fit = fit_head(labelled, model)
    data = model.encoder.data
    images = load_conformed(str(folder), "train", data)
    h_NH = model.represent(images, "cpu").double().numpy()
    numbers, targets = fit.head.about["fit"], np.eye(3)[labelled.labels.labels]
    reference = Ridge(alpha=numbers["ridge"], solver="cholesky").fit(h_NH, targets)
    expected = numbers["scale"] * np.hstack([reference.coef_, reference.intercept_[:, None]])
    found = torch.cat([fit.head.weight, fit.head.bias[:, None]], dim=1)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert (numbers["num_images"], numbers["num_held_out"]) == (75, 15)
    assert [(each.name, each.num_images, each.num_held_out) for each in fit.classes] == [
        ("blue", 30, 6), ("green", 20, 4), ("red", 25, 5)
    ]  # fmt: skip
    p_NC = fit.head.probabilities(torch.from_numpy(h_NH).float())
    torch.testing.assert_close(p_NC.sum(dim=1), torch.ones(75))
    assert float((p_NC.argmax(dim=1).numpy() == labelled.labels.labels).mean()) > 0.8


def test_the_accuracy_is_measured_on_held_out_images(tmp_path: Path, model: Model, scans: Scans) -> None:
    labelled = open_labelled(str(scans(tmp_path / "labelled", 30, 20, 25)), None)
    fit = fit_head(labelled, model)
    numbers = fit.head.about["fit"]
    images = load_conformed(str(tmp_path / "labelled"), "train", model.encoder.data)
    h_NH = model.represent(images, "cpu").double().numpy()
    split = split_labels(labelled.labels, 0.2, 0)
    own = labelled.labels.labels
    trained = [Ridge(alpha=numbers["ridge"] * ratio, solver="cholesky") for ratio in (0.5, 0.8, 1.0)]
    shares = {
        float((each.fit(h_NH[split.train], np.eye(3)[own[split.train]]).predict(h_NH[split.test]).argmax(1)
               == own[split.test]).mean())
        for each in trained
    }  # fmt: skip
    assert fit.accuracy in shares
    assert fit.accuracy == sum(each.num_right for each in fit.classes) / 15


def test_equal_images_give_equal_bits(tmp_path: Path, model: Model, scans: Scans) -> None:
    folder = scans(tmp_path / "labelled", 12, 12)
    one, other = (fit_head(open_labelled(str(folder), None), model).head for _ in range(2))
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)
    assert one.about == other.about


def test_images_without_a_label_are_not_used(tmp_path: Path, model: Model, scans: Scans) -> None:
    folder = scans(tmp_path / "labelled", 12, 12, 12)
    rows = [f"blue/{n:03d}.png,b" for n in range(12)] + [f"green/{n:03d}.png,g" for n in range(12)]
    rows += [f"red/{n:03d}.png," for n in range(12)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]))
    fit = fit_head(label_images(open_source(str(folder), None, None), tmp_path / "labels.csv"), model)
    (folder / "red").rename(tmp_path / "red")
    alone = fit_head(open_labelled(str(folder), None), model)
    assert fit.head.class_names == ("b", "g")
    assert torch.equal(fit.head.weight, alone.head.weight)


def test_groups_are_not_split_and_the_label_file_can_fix_the_split(tmp_path: Path, model: Model, scans: Scans) -> None:
    folder = scans(tmp_path / "labelled", 12, 12)
    names = [f"{colour}/{n:03d}.png" for colour in ("blue", "green") for n in range(12)]
    lines = [f"{name},{name[0]},{'test' if '/000' in name else 'train'}" for name in names]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,split", *lines]))
    fit = fit_head(label_images(open_source(str(folder), None, None), tmp_path / "labels.csv"), model)
    assert [each.num_held_out for each in fit.classes] == [1, 1]
    lines = [f"{name},{name[0]},{name[0]}" for name in names]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,group", *lines]))
    with pytest.raises(DataError, match=r"none of the 24 labelled images can be held out.*groups"):
        fit_head(label_images(open_source(str(folder), None, None), tmp_path / "labels.csv"), model)


def test_several_labels_per_image_have_independent_probabilities(tmp_path: Path, model: Model, scans: Scans) -> None:
    folder = scans(tmp_path / "labelled", 20, 20, 20)
    flags = {"blue": "1,0", "green": "0,1", "red": "1,1"}
    lines = [f"{colour}/{n:03d}.png,{flags[colour]}" for colour in flags for n in range(20)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,not green,not blue", *lines]))
    fit = fit_head(label_images(open_source(str(folder), None, None), tmp_path / "labels.csv"), model)
    assert fit.head.multi_label
    assert [each.num_images for each in fit.classes] == [40, 40]
    images = load_conformed(str(folder), "train", model.encoder.data)
    p_NC = fit.head.probabilities(model.represent(images, "cpu"))
    truth_NC = np.array([[1, 0]] * 20 + [[0, 1]] * 20 + [[1, 1]] * 20)
    assert ((p_NC.numpy() >= 0.5) == truth_NC).mean() > 0.75
    assert float(p_NC[40:].sum(dim=1).mean()) > 1.2


def test_damaged_labelled_images_are_left_out_and_named(tmp_path: Path, model: Model, scans: Scans) -> None:
    folder = scans(tmp_path / "labelled", 10, 10)
    Path(folder, "blue", "broken.png").write_bytes(b"no image")
    fit = fit_head(open_labelled(str(folder), None), model)
    assert [each["path"] for each in fit.left_out] == ["blue/broken.png"]
    assert fit.head.about["fit"]["num_images"] == 20


def test_classes_that_cannot_be_learnt_are_refused(tmp_path: Path, model: Model, scans: Scans) -> None:
    folder = scans(tmp_path / "labelled", 10, 10)
    (tmp_path / "one").mkdir()
    (folder / "blue").rename(tmp_path / "one" / "blue")
    with pytest.raises(DataError, match="do not differ"):
        fit_head(open_labelled(str(tmp_path / "one"), None), model)
    (folder / "red").mkdir()
    Path(folder, "red", "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="none of the 10 labelled images are 'red'"):
        fit_head(open_labelled(str(folder), None), model)
    Image.new("RGB", (12, 12)).save(tmp_path / "loose.png")
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose.png").rename(tmp_path / "loose" / "loose.png")
    with pytest.raises(DataError, match="has no labels"):
        open_labelled(str(tmp_path / "loose"), None)
