"""SimCLR with fedssl: local rounds of its engine on one client, one after the other."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import ssl_task
import torch

from fedssl.engine import run_local_round, start_run
from fedssl.engine.trainer import borrow_trainer
from fedssl.methods import METHODS
from fedssl.methods.api import Batch, ClientData, Context
from fedssl.protocol.runs import RunSpec

METHOD = METHODS["fedsimclr"]
SPEC = RunSpec.model_validate(
    {
        "num_rounds": 100_000,
        "method": {"name": "fedsimclr", "temperature": ssl_task.TEMPERATURE},
        "model": {
            "encoder": {"name": "convnet", "widths": ssl_task.WIDTHS},
            "projector": {"hidden_dims": [ssl_task.HIDDEN], "out_dim": ssl_task.OUT},
        },
        "data": {
            "channels": 3,
            "image_size": 32,
            "mean": ssl_task.MEAN,
            "std": ssl_task.STD,
            "augmentation": {"min_scale": ssl_task.MIN_SCALE},
        },
        "training": {
            "batch_size": ssl_task.BATCH,
            "optimizer": {
                "learning_rate": ssl_task.LEARNING_RATE,
                "momentum": ssl_task.MOMENTUM,
                "weight_decay": ssl_task.WEIGHT_DECAY,
            },
        },
        "watch": {"num_images": 0},
    }
)


def context(number: int) -> Context:
    """Return the client's context in a round."""
    return Context(spec=SPEC, round_number=number, client_id="client", device=torch.device("cpu"))


def first_weights() -> dict[str, torch.Tensor]:
    """Return fedssl's first weights, which the other libraries also get."""
    return start_run(METHOD, Context(spec=SPEC, round_number=0)).model


class Client:
    """One client's training. A round has as many batches as the comparison asks for."""

    def __init__(self, folder: Path) -> None:
        self.images, self.weights = torch.from_numpy(ssl_task.images(folder)), first_weights()
        given = torch.load(folder / "weights.pt", weights_only=True)
        assert all(torch.equal(given[name], tensor) for name, tensor in self.weights.items())
        self.rounds, self.first = itertools.count(1), 0
        # A permutation. Each round takes the next images of it, so that each image is used once per epoch, as in the
        # peers.
        self.order = torch.randperm(len(self.images))
        with borrow_trainer(METHOD, context(1)) as trainer:
            self.algorithm = trainer.algorithm
        self.batch = next(self._batches(1))

    def step(self, number: int) -> None:
        with borrow_trainer(METHOD, context(1)) as trainer:
            take_step = trainer.start_round(trainer.algorithm.schedule(number * ssl_task.BATCH, context(1)), context(1))
            for _ in range(number):
                take_step(self.batch)

    def augment(self, number: int) -> None:
        for _ in self._batches(number):
            pass

    def train(self, number: int) -> None:
        result = run_local_round(METHOD, self.weights, None, self._data(number), context(next(self.rounds)))
        self.weights = result.update

    def _batches(self, number: int) -> Iterator[Batch]:
        return self.algorithm.batches(self._data(number), 0, context(next(self.rounds)))

    def _data(self, number: int) -> ClientData:
        wanted = number * ssl_task.BATCH
        if self.first + wanted > len(self.order):
            self.order, self.first = torch.randperm(len(self.images)), 0
        self.first += wanted
        return ClientData(self.images[self.order[self.first - wanted : self.first]])


def main() -> None:
    folder, _ = ssl_task.from_command_line()
    client = Client(folder)
    ssl_task.serve(client.step, client.augment, client.train, lambda: client.weights)


if __name__ == "__main__":
    main()
