"""A client refuses whatever could disclose an update, and sends nothing then."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedssl.secure_aggregation import (
    OwnerLimits,
    PhaseClosed,
    Refused,
    SecureClient,
)
from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.hybrid_keys import HybridKey
from fedssl.secure_aggregation.mask_keys import MaskKeys
from fedssl.secure_aggregation.messages import Confirmation, KeyAnnouncement, SealedShares, Survivors
from fedssl.secure_aggregation.roster import CheckedRoster, check_roster
from support.lying_coordinator import LyingCoordinator
from support.secure_rounds import SecureRound

FIRST, SECOND, THIRD = "c000", "c001", "c002"


@pytest.fixture
def secure() -> SecureRound:
    return SecureRound(6)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (OwnerLimits(min_cohort=4), "sums 3 updates or more, and the data owner demands 4"),
        (OwnerLimits(collusion=2), "resists 1 colluding clients, and the data owner demands 2"),
        (OwnerLimits(pins={}), "identity key of c001 is not the pinned one"),
    ],
)
def test_a_round_below_the_owners_limits_is_refused(secure: SecureRound, limits: OwnerLimits, why: str) -> None:
    with pytest.raises(Refused, match=why):
        SecureClient(secure.context, FIRST, secure.identities[FIRST], limits)


def test_a_cohort_with_a_client_that_no_pin_has_is_refused(secure: SecureRound) -> None:
    pins = {member.client: member.identity for member in secure.context.cohort}
    SecureClient(secure.context, FIRST, secure.identities[FIRST], OwnerLimits(pins=pins))
    with pytest.raises(Refused, match="identity key of c002"):
        SecureClient(secure.context, FIRST, secure.identities[FIRST], OwnerLimits(pins=pins | {THIRD: "ab" * 32}))


def test_a_cohort_without_this_client_or_with_another_key_of_it_is_refused(secure: SecureRound) -> None:
    with pytest.raises(Refused, match="c900 is not in the cohort"):
        SecureClient(secure.context, "c900", secure.identities[FIRST], OwnerLimits())
    with pytest.raises(Refused, match="another identity key of c000"):
        SecureClient(secure.context, FIRST, Ed25519PrivateKey.generate(), OwnerLimits())


def test_keys_are_new_in_each_round(secure: SecureRound) -> None:
    first, second = secure.client(FIRST).announcement, secure.client(FIRST).announcement
    assert {first.encryption_key, first.mask_key}.isdisjoint({second.encryption_key, second.mask_key})
    assert first.commitment != second.commitment


def _low_order(keys: KeyAnnouncement, secure: SecureRound) -> KeyAnnouncement:
    bad = replace(keys, mask_key=bytes(32) + keys.mask_key[32:])
    return replace(bad, signature=secure.identities[keys.client].sign(bad.signed_bytes(secure.context.digest)))


def _of_an_older_round(keys: KeyAnnouncement, secure: SecureRound) -> KeyAnnouncement:
    return secure.client(keys.client, replace(secure.context, round=2)).announcement


def _invented(keys: KeyAnnouncement, secure: SecureRound) -> KeyAnnouncement:
    bad = replace(keys, mask_key=HybridKey(secure.context.digest, bytes([5]) * 32).public)
    return replace(bad, signature=Ed25519PrivateKey.generate().sign(bad.signed_bytes(secure.context.digest)))


@pytest.mark.parametrize(
    ("altered", "why"),
    [
        (_low_order, "c001: the X25519 public key has low order"),
        (_of_an_older_round, "c001 did not sign these keys for this round"),
        (_invented, "c001 did not sign these keys"),
        (lambda keys, _: replace(keys, mask_key=b"short"), "the keys of c001 have the wrong size"),
        (lambda keys, _: replace(keys, client="c900"), "c900 is not in the cohort"),
    ],
)
def test_a_roster_with_a_wrong_key_is_refused(
    secure: SecureRound, altered: Callable[[KeyAnnouncement, SecureRound], KeyAnnouncement], why: str
) -> None:
    roster = secure.announce()
    with pytest.raises(Refused, match=why):
        secure.clients[FIRST].share((roster[0], altered(roster[1], secure), *roster[2:]))


def test_a_roster_with_swapped_repeated_or_missing_clients_is_refused(secure: SecureRound) -> None:
    roster, client = secure.announce(), secure.clients[FIRST]
    swapped = (replace(roster[1], client=SECOND, mask_key=roster[2].mask_key), *roster[2:])
    for wrong, why in (
        ((roster[0], *swapped), "c001 did not sign"),
        ((roster[0], *roster), "each client once"),
        ((roster[1], roster[0], *roster[2:]), "must be in name order"),
        (roster[1:], "does not have the keys that this client announced"),
        ((secure.client(FIRST).announcement, *roster[1:]), "does not have the keys that this client announced"),
        (roster[:3], "the roster is too small"),
    ):
        with pytest.raises(Refused, match=why):
            client.share(wrong)


def test_two_clients_with_one_key_are_refused(secure: SecureRound) -> None:
    roster = secure.announce()
    copied = replace(roster[1], mask_key=roster[2].mask_key)
    copied = replace(copied, signature=secure.identities[SECOND].sign(copied.signed_bytes(secure.context.digest)))
    with pytest.raises(Refused, match="the same key"):
        secure.clients[FIRST].share((roster[0], copied, *roster[2:]))


def test_shares_asked_for_twice_are_the_same_and_for_another_roster_refused(secure: SecureRound) -> None:
    roster = secure.announce()
    client = secure.clients[FIRST]
    assert client.share(roster) is client.share(roster)
    with pytest.raises(Refused, match="already made for another roster"):
        client.share(roster[:-1])


def test_a_second_vector_or_inbox_is_refused(secure: SecureRound) -> None:
    secure.announce()
    secure.share()
    client, inbox, words = secure.clients[FIRST], secure.inboxes[FIRST], secure.words[FIRST]
    assert client.mask(inbox, words) is client.mask(inbox, words)
    changed = words.copy()
    changed[0] += np.uint64(1)
    with pytest.raises(Refused, match="already masked"):
        client.mask(inbox, changed)
    with pytest.raises(Refused, match="already masked"):
        client.mask(replace(inbox, deliveries=inbox.deliveries[1:]), words)


def test_inboxes_that_cannot_be_are_refused(secure: SecureRound) -> None:
    secure.announce()
    secure.share()
    client, inbox, words = secure.clients[FIRST], secure.inboxes[FIRST], secure.words[FIRST]
    sharers, deliveries = inbox.sharers, inbox.deliveries
    for wrong, why in (
        (replace(inbox, deliveries=(*deliveries, deliveries[0])), "one delivery of each neighbour"),
        (replace(inbox, deliveries=deliveries[1:]), "one delivery of each neighbour"),
        (replace(inbox, deliveries=(replace(deliveries[0], sender=FIRST), *deliveries[1:])), "one delivery of each"),
        (replace(inbox, sharers=sharers[1:]), "lacks this client"),
        (replace(inbox, sharers=sharers[::-1]), "in name order"),
        (replace(inbox, sharers=(*sharers, "c900")), "c900 is in the list"),
        (replace(inbox, sharers=sharers[:2]), "2 clients are fewer than the 3"),
        (replace(inbox, sharers=sharers[:3]), "fewer than 4 of the clients hold shares of c000"),
    ):
        with pytest.raises(Refused, match=why):
            client.mask(wrong, words)
    with pytest.raises(ValueError, match="not the context's 4 words"):
        client.mask(inbox, np.zeros(1, np.uint64))
    assert client.mask(inbox, words).words.shape == (5,)


def test_phases_out_of_order_are_refused(secure: SecureRound) -> None:
    client = secure.client(FIRST)
    secure.announce()
    secure.share()
    with pytest.raises(PhaseClosed, match="not made shares"):
        client.mask(secure.inboxes[FIRST], secure.words[FIRST])
    for name in (FIRST, SECOND):
        with pytest.raises(PhaseClosed, match="has not sent a masked vector"):
            secure.clients[name].confirm(Survivors(tuple(secure.names), {}))
        with pytest.raises(PhaseClosed, match="has not sent a masked vector"):
            secure.clients[name].reveal(())
    secure.mask()
    with pytest.raises(PhaseClosed, match="not confirmed a list"):
        secure.clients[FIRST].reveal(())


def test_survivors_that_cannot_be_are_refused(secure: SecureRound) -> None:
    survivors = secure.until_survivors()
    client, names = secure.clients[FIRST], survivors.clients
    forged = survivors.signatures | {SECOND: survivors.signatures[THIRD]}
    for wrong, why in (
        (replace(survivors, clients=names[1:]), "lacks this client"),
        (replace(survivors, clients=names[:2]), "2 clients are fewer than the 3"),
        (replace(survivors, clients=(*names, names[-1])), "each client once"),
        (replace(survivors, clients=(*names, "c900")), "c900 is in the list"),
        (replace(survivors, clients=names[::-1]), "in name order"),
        (replace(survivors, clients=names[:3]), "fewer than 4 of the clients hold shares of c000"),
        (replace(survivors, signatures=forged), "c001 did not sign the same list"),
        (replace(survivors, signatures={}), "c000 did not sign the same list"),
    ):
        with pytest.raises(Refused, match=why):
            client.confirm(wrong)
    assert client.confirm(survivors).client == FIRST


def test_a_second_list_of_survivors_is_refused(secure: SecureRound) -> None:
    survivors = secure.until_survivors()
    client = secure.clients[FIRST]
    assert client.confirm(survivors) is client.confirm(survivors)
    without = tuple(name for name in survivors.clients if name != SECOND)
    with pytest.raises(Refused, match="another list of survivors was already confirmed"):
        client.confirm(replace(survivors, clients=without))
    answer = client.reveal(secure.confirm(survivors))
    assert SECOND in answer.self_shares
    assert not answer.mask_shares
    assert client.reveal(()) is answer


def test_no_share_leaves_before_enough_survivors_confirmed_the_same_list(secure: SecureRound) -> None:
    survivors = secure.until_survivors()
    confirmations = secure.confirm(survivors)
    client, needed = secure.clients[FIRST], secure.context.quorum
    forged = Confirmation("c005", confirmations[1].signature)
    for wrong, why in (
        (confirmations[: needed - 1], "3 clients confirmed this list of survivors, and 4 must"),
        (confirmations[:1] * needed, "1 client confirmed"),
        ((*confirmations[:5], forged), "c005 is not a survivor that confirmed"),
        ((*confirmations, Confirmation("c900", b"")), "c900 is not a survivor that confirmed"),
    ):
        with pytest.raises(Refused, match=why):
            client.reveal(wrong)
    assert client.reveal(confirmations[:needed]).client == FIRST


def test_confirmations_of_another_list_or_round_do_not_count(secure: SecureRound) -> None:
    # Half of the clients get a list without c005.
    survivors = secure.until_survivors()
    without = replace(survivors, clients=survivors.clients[:-1])
    shown = {name: without if name < "c003" else survivors for name in secure.names}
    confirmations = [secure.clients[name].confirm(listed) for name, listed in shown.items()]
    for name in secure.names:
        with pytest.raises(Refused, match="a confirmation is wrong"):
            secure.clients[name].reveal(confirmations)
        own = [it for it in confirmations if shown[it.client] is shown[name]]
        with pytest.raises(Refused, match="3 clients confirmed this list of survivors, and 4 must"):
            secure.clients[name].reveal(own)
    other = SecureRound(6)
    replayed = other.until_confirmations()
    with pytest.raises(Refused, match="a confirmation is wrong"):
        secure.clients[FIRST].reveal(replayed)


def test_different_models_for_different_clients_give_no_sum(secure: SecureRound) -> None:
    # c000 trains from another broadcast: its context, and so its signature and all its keys, are of another round.
    context = replace(secure.context, broadcast=hashlib.sha256(b"another model").hexdigest())
    roster = secure.announce()
    victim = secure.client(FIRST, context)
    with pytest.raises(Refused, match="did not sign these keys for this round"):
        victim.share((victim.announcement, *roster[1:]))
    with pytest.raises(Refused, match="did not sign these keys for this round"):
        secure.clients[SECOND].share((victim.announcement, *roster[1:]))


def test_different_rosters_for_different_clients_give_no_sum(secure: SecureRound) -> None:
    liar = LyingCoordinator(secure)
    liar.share(FIRST, liar.roster(secure.names[:-1]))
    for name in secure.names[1:]:
        liar.share(name, liar.roster(secure.names))
    # What the first client sealed for the others is bound to its roster. It is the first of each pair itself.
    assert liar.mask(FIRST, secure.names[:-1])
    for name in secure.names[1:]:
        assert liar.mask(name, secure.names) is None
        assert liar.refused[name] == f"c000 sealed a pair secret for {name} that {name} cannot open"
    assert liar.confirm(FIRST, secure.names[:-1]) is None
    assert "c001 did not sign the same list of clients that sent shares" in liar.refused[FIRST]
    assert not liar.disclosed()


def _with_keys(secure: SecureRound, name: str) -> tuple[CheckedRoster, MaskKeys]:
    """Return the checked roster, and a client's keys from its mask secret."""
    return check_roster(secure.context, secure.roster), MaskKeys(
        secure.context.digest, name, secure.clients[name]._secrets.mask
    )


