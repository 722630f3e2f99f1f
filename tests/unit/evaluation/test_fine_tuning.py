"""Fine-tuning on digits: it learns, depends only on its arguments, and leaves the encoder unchanged."""

import dataclasses
import math
from typing import Literal

import numpy as np
import pytest
import torch

from fedssl import optimizers
from fedssl.data import ImageData, epoch_batches, load_dataset
from fedssl.errors import DataError
from fedssl.evaluation import FINE_TUNINGS, FineTuneSettings, fine_tune, labelled_share, semi_supervised
from fedssl.evaluation.fine_tuning import _head, _optimizer
from fedssl.models import build_encoder, initialised
from fedssl.protocol.data import DataConfig
from fedssl.protocol.model import EncoderConfig

CONFIG = DataConfig(channels=1, image_size=16)


def _encoder() -> torch.nn.Module:
    return initialised(lambda: build_encoder(EncoderConfig(widths=(16, 32)), 1), 0)


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return a list that receives each encoder and head that is tuned. After tuning, they have their final weights."""
    found: list[tuple[torch.nn.Module, torch.nn.Module]] = []

    def recorded(encoder: torch.nn.Module, head: torch.nn.Module, settings: FineTuneSettings) -> torch.optim.Optimizer:
        found.append((encoder, head))
        return _optimizer(encoder, head, settings)

    monkeypatch.setattr("fedssl.evaluation.fine_tuning._optimizer", recorded)
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ssd", ("sgd", 1e-3, 0.3, 0.9, 0, None, 128, 200, None, "stratified")),
        ("fedx", ("sgd", 1e-3, 1e-3, 0.9, 1e-5, None, 128, 100, None, "stratified")),
        ("fedu", ("adam", 1e-3, 1e-3, 0.9, 0, 4096, 128, 100, None, "stratified")),
        ("fedu-reference", ("adam", None, 1e-3, 0.9, 0, 4096, 128, 100, 1, "first")),
        ("fedrlc", ("adam", 1e-3, 1e-3, 0.9, 0, 4096, 128, 100, None, "stratified")),
    ],
)
def test_the_settings_are_those_of_the_papers(name: str, expected: tuple[object, ...]) -> None:
    s = FINE_TUNINGS[name]
    rates = (s.optimizer, s.encoder_learning_rate, s.head_learning_rate, s.momentum, s.weight_decay)
    assert (*rates, s.hidden_dim, s.batch_size, s.epochs, s.batch_norm_epochs, s.selection) == expected
    assert s.schedule == "constant"


def test_ssd_has_its_views_and_is_tested_every_50_epochs() -> None:
    settings = FINE_TUNINGS["ssd"]
    views = settings.augmentation
    assert views is not None
    assert (views.crop, views.min_scale, views.max_scale, settings.aspect) == ("resized", 0.64, 1, (1, 1))
    assert (views.flip, views.jitter, views.greyscale) == (0.5, 0, 0)
    assert [e for e in range(1, 201) if e % settings.evaluate_every == 0] == [50, 100, 150, 200]


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", FINE_TUNINGS)
def test_fine_tuning_learns_is_reproducible_and_leaves_the_encoder_unchanged(name: str) -> None:
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    assert train.labels is not None
    few = train.subset(labelled_share(train.labels, 0.2, seed=0))
    # If only the classifier is trained, on an untrained encoder, it needs longer.
    is_frozen = FINE_TUNINGS[name].encoder_learning_rate is None
    num_epochs, num_tests, adams = (30, 5, 0.03) if is_frozen else (15, 3, 0.01)
    # Digits must not be mirrored, and a few epochs must suffice.
    settings = dataclasses.replace(
        FINE_TUNINGS[name], epochs=num_epochs, evaluate_every=6, batch_size=32, augmentation=None,
        hidden_dim=None if FINE_TUNINGS[name].hidden_dim is None else 64,
        head_learning_rate=adams if FINE_TUNINGS[name].optimizer == "adam" else 0.3,
    )  # fmt: skip
    encoder = _encoder()
    before = {key: tensor.clone() for key, tensor in encoder.state_dict().items()}
    state = torch.random.get_rng_state()
    result = fine_tune(encoder, few, test, CONFIG, settings=settings)
    assert result.accuracy > (0.3 if is_frozen else 0.5)
    assert result.best_accuracy >= result.accuracy
    assert (result.num_labelled, result.num_epochs, result.num_tests) == (len(few), num_epochs, num_tests)
    assert result.best_epoch in (*range(6, num_epochs, 6), num_epochs)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[key], tensor) for key, tensor in encoder.state_dict().items())
    assert fine_tune(encoder, few, test, CONFIG, settings=settings) == result


def test_the_best_epoch_is_reported_next_to_the_last() -> None:
    train, test = load_dataset("digits", "train").subset(np.arange(100)), load_dataset("digits", "test")
    settings = FineTuneSettings(encoder_learning_rate=0.5, head_learning_rate=2.0, epochs=12, evaluate_every=1)
    shares: list[float] = []
    result = fine_tune(_encoder(), train, test, CONFIG, settings=settings, on_progress=shares.append)
    assert result.best_accuracy > result.accuracy, "such learning rates make it jump"
    expected = f"last: epoch 12; best: epoch {result.best_epoch} of 12 tested, chosen on the test set"
    assert result.chosen == expected
    assert shares == pytest.approx([epoch / 12 for epoch in range(1, 13)])


def test_a_frozen_encoder_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _recorded(monkeypatch)
    train = load_dataset("digits", "train").subset(np.arange(64))
    encoder = _encoder()
    settings = FineTuneSettings(encoder_learning_rate=None, head_learning_rate=0.1, epochs=2, batch_size=16)
    fine_tune(encoder, train, train, CONFIG, settings=settings)
    tuned = found[0][0].state_dict()
    changed = {name for name, tensor in encoder.state_dict().items() if not torch.equal(tuned[name], tensor)}
    assert changed == {name for name, _ in encoder.named_buffers()}, "only BatchNorm's statistics follow the images"


def test_batch_norm_follows_the_images_only_in_its_first_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in EasyFL's code, the first test leaves the network in eval mode: only the 4 batches before it count."""
    found = _recorded(monkeypatch)
    train = load_dataset("digits", "train").subset(np.arange(64))
    settings = dataclasses.replace(FINE_TUNINGS["fedu-reference"], epochs=3, batch_size=16, hidden_dim=8)
    fine_tune(_encoder(), train, train, CONFIG, settings=settings)
    counts = [
        int(tensor)
        for module in found[0]
        for name, tensor in module.named_buffers()
        if name.endswith("num_batches_tracked")
    ]
    assert counts == [4, 4, 4]


