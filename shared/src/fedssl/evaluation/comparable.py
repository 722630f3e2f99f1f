"""Which evaluations of a run can be compared: those on the same images, with the same settings. Without torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fedssl.protocol.evaluation import Measure
from fedssl.protocol.views import EvaluationView

_KEYS = ("images", "settings", "max_train", "max_test")

Setting = tuple[str, ...]
"""The data set's name, and the values of `_KEYS`. Only results with the same setting can be compared."""


class Evaluated(Protocol):
    """An evaluation, with a JudgingConfig, or with its JSON as another version may have stored it."""

    @property
    def dataset(self) -> str: ...

    @property
    def dataset_digest(self) -> str: ...

    @property
    def config(self) -> Any: ...


def setting_of(row: Evaluated) -> Setting:
    """Return the setting of an evaluation. It has the images' digest, because a name may get other images later."""
    config = row.config if isinstance(row.config, Mapping) else row.config.model_dump()
    values = ("all" if (value := config.get(key)) is None else str(value) for key in _KEYS[1:])
    return row.dataset, row.dataset_digest[:8], *values


def names_of(rows: Sequence[Evaluated]) -> dict[Setting, str]:
    """Return the name of each setting: the data set's, and if that has several settings, what differs between them."""
    found = dict.fromkeys(map(setting_of, rows))
    names = {}
    for dataset, *values in found:
        others = [each[1:] for each in found if each[0] == dataset]
        differing = [at for at, column in enumerate(zip(*others, strict=True)) if len(set(column)) > 1]
        names[dataset, *values] = " ".join([dataset, *(f"{_KEYS[at]} {values[at]}" for at in differing)])
    return names


def grouped(rows: Iterable[EvaluationView]) -> dict[tuple[Setting, tuple[Measure, ...]], list[EvaluationView]]:
    """Return the evaluations by their setting and by what they measured."""
    found: dict[tuple[Setting, tuple[Measure, ...]], list[EvaluationView]] = {}
    for row in rows:
        found.setdefault((setting_of(row), row.config.measures), []).append(row)
    return found
