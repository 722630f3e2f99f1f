"""The processes that train clients, seen from the simulation or the worker that starts them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedssl import errors
from fedssl.artifacts.tensors import Tensors
from fedssl.engine import LocalProgress, LocalResult
from fedssl.errors import FedSSLError, LocalError
from fedssl.methods.api import ClientData, ClientState, Context
from fedssl.parallel.shared_tensors import Layout, SharedTensors
from fedssl.protocol.runs import RunSpec

PUBLIC = "public"

_END_SECONDS = 1.0
"""How long to wait for the end of a process whose connection has broken."""


def images_of(client: str) -> str:
    """Return the name of a client's images among the shared tensors."""
    return f"images of {client}"


def labels_of(client: str) -> str:
    """Return the name of a client's labels among the shared tensors."""
    return f"labels of {client}"


def held_out_of(client: str) -> str:
    """Return the name of a client's mask of held-out images among the shared tensors."""
    return f"held-out images of {client}"


def groups_of(client: str) -> str:
    """Return the name of the groups of a client's images among the shared tensors."""
    return f"groups of {client}"


class ClientProcesses:
    """Processes, each of which trains one client at a time, for as long as the `with` block lasts.

    Their results have the same bits as in this process, because each uses as many CPU threads. The images are in memory
    once, whatever the number of processes. A process ends when this one does, even if it is killed.

    `data`: the clients' images, in this process's memory, which are not kept. `devices`: one per process. `remedy`:
    what to do if one is killed.
    """

    def __init__(
        self,
        spec: RunSpec,
        data: Mapping[str, ClientData],
        public: ClientData | None,
        devices: Sequence[str],
        remedy: str = "Run the same again to continue after the last completed round, if memory ran out with fewer "
        "--jobs",
    ) -> None:
        self._remedy = remedy
        self._sizes = {name: len(each) for name, each in data.items()}
        self._devices = devices
        self._images, self._broadcast = SharedTensors(), SharedTensors()
        held: dict[str, torch.Tensor] = {}
        caches: dict[str, Any] = {}
        for name, each in data.items():
            if isinstance(each.images, torch.Tensor):
                held[images_of(name)] = each.images
            else:
                caches[name], rows = each.images.parts()
                held |= {f"{part} of {images_of(name)}": tensor for part, tensor in rows.items()}
        held |= {labels_of(name): each.labels for name, each in data.items() if each.labels is not None}
        held |= {held_out_of(name): each.held_out for name, each in data.items() if each.held_out is not None}
        held |= {groups_of(name): each.groups for name, each in data.items() if each.groups is not None}
        if public is not None:
            held[PUBLIC] = public.images[:]
        self._setup = {
            "spec": spec.model_dump(mode="json"),
            "threads": torch.get_num_threads(),
            "images": self._images.write(held),
            "caches": caches,
        }
        self._processes: list[_Process] = []

    def __enter__(self) -> "ClientProcesses":
        try:
            for _ in self._devices:
                self._processes.append(_Process(self._images, self._broadcast, self._remedy))
            for process, device in zip(self._processes, self._devices, strict=True):  # they start at the same time
                process.send({**self._setup, "device": device})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end()
        for shared in (self._images, self._broadcast):
            shared.close()

    def train(
        self,
        broadcast: Tensors,
        kept: Mapping[str, ClientState],
        contexts: Sequence[Context],
        on_progress: Callable[[str, LocalProgress], None],
    ) -> dict[str, LocalResult]:
        """Train the clients of `contexts` for one round, those with the most images first.

        Raises what a client's training raised, and LocalError if a process was killed. Then none can be used again.
        """
        layout = self._broadcast.write(broadcast)
        waiting = sorted(contexts, key=lambda ctx: self._sizes[ctx.client_id])
        idle, busy = list(self._processes), dict[Any, _Process]()
        results: dict[str, LocalResult] = {}
        while waiting or busy:
            while waiting and idle:
                process, ctx = idle.pop(), waiting.pop()
                process.start_round(ctx, layout, kept.get(ctx.client_id))
                busy[process.connection] = process
            for connection in wait(list(busy)):
                process = busy[connection]
                answer = process.receive()
                if isinstance(answer, LocalProgress):
                    on_progress(process.client, answer)
                else:
                    results[process.client] = answer
                    idle.append(busy.pop(connection))
        return {ctx.client_id: results[ctx.client_id] for ctx in contexts}

    def train_together(
        self,
        broadcast: Tensors,
        kept: ClientState | None,
        ctx: Context,
        on_progress: Callable[[LocalProgress], None],
    ) -> LocalResult:
        """Train one client for one round on all devices together, only once: the processes then wait for one another.

        Raises what the training raised in any process, and LocalError if one was killed.
        """
        layout = self._broadcast.write(broadcast)
        with TemporaryDirectory() as folder:
            for rank, process in enumerate(self._processes):
                ranks = {"rank": rank, "size": len(self._processes), "meeting_point": str(Path(folder) / "processes")}
                process.start_round(ctx, layout, kept, ranks)
            connections: dict[Any, _Process] = {process.connection: process for process in self._processes}
            while True:
                for connection in wait(list(connections)):
                    answer = self._received(connections[connection])
                    if isinstance(answer, LocalResult):
                        return answer
                    on_progress(answer)

    def _received(self, process: "_Process") -> LocalProgress | LocalResult:
        """Return a process's message. Raises its error, or LocalError if that only shows that another process ended."""
        try:
            return process.receive()
        except FedSSLError:
            raise
        except Exception as error:
            for other in self._processes:
                if other is not process and other.has_ended(_END_SECONDS):
                    raise other.lost() from error
            raise


