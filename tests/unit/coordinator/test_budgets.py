"""What one caller may cause in a window."""

from fedssl_coordinator.core.quota import Budget


def test_each_caller_has_so_many_a_window_and_the_rest_are_counted() -> None:
    now = [0.0]
    budget = Budget(60, clock=lambda: now[0])
    assert [budget.take("a", 2) for _ in range(5)] == [True, True, False, False, False]
    assert budget.take("b", 2)
    now[0] = 59.9
    assert not budget.take("a", 2)
    now[0] = 60.0
    assert [budget.take("a", 2) for _ in range(3)] == [True, True, False]
    assert (budget.left_out("a"), budget.left_out("a"), budget.left_out("b")) == (5, 0, 0)
