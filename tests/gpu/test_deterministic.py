"""On a GPU, `training.deterministic` gives two executions the same bits."""

import pytest
import torch

from fedssl.engine import release_trainer
from support.combinations import ALL_COMBINATIONS, FEATURES
from support.two_rounds import two_rounds, two_rounds_spec


@pytest.mark.parametrize("name", [*ALL_COMBINATIONS, *FEATURES])
def test_two_executions_have_the_same_bits(name: str) -> None:
    spec = two_rounds_spec(name, gpu_steps="recorded")
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"deterministic": True})})
    release_trainer()
    first = two_rounds(spec, "cuda")
    release_trainer()
    for found, expected in zip(two_rounds(spec, "cuda"), first, strict=True):
        for ours, theirs in ((found.update, expected.update), (found.state, expected.state)):
            assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []
        assert found.metrics == expected.metrics