def test_a_cosine_schedule_reduces_the_learning_rates_towards_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[list[float]] = []
    step = optimizers.SGD.step

    def recorded(optimizer: torch.optim.SGD, *arguments: object) -> object:
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        return step(optimizer, *arguments)

    monkeypatch.setattr(optimizers.SGD, "step", recorded)
    train = load_dataset("digits", "train").subset(np.arange(32))
    settings = FineTuneSettings(encoder_learning_rate=0.01, head_learning_rate=0.3, schedule="cosine", epochs=4)
    fine_tune(_encoder(), train, train, CONFIG, settings=settings)
    shares = [1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]
    assert np.allclose(rates, [[0.3 * share, 0.01 * share] for share in shares])


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_whole_fine_tuning_follows_the_equations(
    schedule: Literal["constant", "cosine"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs of SGD with two learning rates, computed in plain float64; the last batch has 5 of 8 images."""
    found = _recorded(monkeypatch)
    settings = FineTuneSettings(
        encoder_learning_rate=0.02, head_learning_rate=0.3, schedule=schedule, weight_decay=0.01, epochs=3, batch_size=8
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (37, 1, 8, 8), generator=generator, dtype=torch.uint8).numpy()
    train = ImageData(images, torch.randint(3, (37,), generator=generator).numpy())
    linear = torch.nn.Linear(64, 5, bias=False)
    linear.weight.data = 0.1 * torch.randn(5, 64, generator=generator)
    result = fine_tune(
        torch.nn.Sequential(torch.nn.Flatten(), linear), train, train, DataConfig(channels=1, image_size=8),
        settings=settings,
    )  # fmt: skip
    x_NP, weights = images.reshape(37, 64) / 255, [linear.weight.detach().double().numpy()]
    head = _head(5, 3, settings)[0]
    weights += [value.detach().double().numpy() for value in (head.weight, head.bias)]
    velocities, order = [np.zeros_like(value) for value in weights], torch.Generator().manual_seed(0)
    for epoch in range(3):
        decay = 1 if schedule == "constant" else (1, 0.75, 0.25)[epoch]
        for rows in epoch_batches(37, 8, order, drop_last=False):
            h = x_NP[rows] @ weights[0].T
            scores = np.exp(h @ weights[1].T + weights[2])
            error = (scores / scores.sum(1, keepdims=True) - np.eye(3)[train.labels[rows]]) / len(rows)
            gradients = [(error @ weights[1]).T @ x_NP[rows], error.T @ h, error.sum(0)]
            for place, (gradient, rate) in enumerate(zip(gradients, (0.02, 0.3, 0.3), strict=True)):
                velocities[place] = 0.9 * velocities[place] + gradient + 0.01 * weights[place]
                weights[place] = weights[place] - decay * rate * velocities[place]
    tuned = [value.detach().numpy() for module in found[0] for value in module.parameters()]
    for value, expected in zip(tuned, weights, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)
    predicted = (x_NP @ weights[0].T @ weights[1].T + weights[2]).argmax(axis=1)
    assert result.accuracy == (predicted == train.labels).mean()


def test_labelled_shares_are_stratified_seeded_or_the_first_images() -> None:
    labels = np.repeat(np.arange(3), [100, 50, 2])
    chosen = labelled_share(labels, 0.1, seed=0)
    assert np.bincount(labels[chosen]).tolist() == [10, 5, 1]
    assert np.array_equal(chosen, labelled_share(labels, 0.1, seed=0))
    assert not np.array_equal(chosen, labelled_share(labels, 0.1, seed=1))
    assert labelled_share(labels, 0.1, seed=0, rule="first").tolist() == list(range(15))
    with pytest.raises(ValueError, match="share"):
        labelled_share(labels, 0, seed=0)


@pytest.mark.parametrize("rule", ["stratified", "first"])
def test_semi_supervised_tunes_on_the_labelled_share(rule: str) -> None:
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    assert train.labels is not None
    settings = FineTuneSettings(selection="first" if rule == "first" else "stratified", epochs=2, seed=3)
    chosen = labelled_share(train.labels, 0.05, 3, settings.selection)
    expected = fine_tune(_encoder(), train.subset(chosen), test, CONFIG, settings=settings)
    assert semi_supervised(_encoder(), train, test, CONFIG, 0.05, settings=settings) == expected


def test_unlabelled_images_are_refused() -> None:
    train = load_dataset("digits", "train")
    unlabelled = ImageData(train.images)
    with pytest.raises(DataError, match="labelled"):
        fine_tune(_encoder(), unlabelled, train, CONFIG)
    with pytest.raises(DataError, match="no labels"):
        semi_supervised(_encoder(), unlabelled, train, CONFIG, 0.1)


def test_an_encoder_that_diverged_has_no_accuracy() -> None:
    train = load_dataset("digits", "train").subset(np.arange(64))
    encoder = _encoder()
    with torch.no_grad():
        next(encoder.parameters()).fill_(math.nan)
    with pytest.raises(ValueError, match="has diverged"):
        fine_tune(encoder, train, train, CONFIG, settings=FineTuneSettings(epochs=1))
    wild = FineTuneSettings(encoder_learning_rate=1e30, head_learning_rate=1e30, epochs=2, evaluate_every=1)
    assert math.isnan(fine_tune(_encoder(), train, train, CONFIG, settings=wild).accuracy)