def test_a_client_with_the_same_seed_and_its_stored_shares_continues_with_the_same_messages(
    secure: SecureRound,
) -> None:
    # Encapsulation draws random numbers: without the stored shares, others would be sent.
    survivors = secure.until_survivors()
    old, sent = secure.clients[SECOND], secure.server.collected.shares[SECOND]
    new = SecureClient(secure.context, SECOND, secure.identities[SECOND], OwnerLimits(), old._seed)
    assert new.announcement == old.announcement
    assert new.share(secure.roster, sent) == sent
    inbox, words = secure.inboxes[SECOND], secure.words[SECOND]
    assert new.mask(inbox, words).digest() == old.mask(inbox, words).digest()
    confirmations = secure.confirm(survivors)
    assert new.confirm(survivors) == old.confirm(survivors)
    assert new.reveal(confirmations) == old.reveal(confirmations)
    again = SecureClient(secure.context, SECOND, secure.identities[SECOND], OwnerLimits(), old._seed)
    other = again.share(secure.roster)
    assert other.commitments == sent.commitments
    assert set(other.boxes.values()).isdisjoint(sent.boxes.values())
    assert set(other.pairs.values()).isdisjoint(sent.pairs.values())


def test_both_clients_of_a_pair_derive_its_key_and_only_from_what_the_first_one_sealed(secure: SecureRound) -> None:
    secure.until_survivors()
    sent = secure.server.collected.shares[FIRST].pairs
    (roster, first), (_, second), (_, third) = (_with_keys(secure, name) for name in (FIRST, SECOND, THIRD))
    key = first.pair_key(roster, SECOND, sent[SECOND])
    assert second.pair_key(roster, FIRST, sent[SECOND]) == key
    assert third.pair_key(roster, FIRST, sent[THIRD]) != key
    ciphertext, rest = sent[SECOND][:1088], sent[SECOND][1088:]
    for wrong in (
        sent[THIRD],  # sealed for another client
        bytes([ciphertext[0] ^ 1]) + ciphertext[1:] + rest,  # implicit rejection: decapsulation gives another secret
        sent[THIRD][:1088] + rest,
        bytes(1180),
        b"",
    ):
        with pytest.raises(InvalidMessage, match="c000 sealed a pair secret for c001 that c001 cannot open"):
            second.pair_key(roster, FIRST, wrong)
    committed = sent[SECOND][:-32] + sent[THIRD][-32:]
    for keys, other in ((first, SECOND), (second, FIRST)):
        with pytest.raises(InvalidMessage, match="c000 sealed another pair secret for c001 than it committed to"):
            keys.pair_key(roster, other, committed)


