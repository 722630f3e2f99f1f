"""Training on the coordinator: which steps are taken, what is resumed, and what is refused."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import DistillationProgress, run_aggregation, run_distillation
from fedssl.errors import Cancelled, MethodError
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Losses, Update
from fedssl.models import initialised
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import OptimizerConfig
from support.methods import context, method_spec
from support.rounds import MemoryCheckpoint, local_round, start
from support.tensors import are_equal

CTX = Context(spec=RunSpec(), round_number=1)


@dataclass(frozen=True)
class Regression:
    """A line through four points. The BatchNorm in front gives it statistics to resume, too."""

    num_epochs: int = 6
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(name="adam", learning_rate=0.05))
    steps_per_epoch: int = 3

    def build(self, ctx: Context) -> nn.ModuleDict:
        return initialised(lambda: nn.ModuleDict({"net": nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))}), 4)

    def steps(self, modules: nn.ModuleDict, epoch: int, ctx: Context) -> Iterator[Losses]:
        generator = ctx.generator(f"test/{epoch}")
        for _ in range(self.steps_per_epoch):
            x = torch.rand(4, 1, generator=generator)
            loss = (modules["net"](x) - 3 * x).square().mean()
            yield {"fit": loss}

    def result(self, modules: nn.ModuleDict) -> Tensors:
        return dict(modules.state_dict())


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("killed_after", [1, 4, 6])
def test_an_interrupted_distillation_resumes_with_the_same_bits(name: str, killed_after: int) -> None:
    task = Regression(optimizer=OptimizerConfig.model_validate({"name": name, "learning_rate": 0.05}))
    whole, metrics = run_distillation(task, CTX)

    def kill(progress: DistillationProgress) -> None:
        if progress.epoch == killed_after:
            raise Cancelled("killed")

    checkpoint = MemoryCheckpoint()
    with pytest.raises(Cancelled):
        run_distillation(task, CTX, kill, checkpoint)
    epochs: list[int] = []
    resumed, again = run_distillation(task, CTX, lambda progress: epochs.append(progress.epoch), checkpoint)
    assert are_equal(whole, resumed)
    assert again == metrics
    assert epochs == list(range(killed_after + 1, 7))


def test_progress_is_reported_after_every_epoch_and_the_loss_falls() -> None:
    seen: list[DistillationProgress] = []
    run_distillation(Regression(), CTX, seen.append)
    assert [(p.epoch, p.num_epochs) for p in seen] == [(n, 6) for n in range(1, 7)]
    first, last = seen[0].loss, seen[-1].loss
    assert first is not None
    assert last is not None
    assert last < first < 1000


def test_an_epoch_without_steps_has_no_loss() -> None:
    result, metrics = run_distillation(Regression(steps_per_epoch=0), CTX, checkpoint=MemoryCheckpoint())
    assert metrics == {}
    assert are_equal(result, dict(Regression().build(CTX).state_dict()))


def test_a_checkpoint_of_another_distillation_is_refused() -> None:
    with pytest.raises(MethodError, match="not of this distillation"):
        run_distillation(Regression(), CTX, checkpoint=MemoryCheckpoint({"modules.other": torch.zeros(1)}))


def test_a_loss_that_is_not_finite_ends_the_distillation() -> None:
    hopeless = OptimizerConfig(name="sgd", learning_rate=100, momentum=0.9)
    with pytest.raises(MethodError, match="not a finite number"):
        run_distillation(Regression(num_epochs=60, optimizer=hopeless), CTX)


def test_distillation_outside_an_aggregation_is_refused() -> None:
    with pytest.raises(MethodError, match="run_aggregation"):
        CTX.distil(Regression(), CTX)


def test_an_aggregation_reports_and_resumes_its_distillation() -> None:
    spec = method_spec("flesd")
    first = start(spec)
    update = local_round(spec, first.broadcast).update
    updates = [Update("client-0", 10, lambda: update)]
    plain = run_aggregation(METHODS["flesd"], first.state, updates, context(spec, 1))

    def kill(progress: DistillationProgress) -> None:
        if progress.epoch == 3:
            raise Cancelled("killed")

    memory, epochs = MemoryCheckpoint(), []
    with pytest.raises(Cancelled):
        run_aggregation(METHODS["flesd"], first.state, updates, context(spec, 1), on_epoch=kill, checkpoint=memory)
    again = run_aggregation(
        METHODS["flesd"], first.state, updates, context(spec, 1), on_epoch=epochs.append, checkpoint=memory
    )
    assert are_equal(plain.broadcast, again.broadcast)
    assert [progress.epoch for progress in epochs] == [4, 5, 6]
