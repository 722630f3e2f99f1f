"""The context that a round's keys are bound to. Each worker computes it itself."""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pydantic import TypeAdapter, ValidationError

from fedssl.protocol.base import ClientId
from fedssl.protocol.ledger import canonical
from fedssl.protocol.secure_work import SECURE_PROTOCOL
from fedssl.secure_aggregation.primitives import label
from fedssl.secure_aggregation.thresholds import SMALLEST_COHORT, Thresholds, require_private, share_threshold

MAX_COHORT = 10_000

_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")
_NAMES = TypeAdapter(tuple[ClientId, ...])


@dataclass(frozen=True, slots=True)
class Member:
    """A client of the cohort. `identity`: its long-lived Ed25519 public key, in hexadecimal."""

    client: str
    identity: str


@dataclass(frozen=True)
class RoundContext:
    """Everything that the clients of a secure round agree on before they make keys.

    Two clients whose contexts differ in anything derive different masks and cannot open each other's shares: a
    coordinator that sends them different models receives numbers that do not add up to anything (Pasquini et al. 2022,
    "Eluding secure aggregation in federated learning via model inconsistency").

    run, round: which round this is. A round has one attempt, so these never repeat.
    broadcast, plan: SHA-256 of the round's broadcast and of its artifact plan, in hexadecimal.
    num_words: of 64 bits, in the vector that each client masks, without the word that counts clients.
    cohort: the clients, in name order.
    total_bits: from which the scales of 32-bit words follow (`fedssl.aggregation.fixed_point.TotalBits`), or None.
    """

    run: str
    round: int
    broadcast: str
    plan: str
    num_words: int
    thresholds: Thresholds
    cohort: tuple[Member, ...]
    total_bits: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        names = [member.client for member in self.cohort]
        if not SMALLEST_COHORT <= len(names) <= MAX_COHORT:
            raise ValueError(f"a secure round needs {SMALLEST_COHORT} to {MAX_COHORT} clients, not {len(names)}")
        try:
            _NAMES.validate_python(tuple(names))  # without "|", which separates names in what is hashed and signed
        except ValidationError as error:
            raise ValueError(f"{names[int(error.errors()[0]['loc'][0])]!r} is not the name of a client") from None
        if any(first >= second for first, second in pairwise(names)):
            raise ValueError("the cohort must be in name order, with each client once")
        if len({member.identity for member in self.cohort}) != len(names):
            raise ValueError("two clients of the cohort have the same identity key")
        digests = [self.broadcast, self.plan, *(member.identity for member in self.cohort)]
        if wrong := next((text for text in digests if not _HEXADECIMAL.fullmatch(text)), None):
            raise ValueError(f"{wrong!r} is not 32 bytes in lower-case hexadecimal")
        require_private(self.thresholds, len(names))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the whole context: the salt of every derived key and part of all that is signed and sealed."""
        limits = self.thresholds
        body = {
            "broadcast": self.broadcast,
            "cohort": [{"client": member.client, "identity": member.identity} for member in self.cohort],
            "collusion": limits.collusion,
            "degree": limits.degree,
            "min_survivors": limits.min_survivors,
            "plan": self.plan,
            "protocol": SECURE_PROTOCOL,
            "round": self.round,
            "run": self.run,
            "threshold": limits.threshold,
            "words32": 0,  # there are none, and the digest of a round does not change
            "words64": self.num_words,
        }
        if self.total_bits is not None:
            body["total_bits"] = list(self.total_bits)
        return hashlib.sha256(label("context") + b"\n" + canonical(body)).digest()

    @property
    def quorum(self) -> int:
        """How many survivors must confirm one list before anyone reveals shares: no two lists can both have so many."""
        return share_threshold(len(self.cohort), self.thresholds.collusion)

    def identity_of(self, client: str) -> bytes | None:
        """Return a client's identity key, or None if it is not in the cohort."""
        return self._identities.get(client)

    @cached_property
    def _identities(self) -> dict[str, bytes]:
        return {member.client: bytes.fromhex(member.identity) for member in self.cohort}
