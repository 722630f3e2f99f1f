"""The numbers that a simulation reports of its rounds: bytes, images and measures."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.artifacts.header import file_bytes
from fedssl.artifacts.tensors import serialised
from fedssl.data import ImageData, load_dataset, save_npz
from fedssl.engine import start_run
from fedssl.errors import Cancelled, DataError, DeviceError, ResultsError, SpecError
from fedssl.experiments import runs
from fedssl.experiments.checkpoints import MANIFEST, FolderCheckpoint
from fedssl.experiments.runs import run_in_folder
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData
from fedssl.simulation import judged_models, simulate
from fedssl.simulation.inputs import fingerprint
from support.methods import ALL_METHODS, TRAINED_METHODS, context, method_spec, methods_of_this_run, shards
from support.tensors import are_equal

KNN = {"dataset": "digits", "every": 2, "max_train": 200, "measures": ["knn"]}


@pytest.mark.parametrize("name", ALL_METHODS)
def test_reported_bytes_are_those_of_the_files_that_are_sent(name: str) -> None:
    spec = method_spec(name)
    method = METHODS[name]
    plan = method.bind(spec).plan

    assert file_bytes(plan.broadcast) == len(serialised(start_run(method, context(spec, 0)).broadcast))


def test_the_bytes_images_and_time_of_a_round_are_those_of_the_cohort() -> None:
    spec = method_spec("fedsimclr", cohort={"fraction": 0.67}, training={"batch_size": 32, "local_epochs": 2})
    sizes = {name: len(images) for name, images in shards(spec).items()}

    result = simulate(spec, shards(spec))

    for record in result.history:
        assert len(record.clients) == 2
        # drop_last: images that do not fill a batch of 32 are left out, twice.
        assert record.num_images == sum(2 * (sizes[name] // 32) * 32 for name in record.clients)
        assert record.bytes_down == record.bytes_up == 2 * len(serialised(result.model))
        assert record.seconds > 0


def test_only_images_that_were_trained_on_are_counted() -> None:
    """Images that are held out, or left out because of their group, are not counted."""
    spec = method_spec("classifier", training={"batch_size": 8, "local_epochs": 2})
    first = simulate(spec, shards(spec)).history[0]
    assert first.num_images == sum(2 * (count // 8) * 8 for count in first.num_examples.values())
    images = ImageData(np.zeros((24, 1, 8, 8), np.uint8), groups=np.array([*[0] * 16, *range(1, 9)]))
    grouped = method_spec(
        "fedsimclr", data={**spec.data.model_dump(), "distinct_groups": True}, training={"batch_size": 8}, cohort={}
    )
    # Three batches, each with one of the 16 images of group 0.
    assert simulate(grouped, {"client-0": images}).history[0].num_images == 3 + 8


def test_a_method_that_sends_nothing_uploads_empty_files() -> None:
    spec = method_spec("single")

    result = simulate(spec, shards(spec))

    assert result.history[0].bytes_up == 3 * len(serialised({})) < 100
    assert result.history[0].bytes_down > 10_000


def test_the_encoder_is_evaluated_in_the_rounds_of_the_spec() -> None:
    spec = method_spec("fedsimclr", num_rounds=5, evaluation=KNN)
    told: list[int] = []

    result = simulate(spec, shards(spec), on_evaluation=lambda number, measures: told.append(number))

    assert told == sorted(result.evaluations_by_round) == [0, 2, 4, 5]
    assert result.evaluations == result.evaluations_by_round[5]
    assert 0.1 < result.evaluations["knn"] <= 1


def test_evaluation_does_not_change_a_bit_of_the_training() -> None:
    spec = method_spec("fedbyol")

    plain, judged = simulate(spec, shards(spec)), simulate(method_spec("fedbyol", evaluation=KNN), shards(spec))

    assert serialised(plain.model) == serialised(judged.model)


def test_every_client_is_evaluated_if_nothing_is_sent() -> None:
    spec = method_spec("single", evaluation={**KNN, "every": 0})

    result = simulate(spec, shards(spec))

    assert sorted(judged_models(result)) == sorted(shards(spec))
    assert sorted(result.evaluations_by_round) == [2]
    assert result.evaluations["knn_min"] <= result.evaluations["knn"]


def test_a_missing_evaluation_set_is_reported_before_training() -> None:
    spec = method_spec("fedsimclr", evaluation={**KNN, "dataset": "nowhere"})
    trained: list[int] = []

    with pytest.raises(DataError, match="found no data set at nowhere"):
        simulate(spec, shards(spec), on_round=lambda record: trained.append(record.round_number))
    assert trained == []


def test_the_clients_whose_updates_count_can_be_given() -> None:
    """As in a deployed run, a round can be skipped. It can also have the cohort that would be drawn anyway."""
    spec = method_spec("fedsimclr", num_rounds=1)
    skipped = simulate(spec, shards(spec), cohorts={1: ()})
    assert all(torch.equal(skipped.model[name], skipped.initial[name]) for name in skipped.model)
    assert [record.clients for record in skipped.history] == [{}]
    whole, given = simulate(spec, shards(spec)), simulate(spec, shards(spec), cohorts={1: sorted(shards(spec))})
    assert all(torch.equal(whole.model[name], given.model[name]) for name in whole.model)


@pytest.mark.parametrize("name", methods_of_this_run(TRAINED_METHODS))
def test_a_client_with_one_image_takes_no_step_and_one_without_images_is_refused(name: str) -> None:
    spec = method_spec(name, num_rounds=1)
    few = dict(shards(spec))
    few["client-0"] = few["client-0"].subset(torch.arange(1).numpy())
    model = simulate(spec, few).model
    assert all(bool(tensor.isfinite().all()) for tensor in model.values() if tensor.is_floating_point())
    few["client-0"] = few["client-0"].subset(torch.arange(0).numpy())
    with pytest.raises(DataError, match=r"client-0 has no images to train on: try another partition\.seed"):
        simulate(spec, few)


def test_a_min_updates_above_the_number_of_clients_is_refused() -> None:
    spec = method_spec("fedsimclr", cohort={"min_updates": 4})
    with pytest.raises(SpecError, match=r"min_updates is 4, more than a cohort of these 3 clients"):
        simulate(spec, shards(spec))


def test_invalid_arguments_are_reported_as_on_the_command_line() -> None:
    spec = method_spec("fedsimclr")
    large = dict.fromkeys("abc", ImageData(np.zeros((4, 3, 20, 20), np.uint8)))

    with pytest.raises(SpecError, match="num_rouds: there is no such key; did you mean num_rounds"):
        simulate({"num_rouds": 1})
    with pytest.raises(SpecError, match="a simulation needs images"):
        simulate({"num_rounds": 1})
    with pytest.raises(DeviceError, match="device tpu9 cannot be used here: "):
        simulate(spec, device="tpu9")
    with pytest.raises(SpecError, match="jobs is 0: give the number of processes"):
        simulate(spec, jobs=0)
    with pytest.raises(DataError, match=r"images of a are 3 x 20 x 20, but the run's are 1 x .*fedssl\.data\.conform"):
        simulate(spec, large)


def test_running_out_of_memory_is_reported_with_the_setting_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("fedssl.simulation.simulator.run_local_round", exhausted)  # stands for a GPU without memory

    with pytest.raises(DeviceError, match=r"out of memory on cpu with batch size 32: lower training.batch_size"):
        simulate(method_spec("fedsimclr"))


def test_images_that_do_not_fit_on_the_device_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(ClientData, "to", exhausted)  # stands for a GPU without memory

    with pytest.raises(DeviceError, match=r"out of memory on cpu .*fewer or smaller images"):
        simulate(method_spec("fedsimclr"))


def test_a_checkpoint_of_other_images_is_refused(tmp_path: Path) -> None:
    spec = method_spec("fedsimclr")
    images = shards(spec)
    name = next(iter(images))

    def stop(_: object) -> None:
        raise Cancelled("interrupted")

    with pytest.raises(Cancelled):
        simulate(spec, images, checkpoint=FolderCheckpoint(tmp_path), on_round=stop)
    others = (images[name].subset(np.arange(40)), dataclasses.replace(images[name], images=255 - images[name].images))
    for other in others:
        with pytest.raises(ResultsError, match="images of the clients or of the evaluation have changed"):
            simulate(spec, {**images, name: other}, checkpoint=FolderCheckpoint(tmp_path))
    assert simulate(spec, images, checkpoint=FolderCheckpoint(tmp_path)).rounds_done == spec.num_rounds


def test_a_checkpoint_of_another_evaluation_set_is_refused(tmp_path: Path) -> None:
    """Otherwise the accuracies of one run would be those on two sets."""
    place, digits = tmp_path / "labelled.npz", load_dataset("digits", "test")
    spec = method_spec("fedsimclr", evaluation={**KNN, "dataset": str(place)})

    def stop(_: object) -> None:
        raise Cancelled("interrupted")

    save_npz(place, digits, digits)
    with pytest.raises(Cancelled):
        simulate(spec, shards(spec), checkpoint=FolderCheckpoint(tmp_path / "run"), on_round=stop)
    save_npz(place, digits, digits.subset(np.arange(50)))
    with pytest.raises(ResultsError, match="images of the clients or of the evaluation have changed"):
        simulate(spec, shards(spec), checkpoint=FolderCheckpoint(tmp_path / "run"))


def test_a_simulation_whose_checkpoint_has_no_digest_of_the_evaluation_images_continues(tmp_path: Path) -> None:
    """Versions until 27 November 2026 wrote such checkpoints."""
    spec = method_spec("fedsimclr", num_rounds=2, evaluation=KNN)
    own, checkpoint = shards(spec), FolderCheckpoint(tmp_path / "run")

    def stop(_: object) -> None:
        raise Cancelled("interrupted")

    with pytest.raises(Cancelled):
        simulate(spec, own, checkpoint=checkpoint, on_round=stop)
    _replace_images(tmp_path / "run", fingerprint(own, None, None))
    continued = simulate(spec, own, checkpoint=FolderCheckpoint(tmp_path / "run"))
    assert are_equal(continued.model, simulate(spec, own).model)

    with pytest.raises(Cancelled):
        simulate(spec, own, checkpoint=FolderCheckpoint(tmp_path / "changed"), on_round=stop)
    _replace_images(tmp_path / "changed", fingerprint(dict.fromkeys(own, next(iter(own.values()))), None, None))
    with pytest.raises(ResultsError, match="images of the clients or of the evaluation have changed"):
        simulate(spec, own, checkpoint=FolderCheckpoint(tmp_path / "changed"))


def _replace_images(folder: Path, digest: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "images": digest}))


def test_a_finished_run_of_other_images_is_refused(tmp_path: Path) -> None:
    """A finished run can be read if its images are no longer here."""
    place, folder, digits = tmp_path / "own.npz", tmp_path / "run", load_dataset("digits", "test")
    save_npz(place, digits, digits)
    partition = {"dataset": str(place), "num_clients": 3}
    spec = method_spec("fedsimclr", num_rounds=1, partition=partition, evaluation=KNN)
    finished = run_in_folder(spec, folder)
    assert run_in_folder(spec, folder) == finished

    save_npz(place, digits.subset(np.arange(100)), digits)
    with pytest.raises(ResultsError, match="evaluation have changed since the run in"):
        run_in_folder(spec, folder)
    place.unlink()
    assert run_in_folder(spec, folder) == finished


def test_the_images_of_a_finished_run_are_decoded_again_only_if_a_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = load_dataset("digits", "test")
    for number, image in enumerate(digits.images[:60]):
        (tmp_path / "own" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(tmp_path / "own" / str(number % 2) / f"{number}.png")
    spec = method_spec("fedsimclr", num_rounds=1, partition={"dataset": str(tmp_path / "own"), "num_clients": 3})
    finished = run_in_folder(spec, tmp_path / "run")

    with monkeypatch.context() as unread:
        unread.setattr(runs, "images_digest", lambda *_, **__: pytest.fail("the images were decoded"))
        assert run_in_folder(spec, tmp_path / "run") == finished
    (tmp_path / "own" / "0" / "0.png").touch()
    assert run_in_folder(spec, tmp_path / "run") == finished
    Image.fromarray(255 - digits.images[0, 0]).save(tmp_path / "own" / "0" / "0.png")
    with pytest.raises(ResultsError, match="evaluation have changed since the run in"):
        run_in_folder(spec, tmp_path / "run")


def test_a_spec_may_be_given_as_a_dictionary() -> None:
    spec = method_spec("fedsimclr")

    assert simulate(spec.model_dump(mode="json")).spec == spec


SITES = {"at": "sites", "every": 2, "sites": {"classes": [str(digit) for digit in range(10)], "min_count": 2}}


def test_clients_evaluate_the_encoder_on_their_own_images() -> None:
    spec = method_spec("fedsimclr", num_rounds=3, evaluation=SITES)

    result = simulate(spec, shards(spec))

    assert sorted(result.site_evaluations) == [0, 2, 3]
    for answers in result.site_evaluations.values():
        assert sorted(answers) == sorted(shards(spec))
        assert all(
            not isinstance(counts, str) and set(counts.measures) == {"probe", "knn"} for counts in answers.values()
        )
    assert result.evaluations_by_round == {}
    assert simulate(spec, shards(spec)).site_evaluations == result.site_evaluations


def test_a_round_without_new_weights_is_evaluated_only_if_it_is_the_last() -> None:
    spec = method_spec("fedsimclr", num_rounds=2, evaluation={**SITES, **KNN, "at": "both", "every": 1})

    result = simulate(spec, shards(spec), cohorts={1: [], 2: []})

    assert sorted(result.evaluations_by_round) == sorted(result.site_evaluations) == [0, 2]


def test_sites_of_a_method_that_sends_nothing_evaluate_once_they_have_trained() -> None:
    spec = method_spec("single", cohort={"fraction": 0.34}, evaluation={**SITES, "every": 1})

    result = simulate(spec, shards(spec))

    trained: set[str] = set()
    for record in result.history:
        trained |= record.clients.keys()
        answers = result.site_evaluations[record.round_number]
        assert {name for name, answer in answers.items() if not isinstance(answer, str)} == trained
        assert all("has not trained up to" in str(answers[other]) for other in answers.keys() - trained)


def test_a_site_without_its_state_does_not_evaluate_its_own_norms() -> None:
    """A deployed site cannot do so either. It can again once one of its updates is used."""
    model = {"encoder": {"widths": [8, 16]}, "batch_norm": "local"}
    spec = method_spec("fedsimclr", num_rounds=3, model=model, evaluation={**SITES, "every": 1})
    lost, *others = sorted(shards(spec))

    result = simulate(spec, shards(spec), lost_states={2: [lost]}, cohorts={2: others})

    refusals = {number: answers[lost] for number, answers in result.site_evaluations.items()}
    assert [number for number, answer in refusals.items() if isinstance(answer, str)] == [2]
    assert "has lost its client state" in str(refusals[2])


def test_a_client_with_too_few_images_reports_its_reason_and_does_not_delay_the_run() -> None:
    sites = {**SITES, "sites": {**SITES["sites"], "min_count": 30}}
    spec = method_spec("fedsimclr", num_rounds=1, evaluation=sites)

    result = simulate(spec, shards(spec))

    assert len(result.history) == 1
    assert all("a classifier needs 2" in str(answer) for answer in result.site_evaluations[1].values())


def test_a_class_that_the_spec_does_not_list_is_refused_before_training() -> None:
    spec = method_spec("fedsimclr", evaluation={**SITES, "sites": {"classes": ["0", "1"]}})

    with pytest.raises(DataError, match=r"the images of .*, class 2: '2' is not a class of the run"):
        simulate(spec, shards(spec))
