"""One command that the supervisor keeps running."""

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedssl_local.errors import ServiceFailedError
from fedssl_local.kept import Kept
from fedssl_local.process import Process, describe_end

Restart = Literal["always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A command and how to keep it running.

    `env` is added to this process's environment. `ready` returns whether the service can be used yet; it is called
    repeatedly and must not raise. Without it, a service is ready as soon as it has been started. With `restart="never"`
    the end of the service is only reported, as is an end with one of `final_statuses`. After one of
    `hopeless_statuses`, which another start would repeat, the service is given up at once. If a service that is not
    essential is given up, the others continue without it. `stop_signal` is sent to the command's process group, and
    SIGKILL to the command and all its descendants `stop_timeout_seconds` later. The output is appended to `log_path`.
    """

    name: str
    command: Sequence[str]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    restart: Restart = "always"
    final_statuses: Collection[int] = ()
    hopeless_statuses: Collection[int] = ()
    is_essential: bool = True
    ready: Callable[[], bool] | None = None
    ready_timeout_seconds: float = 60.0
    stop_signal: int = signal.SIGTERM
    stop_timeout_seconds: float = 10.0


class ServiceRunner(Kept):
    """Runs a `Service`."""

    def __init__(self, service: Service, held_fds: Sequence[int]) -> None:
        self.name = service.name
        self.log_path = service.log_path
        self.is_essential = service.is_essential
        self._service = service
        self._held_fds = held_fds

    @property
    def ended_for_good(self) -> bool:
        return self._service.restart == "never" or self.poll() in self._service.final_statuses

    @property
    def is_hopeless(self) -> bool:
        return self.poll() in self._service.hopeless_statuses

    def start(self) -> None:
        """Start the command and block until it is ready.

        Raises:
            ServiceFailedError: the command ended, or was not ready in time. None of its processes is left then.
        """
        service = self._service
        process = self._process = Process(
            service.command, log_path=self.log_path, env={**os.environ, **service.env}, held_fds=self._held_fds
        )
        if service.ready is None:
            return
        try:
            in_time = process.wait_for(service.ready_timeout_seconds, service.ready)
        except BaseException:
            process.kill()
            raise
        if in_time and process.poll() is None:
            return
        late = f"was not ready within {service.ready_timeout_seconds:g} s and was stopped"
        how = describe_end(process.kill())
        what = f"{how} before it was ready" if in_time else late
        raise ServiceFailedError(self.name, what, process.last_lines(), self.log_path)

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        if self._process is not None:
            self._process.stop(self._service.stop_signal, self._service.stop_timeout_seconds, hurry)
