"""The spec of a run that is continued for more rounds."""

import pytest

from fedssl.protocol.runs import RunSpec


def test_a_continued_spec_differs_only_in_the_number_of_rounds() -> None:
    spec = RunSpec.model_validate({"num_rounds": 3, "seed": 5, "method": {"name": "scaffold"}})
    assert spec.continued(7) == RunSpec.model_validate(spec.model_dump() | {"num_rounds": 7})


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_a_run_cannot_be_continued_to_rounds_that_it_already_has(num_rounds: int) -> None:
    with pytest.raises(ValueError, match="the run has 3 rounds already: give more than that in total"):
        RunSpec(num_rounds=3).continued(num_rounds)


def test_a_run_with_a_schedule_over_all_rounds_cannot_be_continued() -> None:
    spec = RunSpec.model_validate({"num_rounds": 3, "training": {"optimizer": {"schedule": "cosine"}}})
    with pytest.raises(ValueError, match="ends with the last of 3 rounds, and would be different over 9"):
        spec.continued(9)


def test_a_run_of_fedprotocl_whose_warm_up_would_be_longer_cannot_be_continued() -> None:
    spec = RunSpec.model_validate({"num_rounds": 10, "method": {"name": "fedprotocl", "warmup_share": 0.1}})
    assert spec.continued(19).num_rounds == 19
    with pytest.raises(ValueError, match="the first 2 of 20 rounds train without prototypes, and only 1 of 10 did"):
        spec.continued(20)
