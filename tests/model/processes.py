"""The code's own computations, in threads that stop where the model stops.

The aggregator's `_advance` and the distiller's `distil` run unchanged. At each step of the model, a thread waits for
it, and then continues, fails, or dies with its process.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from fedssl.errors import MethodError

_SECONDS = 60.0

Order = Callable[[], None]
"""The model's next step: returns to let the computation continue, or raises."""


class Killed(BaseException):
    """The process ends: nothing catches this."""


def publish() -> None:
    """Let the computation succeed."""


def fail() -> NoReturn:
    """Let the computation fail for a temporary reason."""
    raise OSError("the store does not answer")


def fail_for_good() -> NoReturn:
    """Let the computation fail for a permanent reason."""
    raise MethodError("this can never be computed")


def die() -> NoReturn:
    """Let the process end."""
    raise Killed


class Process:
    """One try at a computation, in its own thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._orders: list[Order] = []
        self._changed = threading.Condition()
        self._waits = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        _processes[self._thread] = self
        self._thread.start()
        self._until_it_waits()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def order(self, *orders: Order) -> None:
        """Let the computation continue to its next stop, or to its end."""
        for each in orders:
            with self._changed:
                self._orders.append(each)
                self._waits = False
                self._changed.notify_all()
            self._until_it_waits()

    def stop_here(self) -> None:
        """Wait in the thread for an order, and follow it."""
        with self._changed:
            self._waits = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: bool(self._orders), _SECONDS), "the model has forgotten this process"
            order = self._orders.pop(0)
        order()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the step is taken
            self.error = error
        finally:
            with self._changed:
                self._waits = True
                self._changed.notify_all()

    def _until_it_waits(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._waits, _SECONDS), "a computation hangs"
        if not self._orders and self.error is not None:
            raise self.error


_processes: dict[threading.Thread, Process] = {}


def _stop_here() -> None:
    _processes[threading.current_thread()].stop_here()


def _stopping(compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Stop before a computation, and before the transaction that precedes it."""
    _stop_here()
    return compute(*given, **named)


@contextmanager
def computations_stop() -> Iterator[None]:
    """Let the computations of this process stop where the model stops."""
    from fedssl_coordinator.aggregator import rounds, tasks

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((tasks, "_compute"), (rounds, "first_weights"), (rounds, "next_weights")):
            patch.setattr(module, name, functools.partial(_stopping, getattr(module, name)))
        yield
    _processes.clear()
