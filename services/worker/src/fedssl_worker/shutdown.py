"""Immediate shutdown on SIGTERM and SIGINT. It interrupts any work, for which the files on disk are always ready."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

GRACE_SECONDS = 1.5


class ShutdownRequested(BaseException):
    """A signal asked the process to end. This is not an Exception, so that only `main` catches it."""


@contextmanager
def shutdown_on_signals() -> Iterator[None]:
    """Raise ShutdownRequested in the main thread at the first signal.

    A long operation of the device does not return to Python before it is done, so a timer ends the process after
    `GRACE_SECONDS`. Further signals have no effect.
    """
    is_shutting_down = False

    def shut_down(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_shutting_down
        if is_shutting_down:
            return
        is_shutting_down = True
        last_resort = threading.Timer(GRACE_SECONDS, os._exit, args=(0,))
        last_resort.daemon = True
        last_resort.start()
        raise ShutdownRequested

    before = {number: signal.signal(number, shut_down) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        if not is_shutting_down:
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_immediately() -> NoReturn:
    """End the process with code 0. Skips torch's cleanup, which is useless and takes longer than the grace period."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
