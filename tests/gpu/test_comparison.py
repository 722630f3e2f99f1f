"""`fedssl compare --jobs` on GPUs: several simultaneous runs share one."""

from pathlib import Path

import pytest

from fedssl.experiments.comparison import Failure, plan, run_all
from fedssl.experiments.overlays import overlay
from fedssl.experiments.runs import ComputeSettings
from fedssl.experiments.variants import Variant
from support.methods import method_spec


def test_simultaneous_runs_have_the_same_losses_as_runs_one_after_another(tmp_path: Path) -> None:
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
        assert found.last == pytest.approx(expected.last, abs=0.01)  # scores do not need to have the same bits
        assert found.untrained == pytest.approx(expected.untrained, abs=0.01)
