"""The messages between a worker and the coordinator in a secure round. Bytes are in hexadecimal.

Each phase has one message per client. `fedssl.secure_aggregation` has the protocol, and its `wire` converts messages.
"""

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Field, StringConstraints, model_validator

from fedssl.protocol.base import ClientId, Digest, StrictModel
from fedssl.protocol.plan import TensorSpec

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Hex33 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{66}$")]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
HybridKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2432}$")]
"""An X25519 and an ML-KEM-768 public key: 32 and 1,184 bytes."""

Box = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2364}$")]
"""Two shares of 33 bytes, sealed: a ciphertext of ML-KEM-768, 1,088 bytes, and 94."""

PairSecret = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2360}$")]
"""A pair secret of 32 bytes, sealed like shares: 1,148 bytes. And the commitment to it: 32 bytes."""

SECURE_PROTOCOL = 2
"""The version of secure aggregation. Workers and coordinators of different versions have no secure rounds together."""


def version_refusal(worker: int, coordinator: int) -> str | None:
    """Return why a worker and a coordinator cannot have a secure round, and which to upgrade, or None if they can.

    >>> version_refusal(1, 2)
    'the worker speaks version 1 of secure aggregation, and the coordinator version 2: upgrade the worker'
    """
    if worker == coordinator:
        return None
    older = "worker" if worker < coordinator else "coordinator"
    return (
        f"the worker speaks version {worker} of secure aggregation, and the coordinator version {coordinator}: "
        f"upgrade the {older}"
    )


MOST_NEIGHBOURS = 10_000

SECURE_BYTES = 2 << 20
"""The largest message of a client: up to 5 kB per neighbour, 0.7 MB with 128 clients and 0.9 MB with 10,000. With more
than 200 neighbours, as for a `collusion` of a fifth of 1,000 clients, FEDSSL_MAX_BODY_BYTES must be raised."""

SECURE_ANSWER_BYTES = 64 << 20
"""The largest answer about a phase. That with all keys has 5.2 kB per client."""

VECTOR_NAME = "masked"
"""The name of the masked tensor in the file of a masked vector: int64, one word that counts clients and then the words
of the update."""


def vector_tensors(num_words: int, apart: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return the tensors in the file of a masked vector: this number of words with the word that counts clients, and
    what leaves next to it without masks (`RunSpec.sent_apart`)."""
    return (TensorSpec(name=VECTOR_NAME, dtype="I64", shape=(1 + num_words,)), *apart)


OUT_OF_RANGE = "out of range: "
"""The beginning of a client's reason to decline a secure round because a value does not fit into its word. A round that
has words of 32 bits is then skipped; the client is left out of one in which all words have 64 bits."""

SecurePhase = Literal["keys", "shares", "vectors", "confirmations", "reveals", "done", "failed"]


class SecureMember(StrictModel):
    """A client of a secure round's cohort, and its Ed25519 identity key."""

    client: ClientId
    identity: Hex32


class SecureKeys(StrictModel):
    """The public keys of one client in one round, signed by its identity key."""

    phase: Literal["keys"] = "keys"
    encryption_key: HybridKey
    mask_key: HybridKey
    commitment: Hex32
    signature: Hex64


class SecureShareCommitments(StrictModel):
    """Hashes of the two shares that one client has made for another."""

    mask: Hex32
    own: Hex32


class SecureShares(StrictModel):
    """A client's shares for its neighbours, sealed, and the hashes of all its shares. `pairs`: the pair secrets for the
    neighbours that are later in name order."""

    phase: Literal["shares"] = "shares"
    boxes: Annotated[dict[ClientId, Box], Field(max_length=MOST_NEIGHBOURS)]
    pairs: Annotated[dict[ClientId, PairSecret], Field(max_length=MOST_NEIGHBOURS)]
    commitments: Annotated[dict[ClientId, SecureShareCommitments], Field(max_length=MOST_NEIGHBOURS)]


class SecureVector(StrictModel):
    """The masked vector of a client, which it has uploaded, and its signature of the clients that sent shares."""

    phase: Literal["vectors"] = "vectors"
    update: Digest
    signature: Hex64


class SecureConfirmation(StrictModel):
    """A survivor's signature of the list of survivors."""

    phase: Literal["confirmations"] = "confirmations"
    signature: Hex64


class SecureReveals(StrictModel):
    """The shares that remove masks: those of each survivor's own mask, and of each lost client's mask key."""

    phase: Literal["reveals"] = "reveals"
    self_shares: Annotated[dict[ClientId, Hex33], Field(max_length=MOST_NEIGHBOURS)]
    mask_shares: Annotated[dict[ClientId, Hex33], Field(max_length=MOST_NEIGHBOURS)]
    unusable: Annotated[tuple[ClientId, ...], Field(max_length=MOST_NEIGHBOURS)] = ()


SecureMessage = SecureKeys | SecureShares | SecureVector | SecureConfirmation | SecureReveals


class SecureSubmission(StrictModel):
    """One message of a client about its assignment in a secure round. The same message again gets the same answer."""

    assignment_id: UUID
    protocol: int = Field(description="The version of secure aggregation that the worker speaks. Version 1 had no key.")
    message: Annotated[SecureMessage, Field(discriminator="phase")]

    @model_validator(mode="before")
    @classmethod
    def _has_this_version(cls, body: Any) -> Any:
        # Checked first, because messages of other versions have other keys.
        worker = body.get("protocol", 1) if isinstance(body, dict) else None
        if isinstance(worker, int) and (why := version_refusal(worker, SECURE_PROTOCOL)) is not None:
            raise ValueError(why)
        return body


class SecureQuery(StrictModel):
    """Asks for the phase of the secure round of an assignment."""

    assignment_id: UUID


class SecureDelivery(StrictModel):
    """The shares of a neighbour for the client that asks. `pair`: null if the neighbour is later in name order."""

    sender: ClientId
    box: Box
    pair: PairSecret | None = None
    commitments: SecureShareCommitments


class SecureInbox(StrictModel):
    """All clients that sent shares, and the shares of the asking client's neighbours among them."""

    sharers: Annotated[tuple[ClientId, ...], Field(max_length=MOST_NEIGHBOURS)]
    deliveries: Annotated[tuple[SecureDelivery, ...], Field(max_length=MOST_NEIGHBOURS)]


class SecureStatus(StrictModel):
    """The phase of a secure round, and what the asking client needs in it.

    `is_member`: whether the asking client still takes part. `received`: whether its message of this phase has arrived.
    """

    phase: SecurePhase
    is_member: bool
    received: bool
    roster: Annotated[dict[ClientId, SecureKeys] | None, Field(max_length=MOST_NEIGHBOURS)] = Field(
        default=None, description="In the phase `shares`: the keys of all clients that take part."
    )
    inbox: SecureInbox | None = Field(default=None, description="In the phase `vectors`.")
    survivors: Annotated[dict[ClientId, Hex64] | None, Field(max_length=MOST_NEIGHBOURS)] = Field(
        default=None,
        description="In the phase `confirmations`: the clients whose vectors are in the sum, with their signatures of "
        "the clients that sent shares.",
    )
    confirmations: Annotated[dict[ClientId, Hex64] | None, Field(max_length=MOST_NEIGHBOURS)] = Field(
        default=None, description="In the phase `reveals`: the signatures of the list of survivors."
    )
