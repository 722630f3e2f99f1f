"""Which evaluations of a run can be compared: those on the same images with the same settings."""

from collections.abc import Sequence

from fedssl.protocol.views import EvaluationView

_KEYS = ("images", "settings", "max_train", "max_test")

Setting = tuple[str, ...]
"""The data set's name, and the values of `_KEYS`. Only results with the same setting can be compared."""


def setting_of(row: EvaluationView) -> Setting:
    """Return the setting of an evaluation. Other images may be registered under a name later: they have a digest."""
    config = row.config
    limits = ("all" if limit is None else str(limit) for limit in (config.max_train, config.max_test))
    return row.dataset, row.dataset_digest[:8], config.settings, *limits


def names_of(rows: Sequence[EvaluationView]) -> dict[Setting, str]:
    """Return the name of each setting: the data set's, and if that has several settings, what differs between them."""
    found = dict.fromkeys(map(setting_of, rows))
    names = {}
    for dataset, *values in found:
        others = [each[1:] for each in found if each[0] == dataset]
        differing = [at for at, column in enumerate(zip(*others, strict=True)) if len(set(column)) > 1]
        names[dataset, *values] = " ".join([dataset, *(f"{_KEYS[at]} {values[at]}" for at in differing)])
    return names