class _Process:
    """One process, and the memory through which it gets a client's state and returns its update."""

    def __init__(self, images: SharedTensors, broadcast: SharedTensors, remedy: str) -> None:
        self.client = ""
        self._remedy = remedy
        self._exchange = SharedTensors()
        self.connection, theirs = Pipe()
        descriptors = [theirs.fileno(), *(each.descriptor for each in (images, broadcast, self._exchange))]
        threads = str(torch.get_num_threads())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedssl.parallel", *map(str, descriptors)],
                stdin=subprocess.PIPE,  # the process ends when this pipe does
                pass_fds=descriptors,
                process_group=0,  # Ctrl-C is for this process, which ends the others
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises LocalError if the process is gone."""
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            raise self.lost() from None

    def start_round(
        self, ctx: Context, broadcast: Layout, kept: ClientState | None, ranks: Mapping[str, Any] | None = None
    ) -> None:
        """Make the process train a client, as one of the `ranks` if several train it together."""
        self.client = ctx.client_id
        self.send(
            {
                "round_number": ctx.round_number,
                "client_id": ctx.client_id,
                "dimensions": ctx.dimensions,
                "broadcast": broadcast,
                "state": None if kept is None else self._exchange.write(kept),
                "ranks": ranks,
            }
        )

    def receive(self) -> LocalProgress | LocalResult:
        """Return the client's progress, or its result. Raises the error that ended its training."""
        try:
            message = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self.lost() from None
        if "progress" in message:
            return LocalProgress(**message["progress"])
        if "error" in message:
            kind: type[Exception] = getattr(errors, message["error"] or "", RuntimeError)
            error = kind(message["text"])
            error.add_note(message["traceback"])
            raise error
        tensors = {name: tensor.clone() for name, tensor in self._exchange.read(message["tensors"]).items()}
        update, state = ({name: tensors[f"{what}.{name}"] for name in message[what]} for what in ("update", "state"))
        return LocalResult(update, state, message["num_examples"], message["metrics"], message["num_images"])

    def end(self) -> None:
        """End the process, which has nothing to lose, and free its memory."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.connection.close()
        self._exchange.close()

    def has_ended(self, timeout: float) -> bool:
        """Return whether the process ends within some seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def lost(self) -> LocalError:
        """Return the error for a process that has ended."""
        code = self._process.wait()
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if code == -signal.SIGKILL:
            ended += ", which is what the system does when memory runs out"
        return LocalError(
            f"a process that trains clients {ended}{f' (it had {self.client})' if self.client else ''}. {self._remedy}"
        )
