"""Keeps a federation's processes running on one machine, and leaves none of them behind."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from fedssl.backoff import delay_seconds
from fedssl.locks import FolderLock
from fedssl_local.errors import CrashLoopError, GivenUpError, LocalError
from fedssl_local.kept import Kept
from fedssl_local.process import describe_end
from fedssl_local.server import Server
from fedssl_local.service import Service, ServiceRunner

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When to restart a service that ended.

    The wait before a restart begins at `first_seconds` and doubles up to `max_seconds` with every quick death, which is
    one within `quick_seconds` of the start. After `max_quick_deaths` of them in a row the service is not started again:
    the supervisor stops the others too if the service is essential, and they continue without it if it is not.
    """

    first_seconds: float = 0.5
    max_seconds: float = 10.0
    quick_seconds: float = 20.0
    max_quick_deaths: int = 6

    def seconds(self, quick_deaths: int) -> float:
        """Return the wait after `quick_deaths` quick deaths in a row, at least one."""
        return delay_seconds(quick_deaths, self.first_seconds, self.max_seconds)


class Supervisor:
    """Starts servers and services, restarts those that die, and stops all of them in the end.

        with Supervisor(folder, on_event=show) as supervisor:
            supervisor.start(postgres)
            supervisor.start(Service(name="coordinator", command=[...], log_path=..., ready=answers))
            supervisor.run_until_stopped()

    `on_event(name, what)` is called at every start, death and end. The calls come one at a time, from several threads,
    and must not raise or stop the supervisor. Inside the `with` block the program may also do other work: Ctrl-C,
    SIGTERM and SIGHUP then raise KeyboardInterrupt or SystemExit there, and everything is stopped when the block ends.
    While everything is being stopped, one more Ctrl-C kills what is left. Signals are caught only if the block is in
    the main thread. Such a program should sleep for short times only, because Python handles a signal that arrives just
    before a long sleep only after the sleep.

    If this process is killed, the subreapers (`fedssl_local.subreaper`) kill everything below them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_event: Callable[[str, str], None] = lambda name, what: None,
        restart_policy: RestartPolicy | None = None,
    ) -> None:
        self._lock = FolderLock(directory.absolute(), "supervisor.lock")
        self._on_event = on_event
        self._restart_policy = restart_policy or RestartPolicy()
        self._kept: list[tuple[Kept, threading.Thread]] = []
        self._telling = threading.Lock()
        self._stopping = threading.Event()
        self._failure: LocalError | None = None
        self._given_up: list[CrashLoopError] = []
        self._previous_actions: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}
        # Plain values, because a signal action must not take the lock of an Event: the interrupted code may hold it.
        self._is_waiting = False
        self._is_asked_to_stop = False
        self._is_hurried = False

    def __enter__(self) -> Self:
        """Lock the folder and catch the signals.

        Raises:
            FolderInUseError: another supervisor runs in the folder; `pid` is its process.
        """
        self._lock.acquire()
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                # Signals that nohup or a shell's `&` made us ignore stay ignored.
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._previous_actions[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for signum, action in self._previous_actions.items():
            signal.signal(signum, action)
        self._lock.release()

    def start(self, what: Server | Service) -> None:
        """Start a server or a service, block until it is ready, and keep it running from then on.

        Raises:
            LocalError: it cannot be started, died or was not ready in time. It is not started again then.
            ValueError: a server or service of this name exists already.
        """
        if not self._lock.descriptors or self._stopping.is_set():
            raise RuntimeError("a supervisor starts things inside its `with` block, and not after stop()")
        if any(kept.name == what.name for kept, _ in self._kept):
            raise ValueError(f"there is a service named {what.name} already")
        kept: Kept = ServiceRunner(what, self._lock.descriptors) if isinstance(what, Service) else what
        thread = threading.Thread(target=self._watch, args=(kept,), name=f"watch {kept.name}", daemon=True)
        # It is listed before it is started, so that a Ctrl-C at any moment stops it.
        self._kept.append((kept, thread))
        try:
            kept.start()
        except (LocalError, OSError):
            self._kept.pop()
            raise
        self._tell(kept, f"started (pid {kept.pid})")
        thread.start()

    @property
    def is_hurried(self) -> bool:
        """True if Ctrl-C was pressed while everything was being stopped."""
        return self._is_hurried

    def pid(self, name: str) -> int | None:
        """Return the pid of a server or service, or None while it does not run.

        Raises:
            KeyError: no server or service of this name was started.
        """
        return {kept.name: kept for kept, _ in self._kept}[name].pid

    def raise_if_failed(self) -> None:
        """Raise the error that made the supervisor give up, if it has given up.

        Raises:
            CrashLoopError: an essential service died repeatedly.
            LocalError: code of our own, such as `on_event`, failed while a service was watched.
        """
        if self._failure is not None:
            raise self._failure

    @property
    def given_up(self) -> tuple[str, ...]:
        """The names of the services that died repeatedly, and without which the others continue."""
        return tuple(failure.name for failure in self._given_up)

    def raise_if_given_up(self) -> None:
        """Raise GivenUpError, which has the causes, if the others continue without some services."""
        if self._given_up:
            raise GivenUpError(self._given_up)

    def run_until_stopped(self) -> None:
        """Block until Ctrl-C, SIGTERM, SIGHUP or a failure, then stop everything.

        Raises:
            CrashLoopError: an essential service died repeatedly.
            LocalError: see `raise_if_failed`.
        """
        self._is_waiting = True
        while not self._is_asked_to_stop and self._failure is None:
            time.sleep(WAIT_SECONDS)
        self.stop()
        self.raise_if_failed()

    def stop(self) -> None:
        """Stop everything, the last started first. Nothing can be started afterwards. A second call does nothing."""
        self._stopping.set()
        while self._kept:
            kept, thread = self._kept[-1]
            self._tell(kept, "stopping")
            kept.stop(self._hurried)
            while thread.ident is not None and thread.is_alive():
                # Its watcher may have been about to start it again.
                kept.stop(self._hurried)
                thread.join(WAIT_SECONDS)
            self._tell(kept, "stopped")
            self._kept.pop()

    def _hurried(self) -> bool:
        return self._is_hurried

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._stopping.is_set():
            self._is_hurried = self._is_hurried or signum == signal.SIGINT
        elif self._is_waiting:
            self._is_asked_to_stop = True
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + signum)

    def _tell(self, kept: Kept, what: str) -> None:
        with self._telling:
            self._on_event(kept.name, what)

    def _watch(self, kept: Kept) -> None:
        try:
            failure: LocalError | None = LocalError(
                f"the watch over {kept.name} broke; its traceback was printed above"
            )
            failure = self._keep_running(kept)
        finally:
            if failure is not None and self._failure is None:
                self._failure = failure

    def _keep_running(self, kept: Kept) -> LocalError | None:
        """Wait for a running service and restart it when it dies. Return a failure that ends everything, or None."""
        policy, quick_deaths = self._restart_policy, 0
        began = time.monotonic()
        how = describe_end(kept.wait())
        while not self._stopping.is_set():
            if kept.ended_for_good:
                self._tell(kept, how)
                return None
            if kept.is_hopeless:
                what = f"{how}, as it would at every start"
                return self._give_up(kept, CrashLoopError(kept.name, what, kept.last_lines(), kept.log_path))
            lived_seconds = time.monotonic() - began
            quick_deaths = quick_deaths + 1 if lived_seconds < policy.quick_seconds else 1
            if quick_deaths >= policy.max_quick_deaths:
                what = f"died {quick_deaths} times, each within {policy.quick_seconds:g} s of its start; it {how}"
                return self._give_up(kept, CrashLoopError(kept.name, what, kept.last_lines(), kept.log_path))
            delay = policy.seconds(quick_deaths)
            self._tell(kept, f"{how}; starting again in {delay:g} s")
            if self._stopping.wait(delay):
                break
            began = time.monotonic()
            how = self._run_once(kept)
        return None

    def _give_up(self, kept: Kept, failure: CrashLoopError) -> LocalError | None:
        """Return the failure if it ends everything, or record it and return None if the others can continue."""
        if kept.is_essential:
            self._tell(kept, "given up: nothing works without it, so everything is stopped")
            return failure
        self._given_up.append(failure)
        self._tell(kept, f"given up, and everything else continues without it: {failure}")
        return None

    def _run_once(self, kept: Kept) -> str:
        """Start a service again, wait for its end, and return how it ended."""
        try:
            kept.start()
        except (LocalError, OSError) as error:
            return f"could not be started: {error}"
        self._tell(kept, f"started again (pid {kept.pid})")
        return describe_end(kept.wait())
