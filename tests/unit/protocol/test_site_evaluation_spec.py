"""`evaluation.at` and `[evaluation.sites]`: which settings belong together, and that earlier specs do not change."""

import pytest
from pydantic import ValidationError

from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.runs import RunSpec

SITES = {"classes": ["cat", "dog"]}


def test_an_evaluation_by_the_coordinator_is_serialised_as_before():
    config = EvaluationConfig(dataset="digits")
    assert not {"at", "sites"} & config.model_dump().keys()
    spec = RunSpec(evaluation=config)
    assert (spec.central_evaluation, spec.site_evaluation) == (config, None)


def test_an_evaluation_by_sites_needs_no_data_set_of_the_coordinator():
    spec = RunSpec.model_validate({"evaluation": {"at": "sites", "sites": SITES}})
    assert "dataset" not in spec.evaluation.model_dump()
    assert (spec.central_evaluation, spec.site_evaluation) == (None, spec.evaluation)
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_sites_and_the_coordinator_can_both_evaluate():
    spec = RunSpec.model_validate({"evaluation": {"at": "both", "dataset": "digits", "sites": SITES}})
    assert spec.central_evaluation == spec.site_evaluation == spec.evaluation


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "evaluation.dataset is missing"),
        ({"at": "both", "sites": SITES}, "evaluation.dataset is missing"),
        ({"at": "sites", "dataset": "digits", "sites": SITES}, "evaluation.dataset is not used by the sites"),
        ({"at": "sites"}, "belong together: give both"),
        ({"dataset": "digits", "sites": SITES}, "belong together: give both"),
        ({"at": "sites", "sites": SITES, "measures": ["geometry"]}, "evaluation.measures needs probe or knn"),
        ({"at": "sites", "sites": SITES, "settings": "fedx"}, 'evaluation.settings must be "fast"'),
        ({"at": "sites", "sites": {"classes": ["cat", "cat"]}}, "names a class twice"),
        ({"at": "sites", "sites": {"classes": ["cat"]}}, "at least 2"),
        ({"at": "sites", "sites": {**SITES, "test_share": 1}}, "less than 1"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        EvaluationConfig.model_validate(values)
