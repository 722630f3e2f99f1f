"""Measure what a secure round adds for a model of 45 MB: seconds of one client and of the coordinator, and bytes.

Run it with `PYTHONPATH=tests python tests/bench/measure_secure_rounds.py [--clients 10 100 1000] [--part 0.1]`. Every
message of every client is made and checked, and one client in ten is lost after it has shared its secrets. Only the
first client verifies signatures: a thousand clients that each verify a thousand would take most of the time. All masks
of a client and of the coordinator are added to a part of a vector (`--part`) by one thread, and by one per core, and
the time is multiplied. Keys and shares are made while a client trains; the rest comes after it, with the exchange of
messages, which is not measured. Nor is the reading of the vectors: a plain round reads its updates as well.

The columns: clients, bits of a word, threads, CPU seconds of a client while it trains, seconds of a client after it,
masks that the coordinator removes, its seconds, the masks' CPU seconds and their seconds by the clock, the length of a
round of 30 s with both, kilobytes that a client sends and receives besides the vector, and bytes as a multiple of a
plain round's. Seconds are CPU time, that of masks divided by the threads: what the clock shows if the cores are free.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import torch

from fedssl.aggregation.fixed_point import COUNTED_BITS, fixed_point_words
from fedssl.cores import num_usable_cores
from fedssl.secure_aggregation import agreement, wire
from fedssl.secure_aggregation import roster as roster_module
from fedssl.secure_aggregation.masks import Mask, apply_masks
from fedssl.secure_aggregation.messages import Confirmation
from support.secure_rounds import NEVER, SecureRound

MODEL_BYTES = 45_000_000
ROUND_SECONDS = 30.0
NUM_TRIALS = 7
T = TypeVar("T")


class Clock:
    """Adds up CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, step: Callable[[], T]) -> T:
        """Return what a step returns, and add its time."""
        began = time.process_time()
        found = step()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began
        return found


