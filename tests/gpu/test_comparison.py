"""`fedssl compare --jobs` on GPUs: several runs at the same time share one."""

from pathlib import Path

import pytest

from fedssl.experiments.comparison import Failure, plan, run_all
from fedssl.experiments.overlays import overlay
from fedssl.experiments.runs import ComputeSettings
from fedssl.experiments.variants import Variant
from support.methods import method_spec


def test_runs_at_the_same_time_have_the_losses_of_one_after_the_other(tmp_path: Path) -> None:
    base = overlay(
        method_spec("fedsimclr").model_dump(mode="json"),
        {
            "training": {"deterministic": True},
            "evaluation": {"dataset": "digits", "every": 1, "max_train": 200, "measures": ["probe", "knn"]},
        },
    )
    variants, machine = [Variant("simclr", "fedsimclr"), Variant("byol", "fedbyol")], ComputeSettings(device="cuda")
    alone = run_all(plan(base, variants, [0], tmp_path / "alone"), machine=machine)
    together = run_all(plan(base, variants, [0], tmp_path / "together"), machine=machine, jobs=2)
    for key, expected in alone.items():
        found = together[key]
        assert not isinstance(found, Failure), found
        assert not isinstance(expected, Failure), expected
        assert found.losses == expected.losses
        assert found.last == pytest.approx(expected.last, abs=0.01)  # no score is bound to the bits
        assert found.untrained == pytest.approx(expected.untrained, abs=0.01)
