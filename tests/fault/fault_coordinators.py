"""Broken and malicious coordinators: workers get wrong answers, drawn at random, instead of the coordinator's."""

import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from fault import audit, specs
from fault.federation import FaultFederation
from fault.proxy import Proxy, Request, Rule
from support import hostile
from support.listening import Listener

FAULT_CLASS = "hostile coordinators"

_CHANCE = 0.35  # of a request to get a wrong answer
_NUM_ANSWERS = 20
_JSON = re.compile(r"^POST /v1/work/(claim|heartbeat|submit|ended-runs)$")
_BROKEN = {name: hostile.MALFORMED[name] for name in ("nothing", "not HTTP", "a head without end", "two lengths")}
PASSING = {**hostile.REFUSALS, **hostile.WAITS, **_BROKEN}
"""Answers to a transfer after which the same transfer is tried again."""


class Trap(Listener):
    """A server that is the target of redirects. No request may arrive at it."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[bytes] = []

    def _serve(self, client: socket.socket) -> None:
        self.came.append(client.recv(4096))


@contextmanager
def hostile_answers(federation: FaultFederation, rng: random.Random, trap: Trap) -> Iterator[list[str]]:
    """Give prepared answers to some requests instead of the coordinator's. Yields the names of the given answers."""
    proxy, given, lock = federation.proxy, list[str](), threading.Lock()
    redirects = {
        f"a redirect by {status}": hostile.answer(b"", status, Location=f"{trap.url}/v1/work/claim")
        for status in ("301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect")
    }
    for_json = {**hostile.MALFORMED, **PASSING, **redirects}

    def exchange(client: socket.socket, request: Request, body: bytes, rule: Rule | None) -> None:
        with lock:
            answers = for_json if _JSON.search(request.start) else PASSING
            name = rng.choice(sorted(answers)) if len(given) < _NUM_ANSWERS and rng.random() < _CHANCE else None
            if name is not None:
                given.append(name)
        if name is None:
            Proxy._exchange(proxy, client, request, body, rule)
            return
        federation.injected.note(_kind(name), re.sub(r"(/(artifacts|uploads))/.*", r"\1/...", request.start), name)
        with suppress(OSError):
            while len(body) < request.length:
                body += client.recv(1 << 16) or b" " * request.length  # the worker has closed the connection
            for part in answers[name]():
                client.sendall(part)

    proxy._exchange = exchange  # type: ignore[method-assign]
    try:
        yield given
    finally:
        del proxy._exchange


def _kind(name: str) -> str:
    if name in hostile.MALFORMED:
        return "a malformed answer"
    if name in hostile.REFUSALS:
        return "a refusal that is not about the worker"
    return "an invalid time to wait" if name in hostile.WAITS else "a redirect"


@pytest.mark.parametrize("method", ["fedbyol", "scaffold"])
def test_runs_complete_despite_random_hostile_answers(
    method: str, federation: FaultFederation, rng: random.Random
) -> None:
    """No worker ends or hangs, and every run has the bits of the undisturbed run."""
    workers = {name: federation.pid(name) for name in federation.clients}
    spec = specs.spec(method, num_rounds=3)
    with Trap() as trap:
        with hostile_answers(federation, rng, trap) as given:
            while len(given) < _NUM_ANSWERS:
                audit.completed(federation, federation.begin(spec), spec)
        audit.completed(federation, federation.begin(spec), spec)  # with only honest answers
        assert trap.came == []
    assert {name: federation.pid(name) for name in federation.clients} == workers
    for name in workers:
        assert federation._processes[name].poll() is None
        assert "Traceback" not in (federation.folder / f"{name}.log").read_text(errors="replace")
