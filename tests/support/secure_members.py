"""The cohort of an open secure round. The test itself sends its messages, correct ones and others."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import VECTOR_NAME, SecureInbox, SecureKeys, SecureStatus, SecureVector
from fedssl.protocol.views import SecureRoundView
from fedssl.protocol.work import WorkItem
from fedssl.secure_aggregation import OwnerLimits, SecureClient, Words, wire
from support.coordinator import Coordinator
from support.secure_workers import SecureWorkers


class SecureMembers:
    """All clients of the run's first round, each with a lease."""

    def __init__(self, coordinator: Coordinator, folder: Path, spec: RunSpec) -> None:
        self.coordinator, self.folder = coordinator, folder
        self.workers = SecureWorkers(coordinator, folder, spec)
        self.advance()
        self.items: dict[str, WorkItem] = {}
        for name, client in self.workers.clients.items():
            item = client.claim(0)
            assert item is not None
            self.items[name] = item
        self.secure = {name: self.client(name) for name in self.items}

    def advance(self) -> None:
        self.coordinator.advance(self.workers.id)

    def needs_attention(self) -> bool:
        """Return whether the sweep would find the run, if the message to the aggregator were lost."""
        from fedssl_coordinator.core.db import transaction
        from fedssl_coordinator.federation.rounds import repository

        with transaction() as session:
            return self.workers.id in repository.needing_attention(session)

    def shown(self) -> SecureRoundView:
        """Return what the REST API shows of the round."""
        current = self.coordinator.client.run(self.workers.id).current_round
        assert current is not None
        assert current.secure is not None
        return current.secure

    def client(self, name: str) -> SecureClient:
        """Return a new client with the identity of this name."""
        context = self.workers.agent(name)._executor.secure_context(self.items[name])
        return SecureClient(context, name, self.workers.identities[name], OwnerLimits())

    def words(self, name: str) -> Words:
        """Train, and return the words of the update."""
        executor = self.workers.agent(name)._executor
        finished = executor.execute(self.items[name], lambda progress: None)
        return executor.secure_words(self.items[name], finished)

    def send(self, name: str, message: Any) -> SecureStatus:
        return self.workers.clients[name].send_secure(self.items[name].assignment_id, message)

    def status(self, name: str) -> SecureStatus:
        return self.workers.clients[name].secure_status(self.items[name].assignment_id)

    def keys(self, name: str) -> SecureKeys:
        return wire.keys_to_wire(self.secure[name].announcement)

    def share(self, name: str) -> Any:
        """Return a client's shares, as it would send them."""
        return wire.shares_to_wire(self.secure[name].share(wire.roster_from_wire(self.status(name).roster or {})))

    def masked(self, name: str, words: Words) -> SecureVector:
        """Upload a client's masked vector, and return the message about it."""
        inbox = self.status(name).inbox or SecureInbox(sharers=(), deliveries=())
        vector = self.secure[name].mask(wire.inbox_from_wire(inbox), words)
        return self.uploaded(name, vector.words, vector.signature)

    def uploaded(self, name: str, words: np.ndarray[Any, np.dtype[np.uint64]], signature: bytes) -> SecureVector:
        """Upload a vector as it is, and return the message about it."""
        path = self.folder / f"{name}-masked.safetensors"
        save_tensors({VECTOR_NAME: torch.from_numpy(words.view(np.int64))}, path)
        digest = digest_of(path)
        self.workers.clients[name].upload(digest, path, self.items[name].assignment_id)
        return SecureVector(update=digest, signature=signature.hex())

    def confirm(self, name: str) -> None:
        confirmation = self.secure[name].confirm(wire.survivors_from_wire(self.status(name).survivors or {}))
        self.send(name, wire.confirmation_to_wire(confirmation))

    def reveals(self, name: str) -> Any:
        """Return the shares that a client would reveal."""
        confirmations = wire.confirmations_from_wire(self.status(name).confirmations or {})
        return wire.reveals_to_wire(self.secure[name].reveal(confirmations))
