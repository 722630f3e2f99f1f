"""Runs whose `model.trainable` names parameters that the encoder does not have.

The API has no torch and cannot know the names, so the aggregator ends such a run before it offers any work.
"""

import pytest

from fedssl.protocol.states import Outcome, RunState
from support.coordinator import Coordinator
from support.federation import tiny_spec

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("patterns", [("layer4.*",), ("blocks.0.*", "layer4.*")])
def test_a_pattern_that_matches_nothing_ends_the_run_before_any_work(
    coordinator: Coordinator, patterns: tuple[str, ...]
) -> None:
    worker = coordinator.worker("a")
    model = tiny_spec().model_dump(mode="json")["model"]
    run = coordinator.client.create_run(tiny_spec(model={**model, "trainable": patterns}))
    assert run.state == RunState.RUNNING
    coordinator.advance(run.id)
    ended = coordinator.client.run(run.id)
    assert (ended.state, ended.outcome) == (RunState.FINISHED, Outcome.FAILED)
    assert ended.reason is not None
    assert ended.reason.startswith(
        "model.trainable names layer4.*, which matches no parameter of the encoder: patterns of this encoder are, for "
        "example, blocks.*"
    )
    assert ended.current_round is None
    assert worker.claim(0) is None
