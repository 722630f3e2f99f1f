"""`fedssl compare --jobs` on GPUs: several runs at the same time share one."""

from pathlib import Path

import pytest

from fedssl.experiments.comparison import Failure, plan, run_all
from fedssl.experiments.overlays import overlay
from fedssl.experiments.runs import ComputeSettings
from fedssl.experiments.variants import Variant
from support.methods import method_spec


def test_runs_at_the_same_time_have_the_losses_of_a_cpu(tmp_path: Path) -> None:
    base = overlay(
        method_spec("fedsimclr").model_dump(mode="json"),
        {"evaluation": {"dataset": "digits", "every": 1, "max_train": 200, "measures": ["probe", "knn"]}},
    )
    variants = [Variant("simclr", "fedsimclr"), Variant("byol", "fedbyol")]
    on_cpu = run_all(plan(base, variants, [0], tmp_path / "cpu"), machine=ComputeSettings())

    found = run_all(plan(base, variants, [0], tmp_path / "gpu"), machine=ComputeSettings(device="cuda"), jobs=2)

    for key, expected in on_cpu.items():
        run = found[key]
        assert not isinstance(run, Failure), run
        assert not isinstance(expected, Failure), expected
        assert run.losses == pytest.approx(expected.losses, rel=0.01)
        assert set(run.last) == set(expected.last)
        assert run.untrained == pytest.approx(expected.untrained, abs=0.02)
