"""`fedssl compare --jobs` on GPUs: several runs at the same time share one."""

from pathlib import Path

import pytest

from fedssl.experiments.comparison import Failure, plan, run_all
from fedssl.experiments.overlays import overlay
from fedssl.experiments.runs import ComputeSettings
from fedssl.experiments.variants import Variant
from support.methods import method_spec


def test_runs_at_the_same_time_have_the_bits_of_runs_by_themselves(tmp_path: Path) -> None:
    base = overlay(
        method_spec("fedsimclr").model_dump(mode="json"),
        {
            "training": {"deterministic": True},
            "evaluation": {"dataset": "digits", "every": 1, "max_train": 200, "measures": ["probe", "knn"]},
        },
    )
    variants = [Variant("simclr", "fedsimclr"), Variant("byol", "fedbyol")]
    machine = ComputeSettings(device="cuda")
    one_by_one = run_all(plan(base, variants, [0], tmp_path / "one"), machine=machine)

    found = run_all(plan(base, variants, [0], tmp_path / "two"), machine=machine, jobs=2)

    for key, expected in one_by_one.items():
        run = found[key]
        assert not isinstance(run, Failure), run
        assert not isinstance(expected, Failure), expected
        assert run.losses == expected.losses
        assert run.last == pytest.approx(expected.last, abs=0.02)  # an evaluation may add up in another order
