"""Estimates: exact bytes once an aggregator has computed the plan, and times from earlier work."""

from pathlib import Path

import pytest
from psycopg.types.json import Jsonb

from fedssl.artifacts.header import file_bytes
from fedssl.client import InvalidRequest, Rejected
from fedssl.methods import METHODS
from fedssl.protocol.policy import PolicyNotice
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import Tables


def test_bytes_are_known_once_an_aggregator_has_computed_the_plan(coordinator: Coordinator) -> None:
    for name in ("a", "b"):
        coordinator.worker(name)
    spec = tiny_spec(num_rounds=5, cohort={"fraction": 0.5}, model={"encoder": {"widths": [5, 7]}})
    before = coordinator.client.estimate(spec)
    assert (before.clients, before.clients_per_round, before.num_missing) == (["a", "b"], 1, 0)
    assert (before.bytes_in_total, before.is_measuring) == (None, True)

    coordinator.compute_plans()

    after = coordinator.client.estimate(spec.model_copy(update={"name": "other", "seed": 3}))
    plan = METHODS[spec.method.name].bind(spec).plan
    down, up = file_bytes(plan.broadcast), file_bytes(plan.update)
    assert (after.bytes_down_per_client, after.bytes_up_per_client) == (down, up)
    assert (after.bytes_in_total, after.is_measuring) == (5 * (down + up), False)
    assert list(coordinator.client.runs()) == []


def test_a_plan_is_computed_even_if_settings_of_the_spec_require_each_other(coordinator: Coordinator) -> None:
    """The reducer needs `cohort.min_updates`, and the warm-up `num_rounds`, on which the plan does not depend."""
    method = {**tiny_spec().model_dump(mode="json")["method"], "reducer": {"name": "median"}}
    training = {"optimizer": {"warmup_rounds": 20}}
    spec = tiny_spec(num_rounds=30, method=method, cohort={"min_updates": 3}, training=training)
    assert coordinator.client.estimate(spec).is_measuring

    coordinator.compute_plans()

    after = coordinator.client.estimate(spec)
    assert (after.is_measuring, after.bytes_up_per_client) == (
        False,
        file_bytes(METHODS[spec.method.name].bind(spec).plan.update),
    )


def test_a_bound_on_tensors_that_the_method_does_not_send_is_refused_with_the_reason(coordinator: Coordinator) -> None:
    spec = tiny_spec(robustness={"max_center_norm": 5.0})
    assert coordinator.client.estimate(spec).is_measuring

    coordinator.compute_plans()

    with pytest.raises(Rejected, match=r"sends no cluster centers: leave robustness\.max_center_norm out"):
        coordinator.client.create_run(spec)
    assert not coordinator.client.estimate(tiny_spec(robustness={"max_update_norm": 5.0})).left_out


def test_a_spec_without_a_plan_is_refused_with_the_reason(coordinator: Coordinator) -> None:
    coordinator.worker("a")
    model = tiny_spec().model_dump(mode="json")["model"]
    spec = tiny_spec(model={**model, "trainable": ["layer7.*"]})  # the reason is cached: no other test may use this
    assert coordinator.client.estimate(spec).is_measuring

    coordinator.compute_plans()

    for same in (spec, spec.model_copy(update={"name": "other", "seed": 3})):
        for ask in (coordinator.client.estimate, coordinator.client.create_run):
            with pytest.raises(
                Rejected, match=r"model\.trainable names layer7\.\*, which matches no parameter"
            ) as error:
                ask(same)
            assert str(error.value).count("layer7") == 1, "an error is printed once"
    assert list(coordinator.client.runs()) == []


def test_estimated_times_are_those_of_the_slowest_client_in_earlier_runs(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "ab")
    scenario.work("a", "b")
    scenario.advance()
    for name, seconds in (("a", 10), ("b", 30)):
        tables.execute(
            "UPDATE assignments SET leased_at = closed_at - make_interval(secs => %s) "
            "WHERE client_id = %s AND round_number = 1",
            seconds,
            name,
        )
    coordinator.worker("c")  # has never trained: it counts as a client of median speed

    found = coordinator.client.estimate(tiny_spec(num_rounds=4, training={"local_epochs": 2, "batch_size": 8}))

    epochs = max(scenario.run.spec.training.local_epochs, 1)
    assert found.seconds_per_round == pytest.approx(30 * 2 / epochs)
    assert found.seconds_in_total == pytest.approx(4 * 30 * 2 / epochs)
    assert found.num_measured == 2
    half = coordinator.client.estimate(tiny_spec(training={"local_epochs": 2, "epoch_fraction": 0.5, "batch_size": 8}))
    assert half.seconds_per_round == pytest.approx(30 / epochs)
    other = coordinator.client.estimate(tiny_spec(model={"encoder": {"widths": [3, 5]}}))
    assert (other.seconds_per_round, other.num_measured) == (None, 0)


def test_a_client_whose_policy_refuses_the_update_is_left_out(coordinator: Coordinator, tables: Tables) -> None:
    coordinator.worker("a")
    coordinator.worker("b")
    policy = PolicyNotice(digest="0" * 64, allow=()).model_dump(mode="json")
    tables.execute("UPDATE clients SET policy = %s WHERE id = 'b'", Jsonb(policy))
    spec = tiny_spec(cohort={"min_clients": 2})
    coordinator.client.estimate(spec)
    coordinator.compute_plans()

    found = coordinator.client.estimate(spec)

    assert (found.clients, list(found.left_out), found.num_missing) == (["a"], ["b"], 1)
    assert "its data owner's policy" in found.left_out["b"]


def test_editing_name_tags_and_notes_changes_nothing_else(coordinator: Coordinator) -> None:
    run = coordinator.client.create_run(tiny_spec(name="before"), start=False)
    edited = coordinator.client.edit_run(run.id, name="after", tags=["b", "a", "b"], notes="two sites")
    assert (edited.name, edited.tags, edited.notes) == ("after", ["a", "b"], "two sites")
    assert edited.spec == run.spec
    assert coordinator.client.edit_run(run.id, notes="").tags == ["a", "b"]
    assert next(iter(coordinator.client.runs())).tags == ["a", "b"]
    events = [event for event in coordinator.client.event_log(run.id) if event.kind == "run.edited"]
    assert [event.data for event in events] == [{"name": "after", "tags": ["a", "b"]}, {}]
    for wrong in (
        {"name": "<b>"},
        {"tags": ["Upper"]},
        {"tags": [f"t{n}" for n in range(21)]},
        {"notes": "x" * 10_001},
    ):
        with pytest.raises(InvalidRequest):
            coordinator.client.edit_run(run.id, **wrong)  # type: ignore[arg-type]
    assert coordinator.client.run(run.id) == coordinator.client.edit_run(run.id, name="after")
