"""Thresholds of a run: which numbers raise an alarm."""

from fedssl.evaluation.monitoring import CollapseAlert, describe, find_collapse_alerts, find_summed_alerts
from fedssl.protocol.watch import WatchConfig

HEALTHY = {"effective_rank": 40.0, "feature_std": 0.4, "embedding_std": 0.6, "divergence": 0.2}


def test_a_healthy_round_raises_no_alarm() -> None:
    assert find_collapse_alerts(WatchConfig(max_divergence=0.5), 5, {"a": HEALTHY, "b": HEALTHY}) == []


def test_every_number_beyond_its_threshold_is_reported_in_client_order() -> None:
    config = WatchConfig(min_effective_rank=3, min_feature_std=0.05, min_embedding_std=0.1, max_divergence=0.5)
    sick = {"effective_rank": 1.5, "feature_std": 0.01, "embedding_std": 0.02, "divergence": 2.0}
    alarms = find_collapse_alerts(config, 2, {"b": sick, "a": {**HEALTHY, "divergence": 0.6}})
    assert [(alarm.client_id, alarm.name) for alarm in alarms] == [
        ("a", "divergence"),
        ("b", "effective_rank"),
        ("b", "feature_std"),
        ("b", "embedding_std"),
        ("b", "divergence"),
    ]
    assert str(alarms[0]) == "a: divergence 0.6 is above 0.5 (drift)"
    assert str(alarms[1]) == "b: effective_rank 1.5 is below 3 (collapse)"
    assert str(CollapseAlert("a", "effective_rank", 1.9999, 2)) == "a: effective_rank 1.9999 is below 2 (collapse)"
    assert describe(alarms, most=1) == "a: divergence 0.6 is above 0.5 (drift); and 4 more"


def test_a_number_equal_to_its_threshold_raises_no_alarm() -> None:
    config = WatchConfig(min_effective_rank=2, max_divergence=0.5)
    assert find_collapse_alerts(config, 2, {"a": {"effective_rank": 2.0, "divergence": 0.5}}) == []


def test_missing_numbers_and_unset_thresholds_raise_no_alarm() -> None:
    unset = WatchConfig(min_effective_rank=None, min_feature_std=None, min_embedding_std=None)
    assert find_collapse_alerts(unset, 2, {"a": dict.fromkeys(HEALTHY, 1e-9)}) == []
    assert find_collapse_alerts(WatchConfig(max_divergence=0.1), 2, {"a": {"loss": 3.0}}) == []


def test_the_first_round_raises_no_alarm_unless_the_spec_asks_for_it() -> None:
    collapsed = {"a": {"effective_rank": 1.0}}
    assert find_collapse_alerts(WatchConfig(), 1, collapsed) == []
    assert len(find_collapse_alerts(WatchConfig(), 2, collapsed)) == 1
    assert len(find_collapse_alerts(WatchConfig(first_round=1), 1, collapsed)) == 1


def test_the_alarms_of_a_secure_round_count_the_clients_beyond_a_threshold() -> None:
    counts = {"loss": 2.0, "num_crossed/effective_rank": 2.0, "num_crossed/divergence": 1.0}
    alarms = find_summed_alerts(WatchConfig(max_divergence=0.5), counts, 6)
    assert describe(alarms) == (
        "effective_rank is below 2 (collapse) at 2 of 6 clients; divergence is above 0.5 (drift) at 1 of 6 clients"
    )
    assert len(find_summed_alerts(WatchConfig(), counts, 6)) == 1  # the divergence has no threshold here
