"""Converts messages of a secure round to the form that is sent and stored (`fedssl.protocol.secure_work`), and back."""

from collections.abc import Mapping

from fedssl.protocol.secure_work import (
    SecureConfirmation,
    SecureDelivery,
    SecureInbox,
    SecureKeys,
    SecureReveals,
    SecureShareCommitments,
    SecureShares,
)
from fedssl.secure_aggregation.messages import (
    Confirmation,
    Delivery,
    Inbox,
    KeyAnnouncement,
    Reveals,
    Roster,
    SealedShares,
    ShareCommitments,
    Survivors,
)


def keys_to_wire(keys: KeyAnnouncement) -> SecureKeys:
    return SecureKeys(
        encryption_key=keys.encryption_key.hex(),
        mask_key=keys.mask_key.hex(),
        commitment=keys.commitment.hex(),
        signature=keys.signature.hex(),
    )


def keys_from_wire(client: str, wire: SecureKeys) -> KeyAnnouncement:
    parts = (wire.encryption_key, wire.mask_key, wire.commitment, wire.signature)
    return KeyAnnouncement(client, *map(bytes.fromhex, parts))


def roster_from_wire(wire: Mapping[str, SecureKeys]) -> Roster:
    """Return the keys in name order."""
    return tuple(keys_from_wire(client, keys) for client, keys in sorted(wire.items()))


def _commitments_to_wire(commitments: ShareCommitments) -> SecureShareCommitments:
    return SecureShareCommitments(mask=commitments.mask.hex(), own=commitments.self.hex())


def _commitments_from_wire(wire: SecureShareCommitments) -> ShareCommitments:
    return ShareCommitments(bytes.fromhex(wire.mask), bytes.fromhex(wire.own))


def shares_to_wire(shares: SealedShares) -> SecureShares:
    return SecureShares(
        boxes=_hexadecimal(shares.boxes),
        pairs=_hexadecimal(shares.pairs),
        commitments={holder: _commitments_to_wire(both) for holder, both in shares.commitments.items()},
    )


def shares_from_wire(client: str, wire: SecureShares) -> SealedShares:
    commitments = {holder: _commitments_from_wire(both) for holder, both in wire.commitments.items()}
    return SealedShares(client, _binary(wire.boxes), _binary(wire.pairs), commitments)


def inbox_to_wire(inbox: Inbox) -> SecureInbox:
    deliveries = (
        SecureDelivery(
            sender=each.sender,
            box=each.box.hex(),
            pair=None if each.pair is None else each.pair.hex(),
            commitments=_commitments_to_wire(each.commitments),
        )
        for each in inbox.deliveries
    )
    return SecureInbox(sharers=inbox.sharers, deliveries=tuple(deliveries))


def inbox_from_wire(wire: SecureInbox) -> Inbox:
    deliveries = (
        Delivery(
            each.sender,
            bytes.fromhex(each.box),
            None if each.pair is None else bytes.fromhex(each.pair),
            _commitments_from_wire(each.commitments),
        )
        for each in wire.deliveries
    )
    return Inbox(wire.sharers, tuple(deliveries))


def survivors_from_wire(wire: Mapping[str, str]) -> Survivors:
    """Return the survivors in name order."""
    return Survivors(tuple(sorted(wire)), _binary(wire))


def confirmation_to_wire(confirmation: Confirmation) -> SecureConfirmation:
    return SecureConfirmation(signature=confirmation.signature.hex())


def confirmation_from_wire(client: str, wire: SecureConfirmation) -> Confirmation:
    return Confirmation(client, bytes.fromhex(wire.signature))


def confirmations_from_wire(wire: Mapping[str, str]) -> tuple[Confirmation, ...]:
    return tuple(Confirmation(client, bytes.fromhex(signature)) for client, signature in sorted(wire.items()))


def reveals_to_wire(reveals: Reveals) -> SecureReveals:
    return SecureReveals(
        self_shares=_hexadecimal(reveals.self_shares),
        mask_shares=_hexadecimal(reveals.mask_shares),
        unusable=reveals.unusable,
    )


def reveals_from_wire(client: str, wire: SecureReveals) -> Reveals:
    return Reveals(client, _binary(wire.self_shares), _binary(wire.mask_shares), wire.unusable)


def _hexadecimal(parts: Mapping[str, bytes]) -> dict[str, str]:
    return {client: part.hex() for client, part in parts.items()}


def _binary(parts: Mapping[str, str]) -> dict[str, bytes]:
    return {client: bytes.fromhex(part) for client, part in parts.items()}
