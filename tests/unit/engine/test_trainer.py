"""One set of modules trains one client after another, and nothing of one round leaks into another."""

from typing import Any

import pytest
import torch

from fedssl.engine import LocalProgress, LocalResult, local, release_trainer, run_local_round
from fedssl.engine import trainer as trainer_module
from fedssl.engine.trainer import Trainer, borrow_trainer
from fedssl.errors import Cancelled, MethodError
from fedssl.methods import METHODS
from fedssl.methods.api import Metrics
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.combinations import ALL_COMBINATIONS, combined_spec
from support.methods import context, method_spec, methods_of_this_run, shards
from support.rounds import aggregate, client_data, local_round, start
from support.tensors import are_equal

CLIENTS = ("client-0", "client-1")


def _two_rounds(spec: RunSpec, *, fresh: bool) -> list[LocalResult]:
    """Train both clients in both rounds. With `fresh`, the modules are rebuilt for each."""
    now, states, results = start(spec), {}, []
    for number in (1, 2):
        updates = []
        for client in CLIENTS:
            if fresh:
                release_trainer()
            result = local_round(spec, now.broadcast, client, number, states.get(client))
            states[client] = result.state
            updates.append((result.num_examples, result.update))
            results.append(result)
        now = aggregate(spec, now.state, updates, number)
    return results


@pytest.mark.parametrize("name", methods_of_this_run(ALL_COMBINATIONS))
def test_reused_modules_give_the_bits_of_new_ones(name: str) -> None:
    spec = combined_spec(name)
    new, used = _two_rounds(spec, fresh=True), _two_rounds(spec, fresh=False)
    for one, two in zip(new, used, strict=True):
        assert are_equal(one.update, two.update)
        assert are_equal(one.state, two.state)
        assert one.metrics == two.metrics


def test_the_modules_are_built_once_for_all_clients_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    release_trainer()
    built = []

    class Counted(trainer_module.Trainer):
        def __init__(self, *args: Any) -> None:
            built.append(self)
            super().__init__(*args)

    monkeypatch.setattr(trainer_module, "Trainer", Counted)
    _two_rounds(method_spec("fedbyol"), fresh=False)
    assert len(built) == 1
    _two_rounds(method_spec("fedbyol", seed=5), fresh=False)
    assert len(built) == 2


def test_a_result_is_not_changed_by_later_rounds() -> None:
    spec = method_spec("fedbyol")
    broadcast = start(spec).broadcast
    first = local_round(spec, broadcast)
    before = [{name: tensor.clone() for name, tensor in part.items()} for part in (first.update, first.state)]
    local_round(spec, broadcast, "client-1", 2)
    assert are_equal(first.update, before[0])
    assert are_equal(first.state, before[1])


def test_a_cancelled_round_leaves_no_trainer_behind_and_does_not_change_the_next() -> None:
    spec = method_spec("fedmoco")
    broadcast = start(spec).broadcast
    release_trainer()
    expected = local_round(spec, broadcast, "client-1")

    def call_off(progress: LocalProgress) -> None:
        raise Cancelled("enough")

    ctx, data = context(spec, 1, "client-0"), client_data(spec, "client-0")
    with pytest.raises(Cancelled):
        run_local_round(METHODS["fedmoco"], broadcast, None, data, ctx, call_off)
    assert trainer_module._idle == {}
    again = local_round(spec, broadcast, "client-1")
    assert are_equal(expected.update, again.update)
    assert are_equal(expected.state, again.state)


def test_a_trainer_is_released_once_it_was_unused_for_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fedssl.engine.trainer.time.monotonic", lambda: now[0])
    spec = method_spec("fedsimclr")
    local_round(spec, start(spec).broadcast)
    now[0] = 109.0
    release_trainer(unused_seconds=10)
    assert len(trainer_module._idle) == 1
    now[0] = 110.0
    release_trainer(unused_seconds=10)
    assert trainer_module._idle == {}


def test_a_simulation_releases_its_trainer() -> None:
    spec = method_spec("fedsimclr", num_rounds=1)
    simulate(spec, shards(spec))
    assert trainer_module._idle == {}


def test_concurrent_rounds_do_not_share_modules() -> None:
    spec = method_spec("fedsimclr")
    ctx = context(spec, 1, "client-0")
    with borrow_trainer(METHODS["fedsimclr"], ctx) as one, borrow_trainer(METHODS["fedsimclr"], ctx) as two:
        assert one.modules is not two.modules


def test_how_often_progress_is_reported_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = method_spec("fedx", training={"batch_size": 16, "local_epochs": 2})
    broadcast = start(spec).broadcast
    ctx, data = context(spec, 1, "client-0"), client_data(spec, "client-0")
    quiet = run_local_round(METHODS["fedx"], broadcast, None, data, ctx)
    seen: list[LocalProgress] = []
    monkeypatch.setattr("fedssl.engine.local.PROGRESS_SECONDS", 0.0)
    told = run_local_round(METHODS["fedx"], broadcast, None, data, ctx, seen.append)
    assert [progress.step for progress in seen] == list(range(1, seen[-1].num_steps + 1))
    assert are_equal(quiet.update, told.update)
    assert quiet.metrics == told.metrics


@pytest.mark.parametrize("name", ["supervised", "single"])
def test_an_update_that_the_last_step_made_infinite_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is that of the weights before the last step: it is finite in any case."""
    train = local._train

    def overflowing(trainer: Trainer, *arguments: Any) -> Metrics:
        metrics = train(trainer, *arguments)
        with torch.no_grad():
            next(trainer.modules["encoder"].parameters()).fill_(torch.inf)
        return metrics

    monkeypatch.setattr(local, "_train", overflowing)
    spec = method_spec(name)
    with pytest.raises(MethodError, match=r"not finite: lower training\.optimizer\.learning_rate"):
        local_round(spec, start(spec).broadcast, "client-0", 1, None)
