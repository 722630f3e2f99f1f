"""Learning rates and weight decays that change from step to step, over the whole run."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.engine import trainer as trainer_module
from fedssl.engine.step_rates import Rates, StepRates
from fedssl.methods.api import Schedule
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import OptimizerConfig, TrainingConfig
from fedssl.simulation import simulate
from support.methods import context, method_spec, shards
from support.rounds import local_round, start

COSINE = {"schedule": "cosine_per_step", "warmup_rounds": 0.5, "final_learning_rate": 0.01, "learning_rate": 0.09}


def _spec(name: str = "fedsimclr", /, **optimizer: Any) -> RunSpec:
    training = {"batch_size": 16, "local_epochs": 2, "optimizer": {"learning_rate": 0.01, **optimizer}}
    return method_spec(name, training=training)


def _maes_rate(epoch: float, *, warmup: float, epochs: int, rate: float, least: float) -> float:
    """Compute MAE's `adjust_learning_rate`, written again from its published description."""
    if epoch < warmup:
        return rate * epoch / warmup
    return least + (rate - least) * 0.5 * (1.0 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


def test_the_learning_rate_is_that_of_mae_with_rounds_for_epochs() -> None:
    config = OptimizerConfig.model_validate(COSINE)
    for step in range(80):
        expected = _maes_rate(step / 8, warmup=0.5, epochs=10, rate=0.09, least=0.01)
        assert config.learning_rate_at(step / 8, 10) == pytest.approx(expected, rel=1e-14)


def test_a_warm_up_is_also_possible_before_a_constant_rate() -> None:
    config = OptimizerConfig(learning_rate=0.8, warmup_rounds=2)
    assert [config.learning_rate_at(done, 100) for done in (0, 0.5, 1.5, 2, 99)] == [
        0,
        0.2,
        pytest.approx(0.6),
        0.8,
        0.8,
    ]


def test_the_weight_decay_follows_dinos_cosine() -> None:
    config = OptimizerConfig(weight_decay=0.04, final_weight_decay=0.4)
    assert config.weight_decay_at(0, 10) == pytest.approx(0.04)
    assert config.weight_decay_at(5, 10) == pytest.approx(0.22)
    assert config.weight_decay_at(10 / 3, 10) == pytest.approx(0.4 + (0.04 - 0.4) * 0.75)
    assert config.weight_decay_at(10, 10) == pytest.approx(0.4)


def test_the_rates_of_a_step_depend_on_its_place_in_the_run() -> None:
    spec = _spec(**COSINE, weight_decay=0.0, final_weight_decay=1.0)
    rates = StepRates(Schedule(num_epochs=2, steps_per_epoch=4, learning_rate=0.0), context(spec, 2, "client-0"))
    config = spec.training.optimizer
    assert rates.at(0) == Rates(config.learning_rate_at(1, 2), config.weight_decay_at(1, 2))
    assert rates.at(4) == Rates(config.learning_rate_at(1.5, 2), pytest.approx((1 - math.cos(0.75 * math.pi)) / 2))


def test_the_cosine_over_rounds_is_constant_inside_a_round() -> None:
    spec = _spec(schedule="cosine")
    rates = StepRates(Schedule(num_epochs=1, steps_per_epoch=4, learning_rate=0.007), context(spec, 2, "client-0"))
    assert rates.are_constant
    assert rates.at(3) == Rates(0.007, spec.training.optimizer.weight_decay)


def test_a_round_takes_its_steps_at_the_scheduled_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, seen = _spec(**COSINE, final_weight_decay=0.5), []
    plain = trainer_module.eager_step

    def observed(algorithm: Any, modules: Any, optimizer: torch.optim.Optimizer, ctx: Any) -> Any:
        step = plain(algorithm, modules, optimizer, ctx)

        def take(batch: Any) -> Any:
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
            return step(batch)

        return take

    monkeypatch.setattr(trainer_module, "eager_step", observed)
    local_round(spec, start(spec).broadcast, "client-1", number=2)
    config, num_steps = spec.training.optimizer, len(seen)
    assert num_steps > 4
    assert seen == [
        (config.learning_rate_at(1 + k / num_steps, 2), config.weight_decay_at(1 + k / num_steps, 2))
        for k in range(num_steps)
    ]


@pytest.mark.parametrize(
    "options",
    [
        COSINE,
        {"name": "lars", "learning_rate": 1.0},
        {"max_gradient_norm": 0.01},
        {"decay_norms_and_biases": False, "weight_decay": 0.5},
        {"layer_decay": 0.1},
        {"final_weight_decay": 1.0},
    ],
)
def test_every_option_changes_the_result(options: dict[str, Any]) -> None:
    found, plain = (local_round(spec, start(spec).broadcast).update for spec in (_spec(**options), _spec()))
    assert found.keys() == plain.keys()
    assert any(not torch.equal(found[name], plain[name]) for name in plain)


def test_options_at_their_defaults_are_not_serialised() -> None:
    before = {"name", "learning_rate", "momentum", "weight_decay", "schedule"}
    assert OptimizerConfig().model_dump(mode="json").keys() == before
    assert "num_micro_batches" not in TrainingConfig().model_dump(mode="json")


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        ({"schedule": "cosine_per_step"}, "ends with the last of 2 rounds, and would be different over 5"),
        ({"final_weight_decay": 0.3}, "the weight decay of each round would be different over 5"),
    ],
)
def test_a_run_whose_earlier_rounds_would_have_other_rates_cannot_be_continued(
    optimizer: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        _spec(**optimizer).continued(5)


def test_a_continued_run_with_a_warm_up_and_a_constant_rate_has_the_same_first_rounds() -> None:
    spec = _spec(warmup_rounds=1.5)
    clients = shards(spec)
    longer = simulate(spec.continued(3), clients)
    assert longer.history[1].clients == simulate(spec, clients).history[1].clients


def test_a_momentum_schedule_cannot_be_continued() -> None:
    spec = method_spec("fedbyol", method={"name": "fedbyol", "target_momentum_schedule": "cosine"})
    with pytest.raises(ValueError, match=r'target_momentum_schedule = "cosine" ends with the last of 2 rounds'):
        spec.continued(5)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        ({"schedule": "cosine", "warmup_rounds": 1}, "set schedule to cosine_per_step"),
        ({"final_learning_rate": 0.001}, "is the end of the schedule cosine_per_step"),
        ({"schedule": "cosine_per_step", "final_learning_rate": 1}, "larger than learning_rate"),
        ({"warmup_rounds": 3}, "more than the 2 rounds of the run"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(optimizer: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        _spec(**optimizer)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        ({"warmup_rounds": 1}, "leave warmup_rounds out"),
        ({"schedule": "cosine_per_step"}, "schedule to constant or cosine"),
        ({"layer_decay": 0.9}, "layer_decay out"),
        ({"name": "lars"}, "optimizer.name to sgd"),
    ],
)
def test_scaffold_refuses_rates_that_it_cannot_divide_by(optimizer: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        _spec("scaffold", **optimizer)


@pytest.mark.parametrize("optimizer", [{"warmup_rounds": 1}, {"final_weight_decay": 0.1}, {"layer_decay": 0.5}])
def test_training_on_the_coordinator_refuses_schedules(optimizer: dict[str, Any]) -> None:
    values = method_spec("flesd").model_dump(mode="json")
    values["method"]["reducer"]["optimizer"] |= optimizer
    with pytest.raises(ValidationError, match="for local training"):
        RunSpec.model_validate(values)
