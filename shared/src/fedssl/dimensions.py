"""Assigns dimensions of the embedding to clients (SSD). Does not import torch, because the API process uses it."""

import random
from collections.abc import Iterable

from fedssl.errors import SpecError
from fedssl.protocol.runs import RunSpec
from fedssl.seeding import derive_seed


def assign_dimensions(run_seed: int, width: int, num_clients: int) -> list[tuple[int, ...]]:
    """Return one sorted tuple of floor(width / num_clients) dimensions per client, drawn by the run's seed.

    No two clients share a dimension. The remainder of the division belongs to no client. Raises SpecError if there are
    fewer dimensions than clients, or no clients.

    >>> assign_dimensions(0, 7, 3)
    [(2, 4), (0, 6), (1, 5)]
    """
    if num_clients < 1 or width < num_clients:
        raise SpecError(
            f"an embedding of {width} dimensions cannot give each of {num_clients} clients one of its own: "
            "widen model.projector.out_dim, or take fewer clients"
        )
    order = list(range(width))
    random.Random(derive_seed(run_seed, 0, "", "dimensions")).shuffle(order)
    share = width // num_clients
    return [tuple(sorted(order[slot * share : (slot + 1) * share])) for slot in range(num_clients)]


def client_dimensions(spec: RunSpec, clients: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of every client that a run starts with, by name, or nothing if its method assigns none.

    Clients take the slots in name order. Raises SpecError if there are more clients than slots, or than dimensions.
    """
    wanted = spec.method.dimensions_wanted(spec.model)
    if wanted is None:
        return {}
    names = sorted(clients)
    num_slots = len(names) if wanted.num_clients is None else wanted.num_clients
    if num_slots < len(names):
        raise SpecError(
            f"the method divides the embedding among {num_slots} clients, but there are {len(names)}: "
            "raise num_clients of its add-on"
        )
    return dict(zip(names, assign_dimensions(spec.seed, wanted.width, num_slots), strict=False))
