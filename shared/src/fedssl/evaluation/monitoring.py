"""Which clients' numbers cross a run's thresholds. Without torch: the coordinator asks too."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedssl.protocol.watch import WatchConfig

EFFECTIVE_RANK, FEATURE_STD, EMBEDDING_STD = "effective_rank", "feature_std", "embedding_std"
DIVERGENCE = "divergence"


@dataclass(frozen=True, slots=True)
class Alarm:
    """One number beyond its threshold."""

    client_id: str
    name: str
    value: float
    threshold: float

    def __str__(self) -> str:
        side = "above" if self.value > self.threshold else "below"
        sign = "drift" if self.name == DIVERGENCE else "collapse"
        return f"{self.client_id}: {self.name} {self.value:.3g} is {side} {self.threshold:.3g} ({sign})"


def find_alarms(config: WatchConfig, round_number: int, metrics: Mapping[str, Mapping[str, float]]) -> list[Alarm]:
    """What is beyond a threshold in one round's metrics by client, in client-id order; metrics not sent are not."""
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
                alarms.append(Alarm(client_id, name, values[name], threshold))
        most = config.max_divergence
        if most is not None and values.get(DIVERGENCE, 0.0) > most:
            alarms.append(Alarm(client_id, DIVERGENCE, values[DIVERGENCE], most))
    return alarms


def describe(alarms: list[Alarm], most: int = 3) -> str:
    """One line for people."""
    more = len(alarms) - most
    return "; ".join(str(alarm) for alarm in alarms[:most]) + (f"; and {more} more" if more > 0 else "")
