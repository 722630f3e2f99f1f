"""The quota that each caller has per time window."""

from fedssl_coordinator.core.quota import Quota


def test_each_caller_has_a_quota_per_window_and_refusals_are_counted() -> None:
    now = [0.0]
    quota = Quota(60, clock=lambda: now[0])
    assert [quota.take("a", 2) for _ in range(5)] == [True, True, False, False, False]
    assert quota.take("b", 2)
    now[0] = 59.9
    assert not quota.take("a", 2)
    assert [quota.has_room(caller, 2) for caller in ("a", "b", "c")] == [False, True, True]
    now[0] = 60.0
    assert quota.has_room("a", 2)
    assert [quota.take("a", 2) for _ in range(3)] == [True, True, False]
    assert (quota.pop_num_refused("a"), quota.pop_num_refused("a"), quota.pop_num_refused("b")) == (5, 0, 0)
