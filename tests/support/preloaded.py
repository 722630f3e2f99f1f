"""Real processes, forked from one that has imported the libraries: a new interpreter takes seconds to import them.

`Preloaded.start` returns what `subprocess.Popen` would. The parent has one thread and no settings, connections or
random state, so a child differs from `python -m` only in what is already imported. Tests of imports, and of what
happens before them, start interpreters instead.
"""

import contextlib
import functools
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, NoReturn

_MODULES = (
    "fedssl_coordinator.aggregator.tasks",
    "fedssl_coordinator.app",
    "fedssl_coordinator.http.server",
    "fedssl_coordinator.main",
    "fedssl.parallel.process",
    "fedssl_worker.executor",
    "fedssl_worker.main",
    "celery.apps.worker",
    "celery.beat",
    "torch._dynamo",  # imported by DistributedDataParallel
)
# What the interpreter and its libraries read once, when they are loaded.
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_", "KMP_", "CUDA_", "TORCH")
_READ_LATER = ("TORCHINDUCTOR_CACHE_DIR",)  # torch sets it in a test's process as soon as a test compiles
_LARGEST_REQUEST = 100_000
_MOST_DESCRIPTORS = 16


class Forked:
    """A process that `Preloaded` has started, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int, status: socket.socket, stdin: BinaryIO | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises TimeoutExpired if the process runs for longer."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = _number(self._status)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that interpreters read at their start. MKL uses as many threads as OpenMP by default."""
    found = {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}
    for name in _READ_LATER:
        found.pop(name, None)
    if found.get("MKL_NUM_THREADS") == found.get("OMP_NUM_THREADS"):
        found.pop("MKL_NUM_THREADS", None)
    return found


def _number(status: socket.socket) -> int:
    answer = status.recv(100)
    if not answer:
        raise RuntimeError("the parent of the forked processes has ended")
    return int(answer)


class Preloaded:
    """The parent, which ends with the process that created it."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                env=self._environment,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Return whether a child can have this environment. What an interpreter reads at its start is the parent's."""
        return _at_start(environment) == _at_start(self._environment)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: BinaryIO,
        *,
        descriptors: Sequence[int] = (),
        has_input: bool = False,
    ) -> Forked:
        """Start `python -m module arguments` in its own session, with its output in `log`.

        `descriptors` are open there too, under other numbers, which are its last arguments. With `has_input`, its
        standard input is a pipe, whose other end is the returned object's `stdin`.
        """
        if not self.suits(environment):
            differ = _at_start(environment).items() ^ _at_start(self._environment).items()
            raise ValueError(f"start an interpreter, which reads these variables: {sorted(differ)}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, writer = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), None)
        with theirs, os.fdopen(stdin):
            request = json.dumps([module, *arguments, dict(environment), str(Path.cwd())]).encode()
            socket.send_fds(self._control, [request], [stdin, log.fileno(), theirs.fileno(), *descriptors])
        return Forked(_number(ours), ours, None if writer is None else os.fdopen(writer, "wb"))

    def output(self, module: str, *arguments: str, environment: Mapping[str, str]) -> str:
        """Return what `python -m module arguments` prints. Raises CalledProcessError if it fails."""
        with tempfile.TemporaryFile() as log:
            code = self.start(module, arguments, environment, log).wait()
            log.seek(0)
            text = log.read().decode()
        if code:
            raise subprocess.CalledProcessError(code, [module, *arguments], text)
        return text

    def close(self) -> None:
        """End the parent; processes that it has started continue."""
        self._control.close()
        self._process.wait()


@functools.cache
def preloaded() -> Preloaded:
    """Return this test process's parent of processes, which is made on first use."""
    return Preloaded()


def _serve(control: socket.socket) -> list[str]:
    """Fork on request until the other side has closed. Returns, in each child, the program that it has to run."""
    statuses: dict[int, socket.socket] = {}
    ended, wake_up = socket.socketpair()
    wake_up.setblocking(False)
    signal.set_wakeup_fd(wake_up.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if ended in ready:
            ended.recv(1000)
            _report(statuses)
        if control not in ready:
            continue
        request, received, _, _ = socket.recv_fds(control, _LARGEST_REQUEST, _MOST_DESCRIPTORS)
        if not request:
            os._exit(0)
        stdin, log, status, *descriptors = received
        pid = os.fork()
        if not pid:
            for server in (control, ended, wake_up, *statuses.values()):
                server.close()
            selector.close()
            os.close(status)
            return [*_become(request, stdin, log), *map(str, descriptors)]
        for descriptor in (stdin, log, *descriptors):
            os.close(descriptor)
        statuses[pid] = socket.socket(fileno=status)
        statuses[pid].send(str(pid).encode())


def _report(statuses: dict[int, socket.socket]) -> None:
    """Send the exit codes of the children that have ended."""
    while statuses:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with statuses.pop(pid) as status, contextlib.suppress(OSError):  # no one waits for it any more
            status.send(str(os.waitstatus_to_exitcode(code)).encode())


def _become(request: bytes, stdin: int, log: int) -> list[str]:
    """Give this child the requested environment, folder, input and output."""
    *command, environment, folder = json.loads(request)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stdin, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    random.seed()
    return list(command)


def _preload() -> None:
    gc.disable()  # each search through the imported modules would find nothing
    for module in _MODULES:
        import_module(module)
    from fedssl_coordinator.core.settings import settings

    assert not settings.cache_info().currsize
    assert len(os.listdir("/proc/self/task")) == 1, "a child of several threads may inherit their locks"
    gc.collect()
    gc.freeze()
    gc.enable()


def _main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[1]))
    _preload()
    module, *arguments = _serve(control)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _main()
