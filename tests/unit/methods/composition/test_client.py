"""How the two views of an image pass the networks: as one batch, or one after another."""

import pytest
import torch

from fedssl.protocol.runs import RunSpec
from support.methods import CONFIGS, method_spec
from support.rounds import local_round, start


def _spec(name: str, views: str) -> RunSpec:
    return method_spec(name, method={"name": name, **CONFIGS.get(name, {}), "views": views})


@pytest.mark.parametrize("name", ["fedalignuniform", "ssd", "flesd"])
def test_joint_and_separate_views_differ_in_their_batch_norm_statistics(name: str) -> None:
    """There are one or two passes per step, and therefore different statistics and weights."""
    passes, rounds = [], []
    for views in ("joint", "separate"):
        spec = _spec(name, views)
        counts: list[int] = []
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_, counts=counts: counts.append(1) if isinstance(module, torch.nn.BatchNorm2d) else None  # type: ignore[misc]
        )
        try:
            rounds.append(local_round(spec, start(spec).broadcast))
        finally:
            handle.remove()
        passes.append(len(counts))
    assert passes[0] > 0
    joint, separate = (result.metrics["loss"] for result in rounds)
    assert joint != separate
    assert passes[1] > 1.5 * passes[0]  # the measurements after training need as many passes


def test_views_pass_jointly_by_default() -> None:
    assert method_spec("ssd") == _spec("ssd", "joint")
