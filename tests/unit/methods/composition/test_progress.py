"""A target network whose momentum grows over the run."""

import math

import pytest
import torch

from fedssl.methods.api import Schedule
from fedssl.methods.composition.progress import Progress, cosine_to_one
from support.methods import context, method_spec
from support.rounds import local_round, start, training

SCHEDULED = {"name": "fedbyol", "target_momentum": 0.9, "target_momentum_schedule": "cosine"}


def test_progress_counts_finished_rounds_and_shares_of_steps() -> None:
    progress = Progress()
    progress.start(Schedule(num_epochs=2, steps_per_epoch=4, learning_rate=0.1), context(method_spec("fedbyol"), 3))
    assert float(progress.rounds()) == 2
    for _ in range(2):
        progress.advance()
    assert float(progress.rounds()) == 2.25


def test_progress_works_in_a_round_without_steps() -> None:
    progress = Progress()
    progress.start(Schedule(num_epochs=0, steps_per_epoch=4, learning_rate=0.1), context(method_spec("fedbyol"), 1))
    assert float(progress.rounds()) == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.75, 1.0])
def test_the_momentum_follows_byols_schedule(share: float) -> None:
    expected = 1 - (1 - 0.996) * (math.cos(math.pi * share) + 1) / 2
    assert float(cosine_to_one(0.996, torch.tensor(share))) == pytest.approx(expected, abs=1e-7)


def test_the_target_follows_with_the_momentum_of_its_step() -> None:
    """Three steps of a round of four are taken in round 2 of 2, with the online network moved by hand."""
    spec = method_spec("fedbyol", method=SCHEDULED)
    client = training(spec, number=2)
    algorithm, modules = client.algorithm, client.modules
    algorithm.start_steps(modules, Schedule(num_epochs=1, steps_per_epoch=4, learning_rate=0.1), client.ctx)
    online, target = modules["encoder"].blocks[0].conv.weight, modules["target_encoder"].blocks[0].conv.weight
    expected = target.detach().double().clone()
    for step in range(3):
        with torch.no_grad():
            online.add_(1.0)
        momentum = 1 - 0.1 * (1 + math.cos(math.pi * (1 + step / 4) / 2)) / 2
        expected = momentum * expected + (1 - momentum) * online.detach().double()
        algorithm.after_step(modules, client.ctx)
    torch.testing.assert_close(target.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_a_scheduled_target_is_kept_and_changes_neither_what_is_sent_nor_what_is_kept() -> None:
    scheduled, constant = method_spec("fedbyol", method=SCHEDULED), method_spec("fedbyol")
    one, other = (local_round(spec, start(spec).broadcast) for spec in (scheduled, constant))
    assert one.update.keys() == other.update.keys()
    assert one.state.keys() == other.state.keys()
    assert any(not torch.equal(one.state[name], other.state[name]) for name in one.state)


@pytest.mark.parametrize("name", ["fedu", "fedema", "fedrlc"])
def test_the_presets_of_byol_support_the_schedule(name: str) -> None:
    spec = method_spec(name, method={"name": name, "target_momentum_schedule": "cosine"})
    assert "progress" in training(spec).modules
