"""Two rounds of a method by two clients in turn, on any device."""

import dataclasses
from typing import Any

import torch

from fedssl.engine import LocalResult, run_local_round
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData
from fedssl.protocol.runs import RunSpec
from support.combinations import combined_spec
from support.methods import context
from support.rounds import aggregate, client_data, start

CLIENTS = ("client-0", "client-1")


def two_rounds_spec(name: str, **optimizer: Any) -> RunSpec:
    training = {"batch_size": 16, "local_epochs": 1, "drop_last": False, "optimizer": {"name": "sgd", **optimizer}}
    return combined_spec(name, training=training)


def two_rounds(spec: RunSpec, device: str = "cpu") -> list[LocalResult]:
    """One client in the first, another in the second."""
    now, results = start(spec), []
    for number, client in enumerate(CLIENTS, 1):
        ctx, data = on_device(device, context(spec, number, client)), moved(client_data(spec, client), device)
        result = run_local_round(METHODS[spec.method.name], now.broadcast, None, data, ctx)
        now = aggregate(spec, now.state, [(result.num_examples, result.update)], number)
        results.append(result)
    return results


def on_device(device: str, ctx: Any) -> Any:
    public = None if ctx.public is None else moved(ctx.public, device)
    return dataclasses.replace(ctx, device=torch.device(device), public=public)


def moved(data: ClientData, device: str) -> ClientData:
    return ClientData(data.images.to(device), None if data.labels is None else data.labels.to(device))
