"""Find the clients whose metrics cross a run's thresholds. Does not import torch: the API process uses it too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedssl.protocol.watch import WatchConfig
from fedssl.wording import apart, plural

EFFECTIVE_RANK, FEATURE_STD, EMBEDDING_STD = "effective_rank", "feature_std", "embedding_std"
DIVERGENCE = "divergence"
LOSS, CLIPPED = "loss", "num_clipped"
"""The mean loss of a round, and, for a secure round, how many clients clipped their updates."""


def crossed_name(name: str) -> str:
    """Return the metric of a secure round that counts the clients whose value of `name` crossed its threshold."""
    return f"num_crossed/{name}"


@dataclass(frozen=True, slots=True)
class CollapseAlert:
    """One metric of a client that crossed its threshold."""

    client_id: str
    name: str
    value: float
    threshold: float

    def __str__(self) -> str:
        value, threshold = apart(self.value, self.threshold)
        return f"{self.client_id}: {self.name} {value} is {_beyond(self.name, threshold)}"


@dataclass(frozen=True, slots=True)
class SummedAlert:
    """How many clients of a secure round crossed the threshold of one metric. No one knows which."""

    name: str
    num_crossed: int
    num_clients: int
    threshold: float

    def __str__(self) -> str:
        of = f"{self.num_crossed} of {plural(self.num_clients, 'client')}"
        return f"{self.name} is {_beyond(self.name, f'{self.threshold:.3g}')} at {of}"


def _beyond(name: str, threshold: str) -> str:
    side, sign = ("above", "drift") if name == DIVERGENCE else ("below", "collapse")
    return f"{side} {threshold} ({sign})"


def _least(config: WatchConfig) -> dict[str, float | None]:
    return {
        EFFECTIVE_RANK: config.min_effective_rank,
        FEATURE_STD: config.min_feature_std,
        EMBEDDING_STD: config.min_embedding_std,
    }


def find_collapse_alerts(
    config: WatchConfig, round_number: int, metrics: Mapping[str, Mapping[str, float]]
) -> list[CollapseAlert]:
    """Return the metrics of one round that cross a threshold, in client-id order; missing metrics do not."""
    if round_number < config.first_round:
        return []
    least = _least(config)
    alarms = []
    for client_id in sorted(metrics):
        values = metrics[client_id]
        for name, threshold in least.items():
            if threshold is not None and name in values and values[name] < threshold:
                alarms.append(CollapseAlert(client_id, name, values[name], threshold))
        most = config.max_divergence
        if most is not None and values.get(DIVERGENCE, 0.0) > most:
            alarms.append(CollapseAlert(client_id, DIVERGENCE, values[DIVERGENCE], most))
    return alarms


def find_summed_alerts(config: WatchConfig, metrics: Mapping[str, float], num_clients: int) -> list[SummedAlert]:
    """Return the thresholds that clients of a secure round crossed, from the metrics of the round's sum.

    `num_clients`: how many clients are in the sum.
    """
    thresholds = {**_least(config), DIVERGENCE: config.max_divergence}
    return [
        SummedAlert(name, int(metrics[crossed_name(name)]), num_clients, threshold)
        for name, threshold in thresholds.items()
        if threshold is not None and crossed_name(name) in metrics
    ]


def describe(alarms: Sequence[CollapseAlert] | Sequence[SummedAlert], most: int = 3) -> str:
    """Return one line for people to read, with at most `most` alarms in full."""
    more = len(alarms) - most
    return "; ".join(str(alarm) for alarm in alarms[:most]) + (f"; and {more} more" if more > 0 else "")
