"""Counts of a site as its worker sends them, without a worker."""

from typing import Any

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts
from support.federation import tiny_spec

SITES = {"classes": ["a", "b"], "min_count": 2, "score_bins": 4}


def sites_spec(every: int = 1, **changes: Any) -> RunSpec:
    """Return the spec of a tiny run of two clients that sites evaluate before training and after every few rounds."""
    evaluation = {"at": "sites", "every": every, "measures": ["knn"], "sites": SITES}
    return tiny_spec(evaluation=evaluation, cohort={"min_clients": 2}, **changes)


def counts(right: int = 3, wrong: int = 1, **changes: Any) -> SiteCounts:
    """Return counts of two classes with as many images each; `changes` replace whole fields."""
    return SiteCounts.model_validate(counts_json(right, wrong, **changes))


def counts_json(right: int = 3, wrong: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the same as JSON, for values that the model refuses."""
    scores = [[wrong, 0, 0, right], [wrong, 0, 0, right]]
    others = [[right, 0, 0, wrong], [right, 0, 0, wrong]]
    knn = {"confusion": [[right, wrong], [wrong, right]], "positives": scores, "negatives": others}
    num_test = 2 * (right + wrong)
    whole = {"classes": [0, 1], "min_count": 2, "num_train": 10, "num_test": num_test, "measures": {"knn": knn}}
    return {**whole, **changes}
