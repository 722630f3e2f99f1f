"""What was injected, counted: the suite's own ledger."""

import collections
import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what was done to whom, and where in a run (`at random`, or the named point)."""

    kind: str
    target: str
    point: str


@dataclass(slots=True)
class Injected:
    """Every fault so far. Shared by the proxy's threads."""

    faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, target: str, point: str = "at random") -> None:
        with self._lock:
            self.faults.append(Fault(kind, target, point))

    def by(self, *names: str) -> dict[str, int]:
        """Counted by one or more of a fault's fields, most frequent first."""
        counted = collections.Counter(", ".join(getattr(fault, name) for name in names) for fault in self.faults)
        return dict(counted.most_common())
