"""`fedssl.evaluation.suite`: its numbers are those of the protocols and reproducible, and nothing else changes."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.data import ImageData, load_dataset, save_npz
from fedssl.errors import DataError, SpecError
from fedssl.evaluation import (
    alignment,
    effective_rank,
    extract_features,
    feature_std,
    knn_accuracy,
    labels_of,
    linear_probe,
    probe_encoder,
    uniformity,
)
from fedssl.evaluation.probe import PROBES
from fedssl.evaluation.suite import (
    RESULTS,
    Labelled,
    detailed_evaluation,
    evaluate_encoder,
    load_encoder,
    load_labelled,
    load_projected,
)
from fedssl.models import build_encoder, initialised
from fedssl.protocol.data import DataConfig
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec

DATA = DataConfig(channels=1, image_size=16)
CONFIG = EvaluationConfig(dataset="digits")


def _encoder() -> torch.nn.Module:
    return initialised(lambda: build_encoder(EncoderConfig(widths=(8, 16)), 1), 0)


@pytest.fixture(scope="module")
def labelled() -> Labelled:
    return load_labelled("digits", DATA, max_train=400, max_test=None, seed=0)


def test_the_results_are_those_of_the_protocols_and_are_reproducible(labelled: Labelled) -> None:
    encoder = _encoder()
    sides = [s for x in (labelled.train, labelled.test) for s in (extract_features(encoder, x, DATA), labels_of(x))]
    views = [
        extract_features(encoder, labelled.test, DATA, augmentation=DATA.augmentation, seed=seed) for seed in (0, 1)
    ]
    expected = {
        "probe": linear_probe(*sides).accuracy,
        "knn": knn_accuracy(sides[0], sides[1], sides[2], sides[3]),
        "uniformity": uniformity(sides[2]),
        "alignment": alignment(*views),
        "effective_rank": effective_rank(sides[2]),
        "effective_rank_centered": effective_rank(sides[2], center=True),
        "feature_std": feature_std(sides[2]),
    }
    state = torch.random.get_rng_state()
    said: list[tuple[str, float | None]] = []
    found = evaluate_encoder(
        encoder, labelled, CONFIG, DATA, on_progress=lambda what, share: said.append((what, share))
    )
    assert found == expected
    assert list(found) == [name for names in RESULTS.values() for name in names]
    assert 0 < found["alignment"] < 4
    assert found["probe"] > 0.6
    assert torch.equal(state, torch.random.get_rng_state())
    assert ("representations of the training images", 1.0) in said
    assert evaluate_encoder(_encoder(), labelled, CONFIG, DATA) == found


def test_each_measure_is_reported_as_soon_as_it_is_done(labelled: Labelled) -> None:
    told: list[dict[str, float]] = []
    found = evaluate_encoder(_encoder(), labelled, CONFIG, DATA, on_results=told.append)
    assert [tuple(results) for results in told] == list(RESULTS.values())
    assert {name: value for results in told for name, value in results.items()} == found
    for measure, alone in zip(RESULTS, told, strict=True):
        assert evaluate_encoder(_encoder(), labelled, CONFIG.model_copy(update={"measures": (measure,)}), DATA) == alone


@pytest.mark.parametrize("measure", RESULTS)
def test_only_the_requested_measure_is_computed(labelled: Labelled, measure: str) -> None:
    config = CONFIG.model_copy(update={"measures": (measure,)})
    assert tuple(evaluate_encoder(_encoder(), labelled, config, DATA)) == RESULTS[measure]  # type: ignore[index]


def test_a_papers_settings_may_use_augmented_training_images(labelled: Labelled) -> None:
    few = Labelled(labelled.train.subset(np.arange(64)), labelled.test.subset(np.arange(64)))
    config = EvaluationConfig(dataset="digits", measures=("probe",), settings="flesd")
    found = detailed_evaluation(_encoder(), few, config, DATA)
    assert found.probe == probe_encoder(_encoder(), few.train, few.test, DATA, settings=PROBES["flesd"])
    assert found.probe is not None
    assert found.results == {"probe": found.probe.accuracy}


def test_a_diverged_encoder_gives_nan_for_every_result(labelled: Labelled) -> None:
    encoder = _encoder()
    with torch.no_grad():
        next(encoder.parameters()).fill_(math.nan)
    found = detailed_evaluation(encoder, labelled, CONFIG, DATA)
    assert list(found.results) == [name for names in RESULTS.values() for name in names]
    assert all(math.isnan(value) for value in found.results.values())
    assert found.probe is None


def test_images_are_chosen_by_the_seed_and_conformed_to_the_encoders_shape() -> None:
    data = DataConfig(channels=3, image_size=24)
    first, second = (load_labelled("digits", data, max_train=50, max_test=20, seed=seed) for seed in (0, 1))
    assert first.train.images.shape == (50, 3, 24, 24)
    assert first.test.images.shape == (20, 3, 24, 24)
    assert not np.array_equal(first.train.images, second.train.images)
    again = load_labelled("digits", data, max_train=50, max_test=20, seed=0)
    assert np.array_equal(first.train.images, again.train.images)
    assert len(load_labelled("digits", DATA, max_train=None, max_test=None, seed=0).train) == 1437


def test_images_without_labels_or_with_too_many_classes_are_refused(tmp_path: Path) -> None:
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    save_npz(tmp_path / "bare.npz", ImageData(train.images), ImageData(test.images))
    with pytest.raises(DataError, match=r"train split of .*bare\.npz has no labels"):
        load_labelled(str(tmp_path / "bare.npz"), DATA, max_train=None, max_test=None, seed=0)
    many = ImageData(train.images, np.arange(len(train), dtype=np.int64) * 500)
    save_npz(tmp_path / "many.npz", many, test)
    with pytest.raises(DataError, match="at most 65536 classes"):
        load_labelled(str(tmp_path / "many.npz"), DATA, max_train=None, max_test=None, seed=0)


def test_models_are_loaded_from_tensors_or_refused_with_the_missing_part() -> None:
    spec = RunSpec.model_validate(
        {"model": {"encoder": {"widths": [8, 16]}, "projector": {"hidden_dims": [8], "out_dim": 4}},
         "data": {"channels": 1, "image_size": 16}}
    )  # fmt: skip
    encoder = _encoder()
    tensors = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    loaded = load_encoder(tensors, spec).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in encoder.state_dict().items())
    with pytest.raises(SpecError, match="holds no projector"):
        load_projected(tensors, spec)
    with pytest.raises(SpecError, match="holds no encoder"):
        load_encoder({}, spec)
    with pytest.raises(SpecError, match="does not hold the encoder"):
        load_encoder({"encoder.x": torch.zeros(1)}, spec)
    with pytest.raises(SpecError, match="has no projector"):
        load_projected(tensors, spec.model_copy(update={"model": spec.model.model_copy(update={"projector": None})}))
