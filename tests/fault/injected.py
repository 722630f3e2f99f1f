"""The suite's record of the faults that were injected, and of their outcomes, counted by class.

A test records a fault in one of two ways:

* `injected.note(kind, target, point)` when it injects one, and `injected.settle(outcome)` once it has checked the
  outcome of all faults since the last time. `audit.completed` settles with "same bits". Faults that a test has not
  settled at its end get the outcome "held" if it passed, and "violation" if it failed.
* `injected.record(fault_class, fault, outcome)` for a fault whose outcome it has already checked.

The class is that of the test's module, `FAULT_CLASS = "bit rot"`, or else the name of its file; `note` takes another
as `fault_class`. An outcome is a few words that are the same for equal outcomes, because the report counts them:
"same bits", "refused", "stalled, named, resumed".
"""

import collections
import threading
from dataclasses import dataclass, field

SAME_BITS, HELD, VIOLATION = "same bits", "held", "violation"


@dataclass(slots=True)
class Fault:
    """One fault: its kind, its target, its point in a run ("at random" or a named point), its class and its outcome."""

    kind: str
    target: str
    point: str
    fault_class: str = "other"
    outcome: str | None = None


@dataclass(slots=True)
class Injected:
    """Every fault so far. The proxy's threads share this object."""

    faults: list[Fault] = field(default_factory=list)
    fault_class: str = "other"
    _num_settled: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, fault_class: str) -> None:
        """Count all later faults in this class."""
        self.settle(HELD)  # faults that the previous test injected while its fixtures ended
        self.fault_class = fault_class

    def note(self, kind: str, target: str, point: str = "at random", *, fault_class: str | None = None) -> None:
        """Record a fault whose outcome is not known yet."""
        with self._lock:
            self.faults.append(Fault(kind, target, point, fault_class or self.fault_class))

    def settle(self, outcome: str) -> None:
        """Set the outcome of every fault that does not have one yet."""
        with self._lock:
            for fault in self.faults[self._num_settled :]:
                fault.outcome = fault.outcome or outcome
            self._num_settled = len(self.faults)

    def record(self, fault_class: str, fault: str, outcome: str, *, target: str = "", point: str = "at random") -> None:
        """Record a fault together with its outcome."""
        with self._lock:
            self.faults.append(Fault(fault, target, point, fault_class, outcome))

    def by(self, *names: str) -> dict[str, int]:
        """Return the numbers of faults by one or more of their fields, most frequent first."""
        counted = collections.Counter(", ".join(str(getattr(fault, name)) for name in names) for fault in self.faults)
        return dict(counted.most_common())

    def classes(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return, for each class and each kind of fault in it, how often each outcome occurred."""
        found: dict[str, dict[str, collections.Counter[str]]] = {}
        for fault in self.faults:
            kinds = found.setdefault(fault.fault_class, {})
            kinds.setdefault(fault.kind, collections.Counter())[fault.outcome or "not checked"] += 1
        return {
            name: {kind: dict(outcomes.most_common()) for kind, outcomes in sorted(kinds.items())}
            for name, kinds in sorted(found.items())
        }
