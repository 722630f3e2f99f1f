"""Fine-tuning on digits: it learns, from its arguments alone, and leaves the encoder as it was."""

import dataclasses

import numpy as np
import pytest
import torch

from fedssl.data import load_dataset
from fedssl.errors import DataError
from fedssl.evaluation import FINE_TUNINGS, FineTuneSettings, fine_tune, labelled_share
from fedssl.evaluation.fine_tuning import _optimizer
from fedssl.models import build_encoder, initialised
from fedssl.protocol.data import DataConfig
from fedssl.protocol.model import EncoderConfig

CONFIG = DataConfig(channels=1, image_size=16)


def _encoder() -> torch.nn.Module:
    return initialised(lambda: build_encoder(EncoderConfig(widths=(16, 32)), 1), 0)


@pytest.mark.parametrize("name", FINE_TUNINGS)
def test_learns_leaves_the_encoder_and_repeats_itself(name: str) -> None:
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    assert train.labels is not None
    few = train.subset(labelled_share(train.labels, 0.2, seed=0))
    settings = dataclasses.replace(FINE_TUNINGS[name], epochs=12, evaluate_every=5, batch_size=32)
    if settings.optimizer == "adam":
        settings = dataclasses.replace(settings, hidden_dim=64, head_learning_rate=0.01)
    else:
        settings = dataclasses.replace(settings, head_learning_rate=0.3)
    encoder = _encoder()
    before = {key: tensor.clone() for key, tensor in encoder.state_dict().items()}
    state = torch.random.get_rng_state()
    result = fine_tune(encoder, few, test, CONFIG, settings=settings)
    assert result.accuracy > 0.5
    assert result.best_accuracy >= result.accuracy
    assert result.num_labelled == len(few)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[key], tensor) for key, tensor in encoder.state_dict().items())
    assert fine_tune(encoder, few, test, CONFIG, settings=settings) == result


def test_frozen_encoder_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.nn.Module] = []

    def recorded(encoder: torch.nn.Module, head: torch.nn.Module, settings: FineTuneSettings) -> torch.optim.Optimizer:
        copies.append(encoder)
        return _optimizer(encoder, head, settings)

    monkeypatch.setattr("fedssl.evaluation.fine_tuning._optimizer", recorded)
    train = load_dataset("digits", "train").subset(np.arange(64))
    encoder = _encoder()
    settings = FineTuneSettings(encoder_learning_rate=None, head_learning_rate=0.1, epochs=2, batch_size=16)
    fine_tune(encoder, train, train, CONFIG, settings=settings)
    tuned = copies[0].state_dict()
    changed = {name for name, tensor in encoder.state_dict().items() if not torch.equal(tuned[name], tensor)}
    assert changed == {name for name, _ in encoder.named_buffers()}, "only BatchNorm's statistics follow the images"


def test_labelled_share() -> None:
    labels = np.repeat(np.arange(3), [100, 50, 2])
    chosen = labelled_share(labels, 0.1, seed=0)
    assert np.bincount(labels[chosen]).tolist() == [10, 5, 1]
    assert np.array_equal(chosen, labelled_share(labels, 0.1, seed=0))
    assert not np.array_equal(chosen, labelled_share(labels, 0.1, seed=1))
    assert labelled_share(labels, 0.1, seed=0, rule="first").tolist() == list(range(15))
    with pytest.raises(ValueError, match="share"):
        labelled_share(labels, 0, seed=0)


def test_unlabelled_images_are_refused() -> None:
    train = load_dataset("digits", "train")
    with pytest.raises(DataError, match="labelled"):
        fine_tune(_encoder(), dataclasses.replace(train, labels=None), train, CONFIG)
