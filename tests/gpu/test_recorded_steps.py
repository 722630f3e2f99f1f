"""On a GPU: recorded and compiled steps do what eager ones do, and nothing waits for the host inside an epoch."""

import warnings
from typing import Any

import pytest
import torch

from fedssl.engine import recording, release_trainer
from fedssl.engine import trainer as trainer_module
from fedssl.methods import METHODS
from fedssl.methods.composition import ComposedClient
from fedssl.protocol.runs import RunSpec
from support.combinations import ALL_COMBINATIONS
from support.methods import context
from support.rounds import client_data, start
from support.two_rounds import moved, on_device, two_rounds, two_rounds_spec


def _on_gpu(name: str, wanted: str) -> RunSpec:
    spec = two_rounds_spec(name)
    return spec.model_copy(update={"training": spec.training.model_copy(update={"gpu_steps": wanted})})


# One of each kind is compiled: it takes a minute.
COMPILED = ("fedsimclr", "ssd", "fedrlc", "fedu2")
CASES = [(name, "recorded") for name in ALL_COMBINATIONS] + [(name, "compiled") for name in COMPILED]


@pytest.mark.parametrize(("name", "wanted"), CASES)
def test_a_gpus_recorded_steps_are_its_eager_ones(name: str, wanted: str) -> None:
    release_trainer()
    eager = two_rounds(_on_gpu(name, "eager"), "cuda")
    release_trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        recorded = two_rounds(_on_gpu(name, wanted), "cuda")
    for one, two in zip(eager, recorded, strict=True):
        assert two.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-2, abs=1e-3)
        for tensor in one.update:
            torch.testing.assert_close(two.update[tensor].float(), one.update[tensor].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_a_gpu_is_not_waited_for_inside_an_epoch(name: str) -> None:
    spec = _on_gpu(name, "recorded")
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"local_epochs": 2})})
    release_trainer()
    two_rounds(spec, "cuda")
    method, ctx = METHODS[spec.method.name], on_device("cuda", context(spec, 2, "client-0"))
    data = moved(client_data(spec, "client-0"), "cuda")
    broadcast = start(spec).broadcast
    with trainer_module.borrow_trainer(method, ctx) as trainer, recording.on_own_stream(ctx.device):
        algorithm, modules = trainer.algorithm, trainer.modules
        assert isinstance(algorithm, ComposedClient)
        algorithm.merge(modules, broadcast, None, data, ctx)
        step = trainer.start_round(broadcast, algorithm.schedule(len(data), ctx), ctx)
        for epoch in range(2):
            algorithm.begin_epoch(modules, data, epoch, ctx)
            if epoch == 1:
                torch.cuda.set_sync_debug_mode("error")
            try:
                sums = torch.zeros((), device="cuda")
                for batch in algorithm.batches(data, epoch, ctx):
                    sums = sums + step(batch).values
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert bool(sums.isfinite().all())


def test_a_gpu_records_once_for_all_clients_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = recording._Recording

    class Counted(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(recording, "_Recording", Counted)
    release_trainer()
    two_rounds(_on_gpu("fedbyol", "recorded"), "cuda")
    assert len(made) == 1
