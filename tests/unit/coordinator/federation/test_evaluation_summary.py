"""The message of an evaluation's event."""

from fedssl_coordinator.federation.evaluations.service import _summary


def test_one_undefined_number_is_not_reported_as_divergence() -> None:
    assert _summary({"probe": 1.0, "uniformity": None, "effective_rank": 1.0}) == "probe 100.00 %, effective_rank 1"
    assert "training has diverged" in _summary({"probe": None, "uniformity": None})
