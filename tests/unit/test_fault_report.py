"""The record of `make fault`: each fault with its class and outcome, and the table of them."""

from fault.injected import SAME_BITS, VIOLATION, Injected
from fault.report import counted, table


def test_a_fault_gets_the_outcome_that_is_settled_after_it() -> None:
    injected = Injected()
    injected.begin("network")
    injected.note("drop", "POST /v1/work/claim")
    injected.note("delay", "POST /v1/work/submit", fault_class="slow lines")
    injected.settle(SAME_BITS)
    injected.note("drop", "POST /v1/work/claim")
    injected.settle(VIOLATION)
    injected.record("bit rot", "flipped bit", "stalled, named, resumed")
    assert injected.classes() == {
        "bit rot": {"flipped bit": {"stalled, named, resumed": 1}},
        "network": {"drop": {SAME_BITS: 1, VIOLATION: 1}},
        "slow lines": {"delay": {SAME_BITS: 1}},
    }


def test_a_fault_recorded_with_its_outcome_keeps_it() -> None:
    injected = Injected()
    injected.record("bit rot", "flipped bit", "refused")
    injected.settle(SAME_BITS)
    assert injected.by("kind", "outcome") == {"flipped bit, refused": 1}


def test_the_table_has_a_line_per_class_and_per_fault() -> None:
    injected = Injected()
    injected.record("network", "drop", "same bits")
    injected.record("network", "drop", "same bits")
    injected.record("network", "delay", "violation")
    assert table(injected.classes()) == [
        "class    fault  count  outcomes",
        "network             3  same bits: 2, violation: 1",
        "         delay      1  violation: 1",
        "         drop       2  same bits: 2",
    ]
    assert counted(injected.classes())["network"] == {
        "count": 3,
        "outcomes": {"same bits": 2, "violation": 1},
        "faults": {"delay": {"violation": 1}, "drop": {"same bits": 2}},
    }
