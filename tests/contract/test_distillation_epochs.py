"""The engine trains for as many epochs as a method's config declares for the coordinator, because jobs and queues
depend on it."""

import pytest

from fedssl.engine import DistillationProgress, run_aggregation, start_run
from fedssl.methods import METHODS
from fedssl.methods.api import Update
from support.methods import ALL_METHODS, context, method_spec, methods_of_this_run
from support.rounds import local_round


@pytest.mark.parametrize("name", methods_of_this_run(ALL_METHODS))
def test_the_coordinator_trains_for_as_many_epochs_as_the_config_declares(name: str) -> None:
    spec, method = method_spec(name), METHODS[name]
    before: list[DistillationProgress] = []
    first = start_run(method, context(spec, 0), on_epoch=before.append)
    assert len(before) == spec.method.distillation_epochs(0)
    local = local_round(spec, first.received)
    seen: list[DistillationProgress] = []
    update = Update("client-0", local.num_examples, lambda: local.update)
    run_aggregation(method, first.state, [update], context(spec, 1), on_epoch=seen.append)
    assert len(seen) == spec.method.distillation_epochs(1)
    for told in (before, seen):
        assert [(p.epoch, p.num_epochs) for p in told] == [(n + 1, len(told)) for n in range(len(told))]


def test_a_base_model_that_is_not_used_is_not_trained() -> None:
    spec = method_spec("fedca", method={"name": "fedca", "alignment_weight": 0})
    assert spec.method.distillation_epochs(0) == 0
