"""Which of the embedding's dimensions belong to which client (SSD). Without torch: the API process assigns them."""

import random
from collections.abc import Iterable

from fedssl.errors import SpecError
from fedssl.protocol.runs import RunSpec
from fedssl.seeding import derive_seed


def assign_dimensions(run_seed: int, width: int, num_clients: int) -> list[tuple[int, ...]]:
    """One sorted tuple of floor(width / num_clients) dimensions a client, no dimension twice, drawn by the run's seed.

    What the division leaves over belongs to nobody. Raises SpecError where it does not reach for everybody.

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
    """The dimensions of every client that a run starts with, by name; empty where its method assigns none.

    Clients take the slots in name order. Raises SpecError where there are more clients than slots, or dimensions.
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
