"""The work of one of the processes that train clients."""

import contextlib
import dataclasses
import json
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedssl import errors
from fedssl.data.image_batches import Images
from fedssl.data.image_cache.images import CachedImages
from fedssl.data_parallel import join
from fedssl.engine import LocalProgress, LocalResult, run_local_round
from fedssl.engine.devices import memory_errors_explained, require_device
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context
from fedssl.parallel.pool import PUBLIC, groups_of, held_out_of, images_of, labels_of
from fedssl.parallel.shared_tensors import SharedTensors
from fedssl.protocol.runs import RunSpec


class _Clients:
    """Trains the clients that are requested."""

    def __init__(self, connection: Connection, images: int, broadcast: int, exchange: int) -> None:
        self._connection = connection
        self._is_first = True  # of several processes that train a client together: the others report only errors
        self._broadcast, self._exchange = SharedTensors(broadcast), SharedTensors(exchange)
        setup = json.loads(connection.recv_bytes())
        torch.set_num_threads(setup["threads"])
        self._spec, self._device = RunSpec.model_validate(setup["spec"]), require_device(setup["device"])
        self._images, self._caches = SharedTensors(images).read(setup["images"]), setup["caches"]
        self._public = ClientData(self._images[PUBLIC].to(self._device)) if PUBLIC in self._images else None

    def train(self, task: Mapping[str, Any]) -> LocalResult:
        """Train one client for one round, together with other processes if the task has `ranks`."""
        with memory_errors_explained(str(self._device), self._spec.training.batch_size):
            return self._train(task)

    def _train(self, task: Mapping[str, Any]) -> LocalResult:
        name, spec, device = task["client_id"], self._spec, self._device
        labels, held_out, groups = (self._images.get(of(name)) for of in (labels_of, held_out_of, groups_of))
        data = ClientData(self._images_of(name), labels, held_out, groups).to(device)
        ctx = Context(
            spec=spec,
            round_number=task["round_number"],
            client_id=name,
            device=device,
            dimensions=None if task["dimensions"] is None else tuple(task["dimensions"]),
            public=self._public,
        )
        broadcast = self._broadcast.read(task["broadcast"])
        kept = None if task["state"] is None else self._exchange.read(task["state"])
        if (ranks := task["ranks"]) is not None:
            join(ranks["rank"], ranks["size"], Path(ranks["meeting_point"]), device)
            self._is_first = ranks["rank"] == 0
        return run_local_round(METHODS[spec.method.name], broadcast, kept, data, ctx, self._report)

    def _images_of(self, name: str) -> Images:
        if name not in self._caches:
            return self._images[images_of(name)]
        rows = {part: self._images[f"{part} of {images_of(name)}"] for part in CachedImages.ROWS}
        return CachedImages.from_parts(self._caches[name], rows)

    def send(self, result: LocalResult) -> None:
        """Send the result of a training."""
        if not self._is_first:
            return
        tensors = {f"update.{name}": tensor for name, tensor in result.update.items()}
        tensors |= {f"state.{name}": tensor for name, tensor in result.state.items()}
        self._answer(
            update=list(result.update),
            state=list(result.state),
            num_examples=result.num_examples,
            metrics=result.metrics,
            num_images=result.num_images,
            tensors=self._exchange.write(tensors),
        )

    def serve(self) -> None:
        """Train one client after another. An error is sent in place of a result."""
        while True:
            task = json.loads(self._connection.recv_bytes())
            try:
                result = self.train(task)
            except Exception as error:  # noqa: BLE001 - raised again by the simulation's process
                kinds = [kind.__name__ for kind in type(error).__mro__]
                known = next((name for name in kinds if name in vars(errors)), None)
                text = str(error) if known else f"{kinds[0]}: {error}"
                self._answer(error=known, text=text, traceback=traceback.format_exc())
            else:
                self.send(result)

    def _report(self, progress: LocalProgress) -> None:
        if self._is_first:
            self._answer(progress=dataclasses.asdict(progress))

    def _answer(self, **message: Any) -> None:
        self._connection.send_bytes(json.dumps(message).encode())


def serve(connection: int, images: int, broadcast: int, exchange: int) -> None:
    """Train clients for the process that holds the other end of the connection, until it ends."""
    with contextlib.suppress(EOFError, ConnectionError):
        _Clients(Connection(connection), images, broadcast, exchange).serve()
