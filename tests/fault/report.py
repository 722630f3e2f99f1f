"""The report of `make fault`: faults by class, with their outcomes."""

from collections import Counter
from typing import Any

Classes = dict[str, dict[str, dict[str, int]]]
"""For each class and each kind of fault in it: how often each outcome occurred."""


def table(classes: Classes) -> list[str]:
    """Return the lines of the table: class, fault, count and outcomes."""
    rows = [("class", "fault", "count", "outcomes")]
    for name, found in counted(classes).items():
        rows.append((name, "", str(found["count"]), _listed(found["outcomes"])))
        rows += [("", kind, str(sum(outcomes.values())), _listed(outcomes)) for kind, outcomes in classes[name].items()]
    first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
    return [f"{row[0]:{first}}  {row[1]:{second}}  {row[2]:>{third}}  {row[3]}" for row in rows]


def counted(classes: Classes) -> dict[str, dict[str, Any]]:
    """Return the count and the outcomes of each class, and of each fault in it."""
    found: dict[str, dict[str, Any]] = {}
    for name, faults in classes.items():
        outcomes: Counter[str] = sum(map(Counter, faults.values()), Counter())
        found[name] = {"count": outcomes.total(), "outcomes": dict(outcomes.most_common()), "faults": faults}
    return found


def _listed(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{outcome}: {number}" for outcome, number in outcomes.items())
