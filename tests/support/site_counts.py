"""A site's counts as its worker sends them, made without a worker."""

import base64
import struct
from typing import Any

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts, SiteHead
from support.federation import tiny_spec

SITES = {"classes": ["a", "b"], "min_count": 2, "score_bins": 4}


def sites_spec(every: int = 1, **changes: Any) -> RunSpec:
    """Return the spec of a tiny run of two clients that sites evaluate before training and after every few rounds."""
    evaluation = {"at": "sites", "every": every, "measures": ["knn"], "sites": SITES}
    return tiny_spec(evaluation=evaluation, cohort={"min_clients": 2}, **changes)


def counts(right: int = 3, wrong: int = 1, **changes: Any) -> SiteCounts:
    """Return counts of two classes with the same numbers of images; `changes` replace whole fields."""
    return SiteCounts.model_validate(counts_json(right, wrong, **changes))


def counts_json(right: int = 3, wrong: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the counts as JSON, for values that the model refuses."""
    scores = [[wrong, 0, 0, right], [wrong, 0, 0, right]]
    others = [[right, 0, 0, wrong], [right, 0, 0, wrong]]
    knn = {"confusion": [[right, wrong], [wrong, right]], "positives": scores, "negatives": others}
    num_test = 2 * (right + wrong)
    whole = {"classes": [0, 1], "min_count": 2, "num_train": 10, "num_test": num_test, "measures": {"knn": knn}}
    return {**whole, **changes}


CROSS_SITE = {"at": "sites", "measures": ["probe"], "every": 1, "sites": {**SITES, "cross_site": "probe"}}
"""The config of an evaluation whose sites send their own classifiers."""


def cross_counts(right: int = 3, wrong: int = 1) -> SiteCounts:
    """Return counts of a linear probe."""
    knn = counts(right, wrong).measures["knn"]
    return counts(right, wrong, measures={"probe": knn.model_dump()})


def site_head(numbers: tuple[float, ...] = (1.0, 2.0, 0.5, 3.0, 4.0, -0.5), **changes: Any) -> SiteHead:
    """Return a classifier of two classes, of representations of width 2."""
    weights = base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
    return SiteHead.model_validate({"classes": [0, 1], "weights": weights, **changes})
