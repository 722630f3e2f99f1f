"""On a GPU: recorded and compiled steps do what eager ones do, and nothing waits for the host inside an epoch."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fedssl.engine import cuda_graphs, release_trainer
from fedssl.methods.composition.client import ClientAlgorithm
from support.combinations import ALL_COMBINATIONS, FEATURES
from support.two_rounds import LEARNING_RATE, assert_same_course, two_epochs, two_rounds, two_rounds_spec

# One of each kind that `auto` compiles: it takes a minute.
COMPILED = ("fedsimclr", "ssd", "fedrlc", "orchestra")
CASES = [(name, "recorded") for name in [*ALL_COMBINATIONS, *FEATURES]] + [(name, "compiled") for name in COMPILED]


@pytest.mark.parametrize(("name", "wanted"), CASES)
def test_a_gpus_recorded_steps_are_its_eager_ones(name: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else cuDNN may choose other algorithms, or add up in another order, in the second of two equal courses.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    # Compiled kernels round in other places. Where that changed the sign of one input of a ReLU (1.7e-7, in FedSimCLR's
    # second step), the gradient changed by 2 %: at a larger rate, the steps that follow take a course of their own.
    rate = {"learning_rate": LEARNING_RATE / 10} if wanted == "compiled" else {}
    release_trainer()
    eager = two_rounds(two_rounds_spec(name, gpu_steps="eager", **rate), "cuda")
    release_trainer()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the training step cannot", UserWarning)
        recorded = two_rounds(two_rounds_spec(name, gpu_steps=wanted, **rate), "cuda", like=eager)
    assert_same_course(eager, recorded)


@pytest.mark.parametrize("name", ["fedbyol", "fedmae", "orchestra", "hsd, pd"])
def test_recorded_steps_in_bf16_are_eager_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    courses = []
    for steps in ("eager", "recorded"):
        spec = two_rounds_spec(name, gpu_steps=steps)
        spec = spec.model_copy(update={"training": spec.training.model_copy(update={"precision": "bf16"})})
        release_trainer()
        courses.append(two_rounds(spec, "cuda", like=courses[0] if courses else None))
    assert_same_course(*courses)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Inside, whatever waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [*ALL_COMBINATIONS, *FEATURES])
def test_a_gpu_is_not_waited_for_inside_an_epoch(name: str) -> None:
    spec = two_rounds_spec(name, gpu_steps="recorded", local_epochs=2)
    release_trainer()
    two_rounds(spec, "cuda")
    assert bool(two_epochs(spec, "cuda", _no_waiting()).isfinite().all())


@pytest.mark.parametrize("schedule", ["constant", "cosine", "cosine_per_step"])
def test_a_gpu_records_once_for_all_clients_rounds_and_rates(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = cuda_graphs._Capture

    class Counted(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(cuda_graphs, "_Capture", Counted)
    release_trainer()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    eager = two_rounds(two_rounds_spec("fedbyol", gpu_steps="eager", schedule=schedule), "cuda")
    assert not made
    release_trainer()
    found = two_rounds(two_rounds_spec("fedbyol", gpu_steps="recorded", schedule=schedule), "cuda", like=eager)
    assert len(made) == 1
    assert_same_course(eager, found)


def test_a_step_that_cannot_be_recorded_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = two_rounds_spec("fedbyol", gpu_steps="recorded")
    release_trainer()
    expected = two_rounds(spec, "cuda")
    objective = ClientAlgorithm.objective

    def waiting(*args: Any) -> Any:
        losses, measurements = objective(*args)
        assert all(float(term.detach()) < float("inf") for term in losses.values())
        return losses, measurements

    release_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(ClientAlgorithm, "objective", waiting)
        with pytest.warns(UserWarning, match="cannot be recorded"):
            found = two_rounds(spec, "cuda", like=expected)
    assert_same_course(expected, found)
    release_trainer()  # gives cached memory back
    torch.cuda.synchronize()
    assert_same_course(expected, two_rounds(spec, "cuda", like=expected))