def masking(bits: int, num_masks: int, num_threads: int, part: float) -> tuple[float, float]:
    """Return the seconds of all masks over a vector, by the clock and of CPU time: the least of several trials over a
    part of it, because other processes only make them longer."""
    num_words = int(MODEL_BYTES // 4 * part) * bits // 64  # two numbers of 32 bits share a word
    vector, masks = np.zeros(num_words, np.uint64), [Mask(number.to_bytes(32)) for number in range(num_masks)]
    trials = []
    for _ in range(NUM_TRIALS):
        began, began_cpu = time.perf_counter(), time.process_time()
        apply_masks(vector, masks, num_threads=num_threads)
        trials.append((time.perf_counter() - began, time.process_time() - began_cpu))
    return tuple(min(seconds) / part for seconds in zip(*trials, strict=True))


@contextmanager
def trusting() -> Iterator[None]:
    """Verify no signature within the block."""
    with patch.object(agreement, "is_signed_by", always), patch.object(roster_module, "is_signed_by", always):
        yield


def always(*_: bytes) -> bool:
    return True


def encoding_seconds() -> float:
    """Return the CPU seconds in which a client turns its update into words."""
    update, clock = torch.randn(MODEL_BYTES // 4) * 0.01, Clock()
    base = torch.zeros_like(update)
    for _ in range(2):  # the first time, memory is new
        clock.seconds.clear()
        clock.time(
            "words", lambda: fixed_point_words("w", update, base, 1000, fraction_bits=COUNTED_BITS, num_clients=1000)
        )
    return clock.seconds["words"]


def run(num_clients: int, clock: Clock) -> tuple[int, int, int, int]:
    """Run all phases with tiny vectors. Return the masks of a client and of the coordinator, and the bytes that the
    first client sends and receives, without the vector."""
    secure, first = SecureRound(num_clients, num_words=2), "c000"
    server, num_lost = secure.server, num_clients // 10
    secure.lost_in |= dict.fromkeys(secure.names[-num_lost:], 2)

    def mine(name: str, step: Callable[[], T], what: str) -> T:
        if name == first:
            return clock.time(what, step)
        with trusting():
            return step()

    for name in secure.at(0):
        secure.clients[name] = mine(name, lambda name=name: secure.client(name), "client, while it trains")  # type: ignore[misc]
        clock.time("coordinator", lambda name=name: server.add_keys(secure.clients[name].announcement))  # type: ignore[misc]
    roster = clock.time("coordinator", server.freeze_keys)
    sent = [wire.keys_to_wire(secure.clients[first].announcement).model_dump_json()]
    received = [wire.keys_to_wire(keys).model_dump_json() for keys in roster]
    for name in secure.at(1):
        shares = mine(name, lambda name=name: secure.clients[name].share(roster), "client, while it trains")  # type: ignore[misc]
        clock.time("coordinator", lambda shares=shares: server.add_shares(shares))  # type: ignore[misc]
        sent += [wire.shares_to_wire(shares).model_dump_json()] if name == first else []
    secure.inboxes = clock.time("coordinator", server.freeze_shares)
    received.append(wire.inbox_to_wire(secure.inboxes[first]).model_dump_json())
    for name in secure.at(2):
        step = partial(secure.clients[name].mask, secure.inboxes[name], secure.words[name])
        vector = mine(name, step, "client")
        clock.time("coordinator", lambda vector=vector: server.add_vector(vector))  # type: ignore[misc]
    survivors = clock.time("coordinator", server.freeze_vectors)
    received.append(str(survivors.signatures))
    for name in secure.at(3):
        confirmation: Confirmation = mine(name, lambda name=name: secure.clients[name].confirm(survivors), "client")  # type: ignore[misc]
        clock.time("coordinator", lambda it=confirmation: server.add_confirmation(it))  # type: ignore[misc]
    confirmations = clock.time("coordinator", server.freeze_confirmations)
    received += [wire.confirmation_to_wire(each).model_dump_json() for each in confirmations]
    for name in secure.at(4):
        reveals = mine(name, lambda name=name: secure.clients[name].reveal(confirmations), "client")  # type: ignore[misc]
        clock.time("coordinator", lambda reveals=reveals: server.add_reveals(reveals))  # type: ignore[misc]
        sent += [wire.reveals_to_wire(reveals).model_dump_json()] if name == first else []
    found = clock.time("coordinator", server.finish)
    assert np.array_equal(found.words, secure.expected(found.survivors))
    assert secure.lost_in[first] == NEVER
    graph = server._frozen().graph
    lost = set(secure.names) - set(found.survivors)
    num_server = len(found.survivors) + sum(len(set(graph[name]) - lost) for name in lost)
    return 1 + len(graph[first]), num_server, sum(map(len, sent)), sum(map(len, received))


def main() -> None:
    """Print a row per number of clients, size of words and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--part", type=float, default=0.1, help="of the vector to which masks are added")
    parser.add_argument("--bits", type=int, nargs="+", default=[64, 32])
    options = parser.parse_args()
    encoding, num_values = encoding_seconds(), MODEL_BYTES // 4
    sys.stdout.write(f"words of an update: {encoding:.3f} s\n")
    for num_clients in options.clients:
        clock = Clock()
        num_own, num_server, up, down = run(num_clients, clock)
        before, after, server = (clock.seconds[name] for name in ("client, while it trains", "client", "coordinator"))
        for bits, num_threads in product(options.bits, sorted({1, num_usable_cores()})):
            client = encoding + after + masking(bits, num_own, num_threads, options.part)[1] / num_threads
            clock_seconds, cpu_seconds = masking(bits, num_server, num_threads, options.part)
            masks = cpu_seconds / num_threads
            ratio = (bits // 8 * num_values + up + down + MODEL_BYTES) / (2 * MODEL_BYTES)
            sys.stdout.write(
                f"| {num_clients:,} | {bits} | {num_threads} | {before:.2f} | {client:.2f} | {num_server:,} | "
                f"{server + masks:.2f} | {cpu_seconds:.2f} | {clock_seconds:.2f} | "
                f"{(ROUND_SECONDS + client + server + masks) / ROUND_SECONDS:.3f} | "
                f"{up / 1000:,.0f} | {down / 1000:,.0f} | {ratio:.3f} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
