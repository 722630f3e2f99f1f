"""Two rounds of one client on any device, with the random numbers of the CPU."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partialmethod

import pytest
import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import LocalResult, run_local_round
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.methods.composition.sampler import Sampler
from fedssl.protocol.runs import RunSpec
from fedssl.seeding import derive_seed
from support.methods import context
from support.rounds import aggregate, client_data, start

CLIENT = "client-0"


@dataclass(frozen=True)
class Round:
    """The weights that a client received, and the result of its training."""

    received: Tensors
    result: LocalResult


def use_cpu_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all devices the CPU's random numbers, because a GPU's generators draw others. Steps must then be eager."""

    def generator(ctx: Context, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(ctx.spec.seed, ctx.round_number, ctx.client_id, purpose))

    def begin(sampler: Sampler, original: object, seed: int, device: torch.device) -> None:
        original(sampler, seed, torch.device("cpu"))  # type: ignore[operator]

    monkeypatch.setattr(Context, "generator", generator)
    monkeypatch.setattr(Sampler, "start", partialmethod(begin, Sampler.start))


def two_rounds_of_one(spec: RunSpec, device: str = "cpu", like: Sequence[Round] | None = None) -> list[Round]:
    """Return two rounds of the same client.

    If `like` is given, the second round begins with the client state and the update of the first round of `like`.
    """
    now, state, rounds = start(spec), None, list[Round]()
    for number in (1, 2):
        ctx = context(spec, number, CLIENT)
        public = None if ctx.public is None else ctx.public.to(device)
        ctx = dataclasses.replace(ctx, device=torch.device(device), public=public)
        data = client_data(spec, CLIENT).to(device)
        found = run_local_round(METHODS[spec.method.name], now.received, state, data, ctx)
        rounds.append(Round(now.received, found))
        kept = found if like is None else like[number - 1].result
        state, now = kept.state, aggregate(spec, now.state, [(kept.num_examples, kept.update)], number)
    return rounds
