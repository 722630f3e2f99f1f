"""Maps: principal components compared with numpy's, seeded t-SNE, and pictures of few and many classes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.evaluation import aligned_map, plot_map, project
from fedssl.protocol.evaluation import MapMethod


def _features(num: int = 120, width: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, width, generator=generator) * torch.tensor([3.0, 0.2, 1, 0.1, 0.3, 0.2])[:width] + 5


def test_principal_components_match_numpys() -> None:
    x = _features().numpy().astype(np.float64)
    centred = x - x.mean(axis=0)
    directions = np.linalg.svd(centred)[2][:2]
    directions *= np.sign(np.take_along_axis(directions, np.abs(directions).argmax(1, keepdims=True), 1))
    assert np.allclose(project(_features(), "pca"), centred @ directions.T, atol=1e-6)


def test_signs_do_not_depend_on_the_order_of_the_images() -> None:
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    assert np.allclose(project(_features()[order], "pca"), project(_features(), "pca")[order.numpy()], atol=1e-6)


def test_features_of_one_dimension_are_mapped_to_a_line() -> None:
    points = project(_features(10, 1), "pca")
    assert points.shape == (10, 2)
    assert np.all(points[:, 1] == 0)


def test_tsne_keeps_neighbourhoods_and_depends_only_on_the_seed() -> None:
    centers = 30 * torch.eye(3, 6)
    labels = torch.arange(90) % 3
    features = centers[labels] + torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
    points = project(features, "tsne", seed=4)
    assert np.array_equal(points, project(features, "tsne", seed=4))
    for point, label in zip(points, labels, strict=True):
        nearest = np.argsort(np.linalg.norm(points - point, axis=1))[1:6]
        assert set(labels[nearest].tolist()) == {int(label)}


def test_a_map_is_rotated_and_mirrored_onto_the_previous_one() -> None:
    """It is neither bent nor stretched."""
    first = aligned_map(_features(), "pca")
    assert first.mean(axis=0) == pytest.approx(0, abs=1e-9)
    assert (first**2).sum(axis=1).mean() == pytest.approx(1)
    turned = first @ np.array([[0.0, 1.0], [1.0, 0.0]])  # mirrored at the diagonal
    assert np.allclose(aligned_map(_features(), "pca", turned), turned)
    assert np.allclose(aligned_map(7 * _features() + 3, "pca", turned), turned, atol=1e-5)
    assert np.allclose(aligned_map(_features(), "pca", turned[:5]), first)  # other images: nothing to align with
    assert not aligned_map(torch.ones(4, 3), "pca").any()


@pytest.mark.parametrize("features", [torch.ones(1, 3), torch.full((5, 3), torch.nan)])
def test_too_few_or_non_finite_representations_have_no_map(features: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="at least two representations"):
        project(features)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("num_classes", "names"), [(1, ()), (10, ("Trouser", "Coat")), (100, ()), (150, ())])
def test_the_picture_is_reproducible_for_any_number_of_classes(
    tmp_path: Path, num_classes: int, names: tuple[str, ...]
) -> None:
    labels = np.arange(300, dtype=np.int64) % num_classes
    points = np.random.default_rng(0).normal(size=(300, 2)) + labels[:, None]
    paths = [tmp_path / "deep" / name for name in ("1.png", "2.png")]
    for path in paths:
        plot_map(path, points, labels, names, "digits: 300 test images, PCA")
    with Image.open(paths[0]) as image:
        assert image.format == "PNG"
        shown = np.asarray(image.convert("RGB"))
    assert shown.std() > 5, "something is drawn"
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_dollar_signs_are_drawn_literally(tmp_path: Path) -> None:
    odd = r"$\none$ of 5"
    plot_map(tmp_path / "odd.png", np.array([[0.0, 0], [1, 1]]), np.array([0, 1]), (odd, "b"), odd)
    assert (tmp_path / "odd.png").stat().st_size > 1000


def test_points_have_the_colour_of_their_class(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    plot_map(path, np.array([[0.0, 0], [1, 1]] * 5), np.array([0, 2] * 5), ("a", "b", "c"), "two classes")
    with Image.open(path) as image:
        colours = {tuple(pixel) for pixel in np.asarray(image.convert("RGB")).reshape(-1, 3)}
    assert {(0x3F, 0x90, 0xDA), (0xBD, 0x1F, 0x01)} <= colours, "in the legend, where nothing shines through"
    assert (0xFF, 0xA9, 0x0E) not in colours, "class 1 has no image"


def test_classes_that_share_a_colour_have_different_markers(tmp_path: Path) -> None:
    points = np.array([[0.0, 0], [1, 1]] * 5)
    paths = [tmp_path / f"{other}.png" for other in (13, 23)]
    for path, other in zip(paths, (13, 23), strict=True):
        plot_map(path, points, np.array([3, other] * 5), ["a class"] * 24, "two of CIFAR-100's classes")
    assert paths[0].read_bytes() != paths[1].read_bytes(), "all three classes have the fourth colour"


@pytest.mark.parametrize("method", ["pca", "tsne"])
@pytest.mark.parametrize("value", [0.0, 0.37, 1e30])
def test_the_map_of_a_collapsed_encoder_is_one_point(method: MapMethod, value: float) -> None:
    h_NH = torch.full((40, 16), value)
    assert not project(h_NH, method).any()
    assert not aligned_map(h_NH, method, np.ones((40, 2))).any()


@pytest.mark.parametrize("method", ["pca", "tsne"])
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e18, 1e37])
def test_representations_of_any_size_have_a_finite_map(method: MapMethod, size: float) -> None:
    h_NH = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)) * size
    points_N2 = aligned_map(h_NH, method)
    assert np.isfinite(points_N2).all()
    assert np.sqrt((points_N2**2).sum(axis=1).mean()) == pytest.approx(1)
