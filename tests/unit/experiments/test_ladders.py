"""Ladders: their settings and rungs."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fedssl.cli.specs import read_spec
from fedssl.errors import SpecError
from fedssl.experiments.ladders import Ladder, Rung, read_ladder
from fedssl.experiments.variants import CENTRALISED, LOCAL_ONLY, build_spec, values_of


def test_every_rung_can_be_run_in_every_setting() -> None:
    ladder = read_ladder("best")

    for setting in ladder.settings:
        specs = {
            each.name: build_spec(values_of(ladder.setting(setting), each, 0))
            for each in ladder.variants(ladder.setting(setting))
        }
        names = [rung.name for rung in ladder.rungs]
        assert list(specs) == [*names, LOCAL_ONLY, CENTRALISED]
        bound = specs[ladder.bounds]
        assert bound.training == specs[LOCAL_ONLY].training == specs[CENTRALISED].training
        assert specs[LOCAL_ONLY].method.merge.name == "local"
        pooled = specs[CENTRALISED].partition
        assert pooled is not None
        assert pooled.pooled


def test_the_last_rung_of_the_best_ladder_equals_its_example() -> None:
    ladder = read_ladder("best")
    setting = ladder.setting("cifar10-class")
    recipe = build_spec(values_of(setting, ladder.variants(setting)[len(ladder.rungs) - 1], 0))
    example = read_spec(str(Path(__file__).parents[3] / "examples" / "best.toml"))
    for section in ("num_rounds", "method", "model", "data", "training", "cohort", "aggregation"):
        assert getattr(example, section) == getattr(recipe, section)


def test_a_rung_without_a_method_adds_to_the_previous_rung() -> None:
    ladder = Ladder.model_validate(
        {
            "title": "t",
            "seeds": [0],
            "bounds": "a",
            "settings": {
                "s": {
                    "num_rounds": 4,
                    "training": {"local_epochs": 5},
                    "partition": {"num_clients": 5},
                    "evaluation": {"dataset": "digits", "every": 2},
                }
            },
            "rungs": [
                {"name": "a", "method": "fedsimclr", "changes": {"temperature": 0.5}},
                {"name": "b", "changes": {"dsr": {}, "training": {"batch_size": 8}}},
                {"name": "c", "changes": {"training": {"local_epochs": 3}}},
                {"name": "d", "method": "fedbyol", "one_epoch": True},
                {"name": "e", "method": "fedbyol", "clients_per_round": 2, "changes": {"target_momentum": 0.9}},
                {"name": "f", "method": "fedbyol", "one_epoch": True, "rounds_per_epoch": 4, "clients_per_round": 2},
            ],
        }
    )

    a, b, c, d, e, f, *_ = ladder.variants(ladder.setting(None))

    assert a.changes == {"temperature": 0.5}
    assert (b.method, b.changes) == ("fedsimclr", {"temperature": 0.5, "dsr": {}, "training": {"batch_size": 8}})
    assert c.changes == {"temperature": 0.5, "dsr": {}, "training": {"batch_size": 8, "local_epochs": 3}}
    single = {"num_rounds": 20, "evaluation": {"every": 10}, "training": {"local_epochs": 1}}
    assert (d.method, d.changes) == ("fedbyol", single)
    fewer = {"num_rounds": 10, "evaluation": {"every": 5}, "cohort": {"fraction": 0.4}, "target_momentum": 0.9}
    assert (e.method, e.changes) == ("fedbyol", fewer)
    quarters = {"training": {"local_epochs": 1, "epoch_fraction": 0.25}, "cohort": {"fraction": 0.4}}
    assert f.changes == {"num_rounds": 200, "evaluation": {"every": 100}, **quarters}
    with pytest.raises(SpecError, match="rung e: 3 rounds of 5 clients cannot become rounds of 2: set num_rounds"):
        ladder.variants({**ladder.setting(None), "num_rounds": 3})


def test_only_a_rung_with_a_method_may_change_the_rounds() -> None:
    with pytest.raises(ValidationError, match="rung e: one_epoch, rounds_per_epoch and clients_per_round belong"):
        Rung(name="e", clients_per_round=2)


def test_unknown_names_are_refused_with_a_suggestion_or_the_known_ones() -> None:
    with pytest.raises(SpecError, match="there is no ladder 'bset'; did you mean best"):
        read_ladder("bset")
    with pytest.raises(SpecError, match=r"there is no setting 'cifar'; .*cifar10-class"):
        read_ladder("best").setting("cifar")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_rounds": "ten"}, "num_rounds"),
        ({"partition": {"dataset": "cifar10", "num_clients": 0}}, r"partition\.num_clients"),
        ({"training": {"local_epochs": 2.5}}, r"training\.local_epochs"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], reason: str) -> None:
    ladder = read_ladder("best")
    with pytest.raises(SpecError, match=reason):
        ladder.variants({**ladder.setting(None), **changes})


def test_keys_left_out_of_a_setting_have_defaults() -> None:
    ladder = read_ladder("best")
    base = {**ladder.setting(None), "evaluation": {"dataset": "digits"}, "partition": {"dataset": "digits"}}
    assert len(ladder.variants(base)) == len(ladder.rungs) + 2
