"""Measure what a secure round adds for a model of 45 MB: CPU seconds of one client and of the coordinator, and bytes.

Run it with `PYTHONPATH=tests python tests/bench/measure_secure_rounds.py [--clients 10 100 1000]`. Every message of
every client is made and checked, and one client in ten is lost after it has shared its secrets. The time of masks is
that of one mask over the whole vector, times their number. Keys and shares are made while a client trains; the rest
comes after it, with the exchange of messages, which is not measured. The columns: clients, bits of a word, CPU seconds
of a client while it trains and after it, masks that the coordinator removes, its CPU seconds, the length of a round of
30 s with both, kilobytes that a client sends and receives besides the vector, and bytes as a multiple of a plain
round's.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from fedssl.aggregation.fixed_point import COUNTED_BITS, fixed_point_words
from fedssl.secure_aggregation import Words, wire
from fedssl.secure_aggregation.masks import apply_mask
from fedssl.secure_aggregation.messages import Confirmation
from support.secure_rounds import NEVER, SecureRound

MODEL_BYTES = 45_000_000
ROUND_SECONDS = 30.0
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


def mask_seconds(words: Words) -> float:
    """Return the CPU seconds of one mask over a vector."""
    apply_mask(words, bytes(32))
    clock = Clock()
    for number in range(5):
        clock.time("mask", lambda key=bytes([number] * 32): apply_mask(words, key))  # type: ignore[misc]
    return clock.seconds["mask"] / 5


def encoding_seconds() -> float:
    """Return the CPU seconds in which a client turns its update into words."""
    update, clock = torch.randn(MODEL_BYTES // 4) * 0.01, Clock()
    base = torch.zeros_like(update)
    clock.time(
        "words", lambda: fixed_point_words("w", update, base, 1000, fraction_bits=COUNTED_BITS, num_clients=1000)
    )
    return clock.seconds["words"]


def run(num_clients: int, clock: Clock) -> tuple[int, int, int, int]:
    """Run all phases with tiny vectors. Return the masks of a client and of the coordinator, and the bytes that the
    first client sends and receives, without the vector."""
    secure, first = SecureRound(num_clients, sizes=(2, 0)), "c000"
    server, num_lost = secure.server, num_clients // 10
    secure.lost_in |= dict.fromkeys(secure.names[-num_lost:], 2)

    def mine(name: str, step: Callable[[], T], what: str) -> T:
        return clock.time(what, step) if name == first else step()

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
    assert found.words.is_equal(secure.expected(found.survivors))
    assert secure.lost_in[first] == NEVER
    graph = server._frozen().graph
    lost = set(secure.names) - set(found.survivors)
    num_server = len(found.survivors) + sum(len(set(graph[name]) - lost) for name in lost)
    return 1 + len(graph[first]), num_server, sum(map(len, sent)), sum(map(len, received))


def main() -> None:
    """Print a row per number of clients and size of words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    num_values = MODEL_BYTES // 4
    vectors = {
        64: Words(np.zeros(num_values, np.uint64), np.zeros(0, np.uint32)),
        32: Words(np.zeros(0, np.uint64), np.zeros(num_values, np.uint32)),
    }
    masks = {bits: mask_seconds(words) for bits, words in vectors.items()}
    encoding = encoding_seconds()
    sys.stdout.write(f"one mask: {masks[64]:.4f} s with 64 bits, {masks[32]:.4f} s with 32; words: {encoding:.3f} s\n")
    for num_clients in parser.parse_args().clients:
        clock = Clock()
        num_own, num_server, up, down = run(num_clients, clock)
        for bits, seconds in masks.items():
            client = encoding + clock.seconds["client"] + num_own * seconds
            server = clock.seconds["coordinator"] + num_server * seconds
            ratio = (bits // 8 * num_values + up + down + MODEL_BYTES) / (2 * MODEL_BYTES)
            sys.stdout.write(
                f"| {num_clients:,} | {bits} | {clock.seconds['client, while it trains']:.2f} | {client:.2f} | "
                f"{num_server:,} | {server:.2f} | {(ROUND_SECONDS + client + server) / ROUND_SECONDS:.3f} | "
                f"{up / 1000:,.0f} | {down / 1000:,.0f} | {ratio:.3f} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
