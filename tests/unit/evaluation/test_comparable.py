"""Evaluations with different settings, or of other images under the same name, are shown separately."""

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from fedssl.cli.run.evaluations import best_rounds
from fedssl.cli.run.metric_files import numbers_of
from fedssl.cli.run.run_scores import find_scores
from fedssl.client.model_card import _scores
from fedssl.evaluation.comparable import names_of, setting_of
from fedssl.protocol.views import EvaluationView


def evaluation(
    number: int, probe: float, images: str = "a", dataset: str = "held-out", **config: Any
) -> EvaluationView:
    times = dict.fromkeys(("created_at", "started_at", "finished_at"), "2026-11-20T12:00:00Z")
    ids = {"id": uuid4(), "run_id": uuid4(), "model": "0" * 64, "dataset_digest": images * 64}
    rest = {"state": "completed", "reason": None, "progress": None, "num_tries": 1}
    judging = {"dataset": dataset, "measures": ["probe"], **config}
    return EvaluationView.model_validate(
        {**ids, **times, **rest, "dataset": dataset, "round_number": number, "config": judging,
         "results": {"probe": probe}}
    )  # fmt: skip


def client_of(*rows: EvaluationView) -> Any:
    return SimpleNamespace(evaluations=lambda run_id: rows, metrics=lambda run_id: [])


def test_settings_that_differ_within_a_data_set_follow_its_name() -> None:
    rows = [
        evaluation(1, 0.5),
        evaluation(1, 0.5, settings="ssd"),
        evaluation(1, 0.5, settings="ssd", max_train=None),
        evaluation(1, 0.5, dataset="other", max_test=9),
    ]
    names = names_of(rows)
    assert [names[setting_of(row)] for row in rows] == [
        "held-out settings fast max_train 10000",
        "held-out settings ssd max_train 10000",
        "held-out settings ssd max_train all",
        "other",
    ]


def test_a_stored_config_and_its_view_have_the_same_setting() -> None:
    row = evaluation(1, 0.5, max_train=None)
    stored = {**row.config.model_dump(mode="json"), "of_a_newer_version": 1}
    assert setting_of(row) == setting_of(SimpleNamespace(dataset="held-out", dataset_digest="a" * 64, config=stored))


def test_the_card_names_the_settings_of_its_scores() -> None:
    text = _scores([evaluation(1, 0.5), evaluation(1, 0.75, settings="ssd"), evaluation(1, 0.25, dataset="other")])
    assert [line.split(" | ")[0].strip("| ") for line in text.splitlines()[4:]] == [
        "held-out settings fast",
        "held-out settings ssd",
        "other",
    ]


def test_exported_numbers_of_two_settings_are_two_series() -> None:
    client = client_of(evaluation(1, 0.5), evaluation(1, 0.75, settings="ssd"))
    found = {(number.series, number.value) for number in numbers_of(client, SimpleNamespace(id=uuid4()))}  # type: ignore[arg-type]
    assert found == {("held-out settings fast.probe", 0.5), ("held-out settings ssd.probe", 0.75)}


def test_other_images_under_the_same_name_are_not_compared() -> None:
    """The encoder before training was evaluated on the first images, and the last one on the second images."""
    rows = [evaluation(0, 0.25), evaluation(1, 0.5), evaluation(1, 0.875, "b"), evaluation(2, 0.75, "b")]
    first, second = find_scores(client_of(*rows), uuid4())
    assert (first.name, first.last_round, first.untrained) == ("held-out images aaaaaaaa", 1, {"probe": 0.25})
    assert (second.name, second.last_round, second.untrained) == ("held-out images bbbbbbbb", 2, {})
    assert second.best == {"probe": (1, 0.875)}
    marks, sentences = best_rounds(rows)
    assert marks == {rows[1].id: ["last", "best by probe"], rows[2].id: ["best by probe"], rows[3].id: ["last"]}
    assert [sentence.partition(",")[0] for sentence in sentences] == [first.name, second.name]