def test_the_mask_secret_of_a_lost_client_opens_no_shares_and_no_pair_of_others(secure: SecureRound) -> None:
    # The coordinator knows the mask secret of c001, and every message.
    secure.lost_in[SECOND] = 2
    secure.until_survivors()
    roster, keys = _with_keys(secure, SECOND)
    sent = secure.server.collected.shares
    known = HybridKey(secure.context.digest, secure.clients[SECOND]._secrets.mask)
    for name in (FIRST, THIRD):
        for public in (roster.keys[name].encryption_key, roster.keys[name].mask_key):
            with pytest.raises(InvalidMessage):
                known.open(public, sent[name].boxes[SECOND], roster.sealing_label("shares", name, SECOND))
    with pytest.raises(InvalidMessage, match="c000 sealed a pair secret for c001 that c001 cannot open"):
        keys.pair_key(roster, FIRST, sent[FIRST].pairs[THIRD])
    assert keys.public != roster.keys[THIRD].mask_key
    assert keys.pair_key(roster, FIRST, sent[FIRST].pairs[SECOND])


def _spoilt(shares: SealedShares, sender: str, recipient: str) -> SealedShares:
    if shares.client != sender:
        return shares
    box = shares.boxes[recipient]
    return replace(shares, boxes={**shares.boxes, recipient: box[:-1] + bytes([box[-1] ^ 1])})


def test_shares_that_cannot_be_opened_are_reported_and_the_sum_is_right(secure: SecureRound) -> None:
    secure.announce()
    secure.share(lambda shares: _spoilt(shares, SECOND, FIRST))
    survivors = secure.mask()
    confirmations = secure.confirm(survivors)
    assert secure.clients[FIRST].reveal(confirmations).unusable == (SECOND,)
    assert np.array_equal(secure.reveal(confirmations).words, secure.expected(survivors.clients))
