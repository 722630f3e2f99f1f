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
    Words,
)
from fedssl.secure_aggregation.messages import Delivery, KeyAnnouncement, SealedShares
from fedssl.secure_aggregation.primitives import public_key
from support.secure_rounds import SecureRound, is_equal

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
    bad = replace(keys, mask_key=bytes(32))
    return replace(bad, signature=secure.identities[keys.client].sign(bad.signed_bytes(secure.context.digest)))


def _of_an_older_round(keys: KeyAnnouncement, secure: SecureRound) -> KeyAnnouncement:
    return secure.client(keys.client, replace(secure.context, round=2)).announcement


def _invented(keys: KeyAnnouncement, secure: SecureRound) -> KeyAnnouncement:
    bad = replace(keys, mask_key=public_key(bytes([5]) * 32))
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
    changed.words32[0] += np.uint32(1)
    with pytest.raises(Refused, match="already masked"):
        client.mask(inbox, changed)
    with pytest.raises(Refused, match="already masked"):
        client.mask(inbox[1:], words)


def test_inboxes_that_cannot_be_are_refused(secure: SecureRound) -> None:
    secure.announce()
    secure.share()
    client, inbox, words = secure.clients[FIRST], secure.inboxes[FIRST], secure.words[FIRST]
    with pytest.raises(Refused, match="at most one delivery of each neighbour"):
        client.mask((*inbox, inbox[0]), words)
    with pytest.raises(Refused, match="at most one delivery of each neighbour"):
        client.mask((replace(inbox[0], sender=FIRST),), words)
    with pytest.raises(Refused, match="only 2 neighbours sent shares"):
        client.mask(inbox[:2], words)
    with pytest.raises(ValueError, match="not as many as the context"):
        client.mask(inbox, Words.zeros(1, 1))


def test_phases_out_of_order_are_refused(secure: SecureRound) -> None:
    client = secure.client(FIRST)
    with pytest.raises(PhaseClosed, match="not made shares"):
        client.mask((), secure.words[FIRST])
    secure.announce()
    secure.share()
    with pytest.raises(PhaseClosed, match="nothing to reveal"):
        secure.clients[FIRST].reveal(tuple(secure.names))


def test_survivors_that_cannot_be_are_refused(secure: SecureRound) -> None:
    names = secure.until_survivors()
    client = secure.clients[FIRST]
    for wrong, why in (
        (names[1:], "lacks this client"),
        (names[:2], "fewer than the 3"),
        ((*names, names[-1]), "once each"),
        ((*names, "c900"), "clients of the roster"),
        (names[::-1], "in name order"),
        (names[:3], "fewer neighbours survived than the threshold"),
    ):
        with pytest.raises(Refused, match=why):
            client.reveal(wrong)


def test_a_second_list_of_survivors_is_refused(secure: SecureRound) -> None:
    names = secure.until_survivors()
    client = secure.clients[FIRST]
    answer = client.reveal(names)
    assert client.reveal(names) is answer
    assert SECOND in answer.self_shares
    with pytest.raises(Refused, match="another list"):
        client.reveal((names[0], *names[2:]))


def test_a_survivor_that_sent_no_shares_is_refused(secure: SecureRound) -> None:
    secure.announce()
    secure.lost_in[SECOND] = 1
    secure.share()
    secure.mask()
    with pytest.raises(Refused, match="c001 is listed as a survivor, but did not send shares"):
        secure.clients[FIRST].reveal(tuple(secure.names))


def test_different_models_for_different_clients_give_no_sum(secure: SecureRound) -> None:
    # c000 trains from another broadcast: its context, and so its signature and all its keys, are of another round.
    context = replace(secure.context, broadcast=hashlib.sha256(b"another model").hexdigest())
    roster = secure.announce()
    victim = secure.client(FIRST, context)
    with pytest.raises(Refused, match="did not sign these keys for this round"):
        victim.share((victim.announcement, *roster[1:]))
    with pytest.raises(Refused, match="did not sign these keys for this round"):
        secure.clients[SECOND].share((victim.announcement, *roster[1:]))


def test_different_rosters_for_different_clients_open_no_shares(secure: SecureRound) -> None:
    roster = secure.announce()
    client = secure.clients[FIRST]
    client.share(roster[:-1])
    others = ("c002", "c003", "c004")
    sent = {name: secure.clients[name].share(roster) for name in others}
    client.mask(
        [Delivery(name, shares.boxes[FIRST], shares.commitments[FIRST]) for name, shares in sent.items()],
        secure.words[FIRST],
    )
    answer = client.reveal((FIRST, *others))
    assert answer.unusable == others
    assert set(answer.self_shares) == {FIRST}


def _spoilt(shares: SealedShares, sender: str, recipient: str) -> SealedShares:
    if shares.client != sender:
        return shares
    box = shares.boxes[recipient]
    return replace(shares, boxes={**shares.boxes, recipient: box[:-1] + bytes([box[-1] ^ 1])})


def test_shares_that_cannot_be_opened_are_reported_and_the_sum_is_right(secure: SecureRound) -> None:
    secure.announce()
    secure.share(lambda shares: _spoilt(shares, SECOND, FIRST))
    survivors = secure.mask()
    assert secure.clients[FIRST].reveal(survivors).unusable == (SECOND,)
    result = secure.reveal(survivors)
    assert is_equal(result.words, secure.expected(survivors))
