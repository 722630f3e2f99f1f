"""The linear probe compared with scikit-learn, on problems with a known answer, and in the papers' settings."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedssl.data import load_dataset
from fedssl.evaluation import PROBES, ProbeSettings, extract_features, labels_of, linear_probe, probe_encoder
from fedssl.evaluation.probe import _decay, _solve, _zero_linear, fit_probe
from fedssl.models import build_encoder, initialised
from fedssl.protocol.data import AugmentationConfig, DataConfig
from fedssl.protocol.model import EncoderConfig

NUM_CLASSES, WIDTH = 4, 12
DIGITS = DataConfig(channels=1, image_size=16)


def _clusters(num: int, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    centers = 3 * torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num,), generator=generator)
    features = centers[labels] + noise * torch.randn(num, WIDTH, generator=generator)
    return features, labels


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedx", ("adam", 1e-3, 1e-6, 64, 100, True)),
        ("fedu", ("adam", 3e-3, 0, 2048, 200, False)),
        ("ssd", ("adam", 3e-3, 0, 512, 200, True)),
        ("fedrlc", ("adamw", 0.022, 0.01, 512, 200, True)),
        ("flesd", ("sgd", 0.03, 0, 256, 60, True)),
        ("orchestra", ("sgd", 30, 0, 256, 50, True)),
    ],
)
def test_the_settings_are_those_of_the_papers(name: str, expected: tuple[object, ...]) -> None:
    s = PROBES[name]
    assert (s.optimizer, s.learning_rate, s.weight_decay, s.batch_size, s.epochs, s.shuffle) == expected
    assert not s.standardise
    if s.optimizer == "sgd":
        assert s.momentum == 0.9


def test_flesd_has_its_schedule_and_views() -> None:
    settings = PROBES["flesd"]
    rates = [0.03 * _decay(epoch, settings) for epoch in (0, 29, 30, 49, 50, 59)]
    assert rates == pytest.approx([0.03, 0.03, 0.003, 0.003, 0.0003, 0.0003])
    views = settings.augmentation
    assert views is not None
    assert (views.crop, views.min_scale, views.max_scale, views.flip) == ("resized", 0.08, 1, 0.5)
    assert (views.jitter, views.greyscale, views.blur, views.solarize) == (0, 0, 0, 0)


@pytest.mark.full(but=3)
@pytest.mark.parametrize("name", PROBES)
def test_separable_classes_are_learnt_in_every_setting(name: str) -> None:
    settings = dataclasses.replace(PROBES[name], batch_size=min(PROBES[name].batch_size, 128), augmentation=None)
    result = linear_probe(*_clusters(1000, 0.5, 1), *_clusters(500, 0.5, 2), settings=settings)
    assert result.accuracy > 0.98
    assert result.train_accuracy > 0.98
    assert result.best_accuracy >= result.accuracy


def test_fast_solves_the_problem_that_scikit_learn_solves() -> None:
    train_x, train_y = _clusters(800, 6.0, 1)
    test_x, test_y = _clusters(4000, 6.0, 2)
    mean, std = train_x.mean(0), train_x.std(0, correction=0)
    settings = ProbeSettings(l2=8.0)
    theirs = LogisticRegression(C=1 / settings.l2, tol=1e-8, max_iter=2000)
    theirs.fit(((train_x - mean) / std).numpy(), train_y.numpy())
    expected = theirs.score(((test_x - mean) / std).numpy(), test_y.numpy())
    result = linear_probe(train_x, train_y, test_x, test_y, settings=settings)
    assert abs(result.accuracy - expected) < 0.003
    assert 0.3 < result.accuracy < 0.95, "a problem that can tell solutions apart"
    assert result.num_epochs < settings.max_iterations, "it converged"


@pytest.mark.parametrize(("num_classes", "inverse"), [(2, 2), (4, 1)])
def test_probabilities_of_the_fast_probe_are_those_of_scikit_learn(num_classes: int, inverse: int) -> None:
    """With two classes, scikit-learn has one weight vector, the difference of ours, which is penalised half as much."""
    train_x, train_y = _clusters(300, 4.0, 1)
    test_x, _ = _clusters(100, 4.0, 2)
    mean, std = train_x.double().mean(0), train_x.double().std(0, correction=0)
    theirs = LogisticRegression(C=inverse / PROBES["fast"].l2, tol=1e-10, max_iter=2000)
    theirs.fit(((train_x - mean) / std).numpy(), (train_y % num_classes).numpy())
    expected = theirs.predict_proba(((test_x - mean) / std).numpy())
    found = fit_probe(train_x, train_y % num_classes).scores(test_x)
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_the_solver_finds_the_minimum_of_its_objective_for_correlated_features() -> None:
    features, labels = _clusters(500, 3.0, 1)
    mixing = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))
    mixed = features @ mixing * torch.logspace(0, 2, WIDTH)
    settings = ProbeSettings(l2=10.0)
    classifier = _zero_linear(WIDTH, NUM_CLASSES, torch.device("cpu"))
    assert _solve(classifier, mixed, labels, settings) < settings.max_iterations
    x, w, b = mixed.double().numpy(), classifier.weight.detach().double().numpy(), classifier.bias.detach().double()
    logits = x @ w.T + b.numpy()
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    error = (probabilities - np.eye(NUM_CLASSES)[labels.numpy()]) / len(x)
    gradient = error.T @ x + settings.l2 / len(x) * w
    # In units of the gradient at zero weights, where the search began.
    start = (np.full_like(probabilities, 1 / NUM_CLASSES) - np.eye(NUM_CLASSES)[labels.numpy()]).T @ x / len(x)
    assert np.abs(gradient).max() < 2e-3 * np.abs(start).max()


def test_fast_is_invariant_to_scale_shift_and_order() -> None:
    train, test = _clusters(500, 4.0, 1), _clusters(1000, 4.0, 2)
    expected = linear_probe(*train, *test).accuracy
    scaled = linear_probe(100 * train[0] + 7, train[1], 100 * test[0] + 7, test[1]).accuracy
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    shuffled = linear_probe(train[0][order], train[1][order], *test).accuracy
    assert abs(scaled - expected) <= 0.002
    assert abs(shuffled - expected) <= 0.002


@pytest.mark.parametrize("name", ["fast", "ssd"])
def test_a_probe_depends_only_on_its_arguments(name: str) -> None:
    train, test = _clusters(300, 4.0, 1), _clusters(300, 4.0, 2)
    state = torch.random.get_rng_state()
    first = linear_probe(*train, *test, settings=PROBES[name])
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(5)
    assert linear_probe(*train, *test, settings=PROBES[name]) == first


def test_the_best_epoch_is_reported_next_to_the_last() -> None:
    train, test = _clusters(200, 6.0, 1), _clusters(200, 6.0, 2)
    shares: list[float] = []
    settings = dataclasses.replace(PROBES["fedrlc"], batch_size=32, epochs=40)
    result = linear_probe(*train, *test, settings=settings, on_progress=shares.append)
    assert result.num_epochs == 40
    assert 1 <= result.best_epoch <= 40
    assert result.best_accuracy > result.accuracy, "noise makes some epoch better"
    assert result.chosen == f"last: epoch 40; best: epoch {result.best_epoch}, chosen on the test set"
    until = dataclasses.replace(settings, epochs=result.best_epoch)
    assert linear_probe(*train, *test, settings=until).accuracy == result.best_accuracy
    assert shares == pytest.approx([(epoch + 1) / 40 for epoch in range(40)])
    assert linear_probe(*train, *test).chosen == "the last is the best"


def test_constant_features_do_not_change_the_accuracy() -> None:
    train, test = _clusters(300, 1.0, 1), _clusters(300, 1.0, 2)

    def append_constant_features(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full((len(x), 3), 0.1)], dim=1)

    expected = linear_probe(*train, *test)
    assert (
        linear_probe(append_constant_features(train[0]), train[1], append_constant_features(test[0]), test[1]).accuracy
        == expected.accuracy
    )
    constant = linear_probe(torch.ones(300, 4), train[1], torch.ones(300, 4), test[1])
    assert constant.accuracy == pytest.approx(float((test[1] == train[1].mode().values).float().mean()))


def test_classes_that_only_the_test_set_has_count_as_errors() -> None:
    train, test = _clusters(300, 0.1, 1), _clusters(300, 0.1, 2)
    seen = train[1] < 2
    result = linear_probe(train[0][seen], train[1][seen], *test)
    assert result.accuracy == pytest.approx(float((test[1] < 2).float().mean()))


def test_infinite_features_and_settings_with_views_are_refused() -> None:
    train, test = _clusters(30, 1.0, 1), _clusters(30, 1.0, 2)
    with pytest.raises(ValueError, match="finite"):
        linear_probe(train[0] * torch.inf, train[1], *test)
    with pytest.raises(ValueError, match="probe_encoder"):
        linear_probe(*train, *test, settings=PROBES["flesd"])


def test_step_and_cosine_schedules_decay_the_learning_rate() -> None:
    steps = ProbeSettings(schedule="steps", milestones=(30, 50), epochs=60)
    assert [_decay(epoch, steps) for epoch in (0, 29, 30, 50)] == pytest.approx([1, 1, 0.1, 0.01])
    cosine = ProbeSettings(schedule="cosine", epochs=50)
    assert np.allclose([_decay(0, cosine), _decay(25, cosine)], [1, 0.5])


def _digits_encoder() -> torch.nn.Module:
    return initialised(lambda: build_encoder(EncoderConfig(widths=(16, 32)), 1), 0)


def test_the_probe_of_an_encoder_is_that_of_its_features() -> None:
    encoder, train, test = _digits_encoder(), load_dataset("digits", "train"), load_dataset("digits", "test")
    sides = [side for x in (train, test) for side in (extract_features(encoder, x, DIGITS), labels_of(x))]
    assert probe_encoder(encoder, train, test, DIGITS) == linear_probe(*sides)
    # If the views are the images themselves, the training is the same, once through the features and once through the
    # encoder.
    still = AugmentationConfig(crop="none", flip=0, jitter=0, greyscale=0)
    settings = ProbeSettings(optimizer="sgd", standardise=False, learning_rate=1.0, epochs=3, batch_size=64)
    plain = linear_probe(*sides, settings=settings)
    viewed = probe_encoder(encoder, train, test, DIGITS, settings=dataclasses.replace(settings, augmentation=still))
    assert viewed.accuracy == pytest.approx(plain.accuracy, abs=0.006)


def test_probing_with_augmented_views_is_reproducible_and_leaves_the_encoder_unchanged() -> None:
    encoder, train, test = _digits_encoder(), load_dataset("digits", "train"), load_dataset("digits", "test")
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    views = AugmentationConfig(min_scale=0.8, flip=0, jitter=0, greyscale=0)
    settings = ProbeSettings(
        optimizer="adam", standardise=False, learning_rate=1.0, batch_size=64, epochs=10, augmentation=views
    )
    result = probe_encoder(encoder, train, test, DIGITS, settings=settings)
    assert result.accuracy > 0.4, "an untrained encoder's representations are small, and these are few steps"
    assert result.num_epochs == 10
    assert encoder.training
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert probe_encoder(encoder, train, test, DIGITS, settings=settings) == result
