"""The linear probe against scikit-learn, on problems with a known answer, and in the papers' settings."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedssl.evaluation import PROBES, ProbeSettings, linear_probe

NUM_CLASSES, WIDTH = 4, 12


def _clusters(num: int, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    centers = 3 * torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num,), generator=generator)
    features = centers[labels] + noise * torch.randn(num, WIDTH, generator=generator)
    return features, labels


@pytest.mark.parametrize("name", PROBES)
def test_separable_classes_are_learnt_in_every_setting(name: str) -> None:
    settings = dataclasses.replace(PROBES[name], batch_size=min(PROBES[name].batch_size, 128))
    result = linear_probe(*_clusters(1000, 0.5, 1), *_clusters(500, 0.5, 2), settings=settings)
    assert result.accuracy > 0.98
    assert result.train_accuracy > 0.98
    assert result.best_accuracy >= result.accuracy


def test_default_solves_the_problem_that_scikit_learn_solves() -> None:
    train_x, train_y = _clusters(800, 6.0, 1)
    test_x, test_y = _clusters(4000, 6.0, 2)
    mean, std = train_x.mean(0), train_x.std(0, correction=0)
    settings = ProbeSettings(l2=1e-2)
    theirs = LogisticRegression(C=1 / (settings.l2 * len(train_x)), tol=1e-8, max_iter=2000)
    theirs.fit(((train_x - mean) / std).numpy(), train_y.numpy())
    expected = theirs.score(((test_x - mean) / std).numpy(), test_y.numpy())
    result = linear_probe(train_x, train_y, test_x, test_y, settings=settings)
    assert abs(result.accuracy - expected) < 0.003
    assert 0.3 < result.accuracy < 0.95, "a problem that can tell solutions apart"
    assert result.num_epochs < settings.max_iterations, "it converged"


def test_default_is_invariant_to_scale_shift_and_order() -> None:
    train, test = _clusters(500, 4.0, 1), _clusters(1000, 4.0, 2)
    expected = linear_probe(*train, *test).accuracy
    scaled = linear_probe(100 * train[0] + 7, train[1], 100 * test[0] + 7, test[1]).accuracy
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    shuffled = linear_probe(train[0][order], train[1][order], *test).accuracy
    assert abs(scaled - expected) <= 0.002
    assert abs(shuffled - expected) <= 0.002


@pytest.mark.parametrize("name", ["default", "flesd"])
def test_depends_on_its_arguments_alone(name: str) -> None:
    train, test = _clusters(300, 4.0, 1), _clusters(300, 4.0, 2)
    state = torch.random.get_rng_state()
    first = linear_probe(*train, *test, settings=PROBES[name])
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(5)
    assert linear_probe(*train, *test, settings=PROBES[name]) == first


def test_dead_features_do_no_harm() -> None:
    train, test = _clusters(300, 1.0, 1), _clusters(300, 1.0, 2)

    def with_dead(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full((len(x), 3), 0.1)], dim=1)

    expected = linear_probe(*train, *test)
    assert linear_probe(with_dead(train[0]), train[1], with_dead(test[0]), test[1]).accuracy == expected.accuracy
    constant = linear_probe(torch.ones(300, 4), train[1], torch.ones(300, 4), test[1])
    assert constant.accuracy == pytest.approx(float((test[1] == train[1].mode().values).float().mean()))


def test_a_class_that_only_the_test_set_has() -> None:
    train, test = _clusters(300, 0.1, 1), _clusters(300, 0.1, 2)
    seen = train[1] < 2
    result = linear_probe(train[0][seen], train[1][seen], *test)
    assert result.accuracy == pytest.approx(float((test[1] < 2).float().mean()))


def test_schedules() -> None:
    from fedssl.evaluation.probe import _decay

    steps = ProbeSettings(schedule="steps", milestones=(30, 50), epochs=60)
    assert [_decay(epoch, steps) for epoch in (0, 29, 30, 50)] == pytest.approx([1, 1, 0.1, 0.01])
    cosine = ProbeSettings(schedule="cosine", epochs=50)
    assert np.allclose([_decay(0, cosine), _decay(25, cosine)], [1, 0.5])
