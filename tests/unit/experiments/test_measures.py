"""The labelled images of a semi-supervised measure: if the run held images out, they are those that no client had."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedssl.data import ImageData, save_npz
from fedssl.data.partitioning import partition_dataset
from fedssl.errors import ResultsError
from fedssl.evaluation import FineTuneSettings, labelled_share
from fedssl.evaluation.suite import Labelled
from fedssl.experiments import measures
from fedssl.experiments.measures import _held_out, measure_cell
from fedssl.experiments.papers import Measure, select
from fedssl.experiments.runs import ComputeSettings, FinishedRun
from fedssl.protocol.runs import RunSpec

LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(2), 100))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with a data set whose image i has only pixels of value i, so that images can be identified."""
    images = np.arange(200, dtype=np.uint8).repeat(64).reshape(200, 1, 8, 8)
    save_npz(tmp_path / "set.npz", ImageData(images, LABELS), ImageData(images, LABELS))
    return tmp_path


def spec(max_train: int | None = None, **partition: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "seed": 3,
            "data": {"channels": 1, "image_size": 8},
            "partition": {"dataset": "set.npz", "num_clients": 4, "scheme": "iid", "seed": 3, **partition},
            "evaluation": {"dataset": "set.npz", "max_train": max_train},
        }
    )


def numbers(images: ImageData) -> list[int]:
    return [int(image[0, 0, 0]) for image in images.images]


@pytest.mark.parametrize(("share", "count"), [(0.1, 20), (0.05, 10)])
def test_labelled_images_are_the_usual_ones_and_no_client_has_them(root: Path, share: float, count: int) -> None:
    wanted = spec(hold_out=0.1)

    few = _held_out(wanted, share, ComputeSettings(data_root=root))

    assert few is not None
    assert few.labels is not None
    assert numbers(few) == labelled_share(LABELS, share, seed=3).tolist()
    assert np.bincount(few.labels).tolist() == [count // 2, count // 2]
    shards = partition_dataset(wanted.partition, wanted.data, root).by_client.values()  # type: ignore[arg-type]
    trained = [number for shard in shards for number in numbers(shard)]
    assert len(trained) == 180
    assert not set(trained) & set(numbers(few))


def test_a_limit_of_training_images_limits_the_labelled_ones_in_proportion(root: Path) -> None:
    few = _held_out(spec(hold_out=0.1, max_train=100), 0.1, ComputeSettings(data_root=root))

    assert few is not None
    assert len(few) == 10
    assert set(numbers(few)) <= set(labelled_share(LABELS, 0.1, seed=3))


@pytest.mark.parametrize("changes", [{}, {"hold_out": 0.05}, {"hold_out": 0.1, "dataset": "digits"}])
def test_labelled_images_are_drawn_from_all_images_unless_that_share_was_held_out(
    root: Path, changes: dict[str, Any]
) -> None:
    assert _held_out(spec(**changes), 0.1, ComputeSettings(data_root=root)) is None


@dataclass
class Tuned:
    accuracy: float
    best_accuracy: float


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the encoders that are tuned, in order; the accuracy of client-N is N tenths, and the best twice that."""
    order: list[str] = []
    monkeypatch.setattr(measures, "_labelled", lambda *_, **__: Labelled(None, None))  # type: ignore[arg-type]
    monkeypatch.setattr(measures, "_held_out", lambda *_: None)
    monkeypatch.setattr(measures, "load_tensors", lambda path: path.name)
    monkeypatch.setattr(measures, "load_encoder", lambda name, spec: name)

    def tune(encoder: str, *_: object, settings: FineTuneSettings, on_progress: Any, **__: object) -> Tuned:
        assert settings.seed == 3, "the run's"
        order.append(encoder)
        on_progress(0.5)
        share = int(encoder.removesuffix(".safetensors")[-1]) / 10
        return Tuned(share, 2 * share)

    monkeypatch.setattr(measures, "semi_supervised", tune)
    return order


def finished() -> FinishedRun:
    return FinishedRun(1, 1, 0, 0, 1.0, {1: {"probe": 0.5}}, {}, [])


def test_an_interrupted_fine_tuning_continues_after_the_last_encoder(tmp_path: Path, tuned: list[str]) -> None:
    """A method without a federation has an encoder per client, each of which is tuned for minutes."""
    for number in (1, 2):
        (tmp_path / f"encoder-client-{number}.safetensors").touch()
    cell = replace(
        select("fedx-1:SimCLR@cifar10")[0],
        measures={
            "probe": Measure(kind="probe"),
            "10%": Measure(kind="fine_tune", settings="ssd", share=0.1),
            "best": Measure(kind="fine_tune", settings="ssd", share=0.1, use="best"),
        },
    )
    told: list[tuple[str, float | None]] = []

    def interrupt(name: str, share: float | None) -> None:
        told.append((name, share))
        if share == 0.75:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_cell(cell, spec(), finished(), tmp_path, ComputeSettings(), interrupt)
    assert told == [("10%", None), ("10%", 0.25), ("10%", 0.75)]
    again = measure_cell(cell, spec(), finished(), tmp_path, ComputeSettings())

    assert again == {"probe": 50.0, "10%": pytest.approx(15), "best": pytest.approx(30)}
    one, two = "encoder-client-1.safetensors", "encoder-client-2.safetensors"
    assert tuned == [one, two, two, one, two]
    assert measure_cell(cell, spec(), finished(), tmp_path, ComputeSettings()) == again
    assert len(tuned) == 5, "all of it was stored"


def test_measures_of_the_run_that_were_not_made_are_refused(tmp_path: Path) -> None:
    cell = replace(select("fedx-1:SimCLR@cifar10")[0], measures={"rank": Measure(kind="effective_rank")})
    with pytest.raises(ResultsError, match="the run's effective_rank was not measured: do not change"):
        measure_cell(cell, spec(), finished(), tmp_path, ComputeSettings())
