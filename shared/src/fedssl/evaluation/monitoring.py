"""Find the clients whose metrics cross a run's thresholds. Does not import torch: the API process uses it too."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedssl.protocol.watch import WatchConfig

EFFECTIVE_RANK, FEATURE_STD, EMBEDDING_STD = "effective_rank", "feature_std", "embedding_std"
DIVERGENCE = "divergence"


@dataclass(frozen=True, slots=True)
class CollapseAlert:
    """One metric of a client that crossed its threshold."""

    client_id: str
    name: str
    value: float
    threshold: float

    def __str__(self) -> str:
        side = "above" if self.value > self.threshold else "below"
        sign = "drift" if self.name == DIVERGENCE else "collapse"
        return f"{self.client_id}: {self.name} {self.value:.3g} is {side} {self.threshold:.3g} ({sign})"


def find_collapse_alerts(
    config: WatchConfig, round_number: int, metrics: Mapping[str, Mapping[str, float]]
) -> list[CollapseAlert]:
    """Return the metrics of one round that cross a threshold, in client-id order; missing metrics do not."""
    if round_number < config.first_round:
        return []
    least = {
        EFFECTIVE_RANK: config.min_effective_rank,
        FEATURE_STD: config.min_feature_std,
        EMBEDDING_STD: config.min_embedding_std,
    }
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


def describe(alarms: list[CollapseAlert], most: int = 3) -> str:
    """Return one line for people to read, with at most `most` alarms in full."""
    more = len(alarms) - most
    return "; ".join(str(alarm) for alarm in alarms[:most]) + (f"; and {more} more" if more > 0 else "")
