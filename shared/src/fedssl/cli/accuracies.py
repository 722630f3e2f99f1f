"""The measures of a run that are accuracies, and their names for people."""

from collections.abc import Mapping

ACCURACIES = {"probe": "linear probe", "knn": "kNN"}


def accuracies_of(values: Mapping[str, float]) -> str:
    """Format the accuracies among some measures.

    >>> accuracies_of({"probe": 0.8132, "uniformity": 3.1})
    'linear probe 81.32 %'
    """
    return ", ".join(f"{text} {100 * values[name]:.2f} %" for name, text in ACCURACIES.items() if name in values)
