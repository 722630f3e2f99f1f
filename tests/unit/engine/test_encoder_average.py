"""The moving average of the global encoder: its numbers, how it is kept, and which specs refuse it."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.aggregation import AggregationError, moving_average
from fedssl.engine import start_run
from fedssl.errors import SpecError
from fedssl.experiments.checkpoints import FolderCheckpoint
from fedssl.methods import METHODS
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import Result, simulate
from support.methods import context, method_spec, shards

DECAY = 0.75


def _spec(method: str = "fedsimclr", **changes: Any) -> RunSpec:
    aggregation = {"encoder_average": {"decay": DECAY}, **changes.pop("aggregation", {})}
    return method_spec(method, aggregation=aggregation, num_rounds=changes.pop("num_rounds", 3), **changes)


@functools.cache
def _rounds() -> tuple[list[dict[str, torch.Tensor]], Result]:
    """Return the global weights after each round of a run without the average, and the result of the run with it."""
    spec = _spec()
    plain = spec.model_copy(update={"aggregation": spec.aggregation.model_copy(update={"encoder_average": None})})
    runs = (plain.model_copy(update={"num_rounds": number}) for number in range(1, spec.num_rounds + 1))
    return [simulate(each, shards(spec)).model for each in runs], simulate(spec, shards(spec))


def test_the_average_covers_all_rounds_and_does_not_change_local_training() -> None:
    """In float64, over three rounds: a1 = x1, a2 = (3 a1 + x2) / 4, a3 = (3 a2 + x3) / 4."""
    rounds, result = _rounds()
    for name, tensor in result.model.items():
        values = [each[name] for each in rounds]
        if not name.startswith("encoder.") or not tensor.is_floating_point():
            assert torch.equal(tensor, values[-1]), name
            continue
        average = values[0].double().numpy()
        for value in values[1:]:
            average = ((3 * average + value.double().numpy()) / 4).astype(np.float32).astype(np.float64)
        assert np.array_equal(tensor.numpy(), average.astype(np.float32)), name
        assert torch.equal(result.server_state[name], values[-1]), name
        assert torch.equal(result.server_state[f"encoder_average.{name}"], tensor), name
    assert any("running_var" in name for name in result.model)


def test_torchs_averaged_model_gives_the_same_weights() -> None:
    rounds, result = _rounds()
    name = next(name for name in result.model if name.startswith("encoder.") and name.endswith("conv.weight"))
    layer = torch.nn.Linear(1, 1)
    layer.weight = torch.nn.Parameter(rounds[0][name])
    averaged = torch.optim.swa_utils.AveragedModel(
        layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    )
    for each in rounds:
        with torch.no_grad():
            layer.weight.copy_(each[name])
        averaged.update_parameters(layer)
    torch.testing.assert_close(result.model[name], averaged.module.weight.data)


def test_an_interrupted_simulation_resumes_with_its_average(tmp_path: Path) -> None:
    spec, whole = _spec(num_rounds=2), simulate(_spec(num_rounds=2), shards(_spec()))

    class Killed(Exception):
        pass

    def kill(record: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        simulate(spec, shards(spec), checkpoint=FolderCheckpoint(tmp_path), on_round=kill)
    resumed = simulate(spec, shards(spec), checkpoint=FolderCheckpoint(tmp_path))
    assert all(torch.equal(resumed.model[name], tensor) for name, tensor in whole.model.items())
    assert len(resumed.history) == 2


def test_the_average_works_with_secure_rounds_and_a_partly_frozen_encoder() -> None:
    secure = {"arithmetic": "fixed"}
    model = {"encoder": {"widths": [8, 16]}, "projector": None, "trainable": ["blocks.1.*"]}
    spec = _spec(aggregation=secure, model=model, num_rounds=2)
    masked = RunSpec.model_validate(spec.model_dump() | {"secure_aggregation": {"min_cohort": 3}})
    one, other = simulate(spec, shards(spec)), simulate(masked, shards(spec))
    assert all(torch.equal(one.server_state[name], tensor) for name, tensor in other.server_state.items())
    averaged = {name for name in one.server_state if name.startswith("encoder_average.encoder.")}
    assert averaged
    assert all(".blocks.1." in name for name in averaged)
    changed = {name for name in one.model if not torch.equal(one.model[name], one.server_state[name])}
    assert changed
    assert all(name.startswith("encoder.blocks.1.") for name in changed)


def test_methods_whose_encoder_never_changes_refuse_the_average() -> None:
    with pytest.raises(ValidationError, match=r"single sends nothing that changes it: leave it out"):
        _spec("single")
    spec = _spec("ridge-probe")
    with pytest.raises(SpecError, match="ridge-probe trains none here: leave it out"):
        start_run(METHODS["ridge-probe"], context(spec, 0))


@pytest.mark.parametrize("decay", [0, 1, -0.5])
def test_decays_out_of_range_are_refused(decay: float) -> None:
    with pytest.raises(ValidationError, match="decay"):
        _spec(aggregation={"encoder_average": {"decay": decay}})


def test_integer_tensors_and_other_shapes_are_refused() -> None:
    with pytest.raises(AggregationError, match="floating-point"):
        moving_average(torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), decay=0.5)
    with pytest.raises(AggregationError, match=r"a moving average has the weights as torch.float32 \(3,\)"):
        moving_average(torch.ones(2), torch.ones(3), decay=0.5)


def test_a_spec_without_the_average_is_serialised_as_before() -> None:
    assert "aggregation" not in method_spec("fedsimclr").model_dump(mode="json")
