"""The coordinator's side: what it refuses, from whom, and that a refusal changes nothing."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedssl.secure_aggregation import Conflict, InvalidMessage, NoSum, PhaseClosed, Refused
from fedssl.secure_aggregation.mask_keys import MaskKeys
from fedssl.secure_aggregation.messages import (
    Confirmation,
    MaskedVector,
    SealedShares,
    ShareCommitments,
    share_commitment,
)
from fedssl.secure_aggregation.roster import check_roster
from fedssl.secure_aggregation.shamir import split
from support.secure_rounds import SecureRound, random_coefficients, with_self_share

FIRST, SECOND, LAST = "c000", "c001", "c005"


@pytest.fixture
def secure() -> SecureRound:
    return SecureRound(6)


def test_repeated_messages_are_accepted_and_counted_once(secure: SecureRound) -> None:
    for name in secure.names:
        client = secure.clients[name] = secure.client(name)
        secure.server.add_keys(client.announcement)
        secure.server.add_keys(client.announcement)
    secure.roster = secure.server.freeze_keys()
    secure.share(lambda shares: (secure.server.add_shares(shares), shares)[1])
    for name in secure.names:
        vector = secure.clients[name].mask(secure.inboxes[name], secure.words[name])
        secure.server.add_vector(vector)
        secure.server.add_vector(vector)
    survivors = secure.server.freeze_vectors()
    secure.server.add_vector(secure.clients[FIRST].mask(secure.inboxes[FIRST], secure.words[FIRST]))
    confirmations = secure.confirm(survivors)
    secure.server.add_confirmation(confirmations[0])
    for name in secure.names:
        secure.server.add_reveals(secure.clients[name].reveal(confirmations))
        secure.server.add_reveals(secure.clients[name].reveal(confirmations))
    assert np.array_equal(secure.server.finish().words, secure.expected(survivors.clients))
    assert secure.server.phase == "done"


def test_a_second_message_with_other_content_is_a_conflict(secure: SecureRound) -> None:
    secure.server.add_keys(secure.client(FIRST).announcement)
    with pytest.raises(Conflict):
        secure.server.add_keys(secure.client(FIRST).announcement)
    secure = SecureRound(6)
    survivors = secure.until_survivors()
    other = MaskedVector(FIRST, np.zeros(5, np.uint64), b"")
    with pytest.raises(Conflict):
        secure.server.add_vector(other)
    with pytest.raises(Conflict):  # the same words with another signature
        secure.server.record_vector(FIRST, secure.server.collected.vectors[FIRST], bytes(64))
    confirmations = secure.confirm(survivors)
    with pytest.raises(Conflict):
        secure.server.add_confirmation(Confirmation(FIRST, b""))
    answer = secure.clients[FIRST].reveal(confirmations)
    secure.server.add_reveals(answer)
    with pytest.raises(Conflict):
        secure.server.add_reveals(with_self_share(answer, SECOND, bytes(33)))
    assert np.array_equal(secure.reveal(confirmations).words, secure.expected(survivors.clients))


def test_keys_that_cannot_be_used_are_refused(secure: SecureRound) -> None:
    def signed(name: str, **change: bytes) -> None:
        keys = replace(secure.client(name).announcement, **change)  # type: ignore[arg-type]
        signature = secure.identities[name].sign(keys.signed_bytes(secure.context.digest))
        secure.server.add_keys(replace(keys, signature=signature))

    first = secure.client(FIRST).announcement
    secure.server.add_keys(first)
    for change, why in (
        ({"mask_key": bytes(32) + first.mask_key[32:]}, "c001: the X25519 public key has low order"),
        ({"mask_key": first.mask_key[:32] + b"\xff" * 1184}, "c001: the ML-KEM-768 public key is not one"),
        ({"encryption_key": first.mask_key}, "already in use"),
        ({"encryption_key": secure.client(LAST).announcement.mask_key[:32] + first.mask_key[32:]}, "already in use"),
        ({"encryption_key": b""}, "wrong size"),
    ):
        with pytest.raises(InvalidMessage, match=why):
            signed(SECOND, **change)
    stolen = replace(secure.client(SECOND).announcement, client="c002")
    with pytest.raises(InvalidMessage, match="c002 did not sign these keys"):
        secure.server.add_keys(stolen)
    with pytest.raises(InvalidMessage, match="c900 is not in the cohort"):
        secure.server.add_keys(replace(first, client="c900"))
    old = secure.client(SECOND, replace(secure.context, round=2)).announcement
    with pytest.raises(InvalidMessage, match="did not sign these keys for this round"):
        secure.server.add_keys(old)


def test_phases_out_of_order_and_late_messages_are_refused(secure: SecureRound) -> None:
    with pytest.raises(PhaseClosed, match="phase reveals, and the round is in the phase keys"):
        secure.server.finish()
    late_keys = secure.client(LAST).announcement
    secure.lost_in[LAST] = 0
    secure.announce()
    with pytest.raises(PhaseClosed, match="belongs to the phase keys"):
        secure.server.add_keys(late_keys)
    late_shares = secure.clients[SECOND].share(secure.roster)
    secure.lost_in[SECOND] = 1
    secure.share()
    with pytest.raises(PhaseClosed, match="belongs to the phase shares"):
        secure.server.add_shares(late_shares)
    secure.lost_in[FIRST] = 2
    late_vector = secure.clients[FIRST].mask(secure.inboxes[FIRST], secure.words[FIRST])
    with pytest.raises(NoSum, match="3 clients sent a vector: fewer than 4"):
        secure.mask()
    with pytest.raises(PhaseClosed, match="belongs to the phase vectors"):
        secure.server.add_vector(late_vector)


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (lambda s: replace(s, boxes=dict(list(s.boxes.items())[1:])), "one sealed share to each of its neighbours"),
        (lambda s: replace(s, boxes={**s.boxes, "c900": bytes(1182)}), "one sealed share to each of its neighbours"),
        (lambda s: replace(s, boxes=dict.fromkeys(s.boxes, bytes(1181))), "have the wrong size"),
        (lambda s: replace(s, pairs=dict(list(s.pairs.items())[1:])), "a pair secret to each neighbour after it"),
        (lambda s: replace(s, pairs=dict.fromkeys(s.boxes, bytes(1180))), "a pair secret to each neighbour after it"),
        (lambda s: replace(s, pairs=dict.fromkeys(s.pairs, bytes(1179))), "have the wrong size"),
        (lambda s: replace(s, commitments={}), "one sealed share to each"),
        (
            lambda s: replace(s, commitments=dict.fromkeys(s.commitments, ShareCommitments(b"", b""))),
            "have the wrong size",
        ),
        (lambda s: replace(s, client="c900"), "c900 did not send keys in time"),
    ],
)
def test_wrong_shares_are_refused(secure: SecureRound, alter: Callable[[SealedShares], SealedShares], why: str) -> None:
    secure.announce()
    with pytest.raises(InvalidMessage, match=why):
        secure.share(alter)


def test_a_vector_of_another_size_or_of_a_client_without_shares_is_refused(secure: SecureRound) -> None:
    secure.announce()
    secure.lost_in[LAST] = 1
    secure.share()
    with pytest.raises(InvalidMessage, match="c000 sent"):
        secure.server.add_vector(MaskedVector(FIRST, np.zeros(4, np.uint64), b""))
    with pytest.raises(InvalidMessage, match="c005 did not send shares"):
        secure.server.add_vector(MaskedVector(LAST, np.zeros(5, np.uint64), b""))


def test_a_wrong_share_names_its_sender_and_the_sum_is_right_without_it(secure: SecureRound) -> None:
    survivors = secure.until_survivors()
    confirmations = secure.confirm(survivors)
    answer = secure.clients[FIRST].reveal(confirmations)
    for share in (bytes(33), b"", answer.self_shares[FIRST]):
        with pytest.raises(InvalidMessage, match="c000 sent a wrong share of c001"):
            secure.server.add_reveals(with_self_share(answer, SECOND, share))
    secure.lost_in[FIRST] = 3
    assert np.array_equal(secure.reveal(confirmations).words, secure.expected(survivors.clients))


def test_both_secrets_of_one_client_are_never_accepted(secure: SecureRound) -> None:
    confirmations = secure.until_confirmations()
    answer = secure.clients[FIRST].reveal(confirmations)
    for both in (
        replace(answer, mask_shares={SECOND: secure.clients[FIRST]._held[SECOND].mask}),
        replace(answer, self_shares={}, mask_shares=answer.self_shares),
        replace(answer, self_shares={}),
    ):
        with pytest.raises(InvalidMessage, match="must reveal a share of the own mask of each survivor"):
            secure.server.add_reveals(both)


def test_a_lost_client_cannot_reveal(secure: SecureRound) -> None:
    secure.lost_in[LAST] = 2
    confirmations = secure.until_confirmations()
    answer = replace(secure.clients[FIRST].reveal(confirmations), client=LAST)
    with pytest.raises(InvalidMessage, match="c005 is not among the survivors"):
        secure.server.add_reveals(answer)


def _shares_of_another_secret(secure: SecureRound, shares: SealedShares, sender: str) -> SealedShares:
    """Return well-formed shares, with right commitments, of another secret than the sender's own."""
    if shares.client != sender:
        return shares
    context, client = secure.context.digest, secure.clients[sender]
    roster = check_roster(secure.context, secure.roster)
    holders = roster.holders(sender)
    split_now = split(bytes([9]) * 32, len(holders), random_coefficients(secure.context.thresholds.threshold))
    boxes, commitments = {}, {}
    for holder, share in zip(holders, split_now, strict=True):
        commitments[holder] = ShareCommitments(
            *(share_commitment(context, kind, sender, holder, share) for kind in ("mask", "self"))
        )
        if holder != sender:
            public = roster.keys[holder].encryption_key
            info = roster.sealing_label("shares", sender, holder)
            boxes[holder] = client._secrets.encryption.seal(public, share + share, info)
    return SealedShares(sender, boxes, shares.pairs, commitments)


@pytest.mark.parametrize("lost_in", [2, 4])
def test_shares_of_another_secret_name_their_owner(secure: SecureRound, lost_in: int) -> None:
    # If the liar is lost before its vector, its mask key is missing, otherwise its own mask.
    secure.announce()
    secure.share(lambda shares: _shares_of_another_secret(secure, shares, LAST))
    secure.lost_in[LAST] = lost_in
    confirmations = secure.confirm(secure.mask())
    with pytest.raises(NoSum, match="c005 sent shares of another secret") as refused:
        secure.reveal(confirmations)
    assert refused.value.clients == (LAST,)
    assert secure.server.phase == "failed"


def _with_garbage(shares: SealedShares, sender: str, recipient: str) -> SealedShares:
    if shares.client != sender:
        return shares
    return replace(shares, pairs={**shares.pairs, recipient: bytes(len(shares.pairs[recipient]))})


def test_a_pair_secret_that_cannot_be_opened_ends_the_round_and_names_who_sealed_it(secure: SecureRound) -> None:
    # c001 refuses, and is lost: its mask secret, which the others give back, shows what it has seen.
    secure.announce()
    secure.share(lambda shares: _with_garbage(shares, FIRST, SECOND))
    with pytest.raises(Refused, match="c000 sealed a pair secret for c001 that c001 cannot open"):
        secure.clients[SECOND].mask(secure.inboxes[SECOND], secure.words[SECOND])
    secure.lost_in[SECOND] = 2
    confirmations = secure.confirm(secure.mask())
    with pytest.raises(NoSum, match="c000 sealed a pair secret for c001 that c001 cannot open") as refused:
        secure.reveal(confirmations)
    assert refused.value.clients == (FIRST,)
    assert secure.server.phase == "failed"


def test_garbage_of_a_client_that_is_lost_as_well_changes_nothing(secure: SecureRound) -> None:
    secure.announce()
    secure.share(lambda shares: _with_garbage(shares, FIRST, SECOND))
    secure.lost_in |= {FIRST: 2, SECOND: 2}
    survivors = secure.mask()
    assert np.array_equal(secure.reveal(secure.confirm(survivors)).words, secure.expected(survivors.clients))


def test_a_client_that_only_claims_to_have_received_garbage_leaves_the_sum_right(secure: SecureRound) -> None:
    secure.announce()
    secure.share()
    secure.lost_in[SECOND] = 2  # it declines
    survivors = secure.mask()
    assert np.array_equal(secure.reveal(secure.confirm(survivors)).words, secure.expected(survivors.clients))


def test_a_pair_secret_other_than_that_of_the_shared_mask_secret_names_its_owner(
    secure: SecureRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    # c001 can open what c000 sealed, and it is what c000 committed to. Only the mask secret of c000 shows the lie.
    with monkeypatch.context() as patch:
        patch.setattr(MaskKeys, "_chosen", lambda self, second: bytes(32))
        secure.announce()
        lie = secure.clients[FIRST].share(secure.roster)
    secure.share(lambda shares: lie if shares.client == FIRST else shares)
    secure.lost_in[FIRST] = 2
    confirmations = secure.confirm(secure.mask())
    with pytest.raises(NoSum, match="c000 sealed another pair secret for c001 than it committed to") as refused:
        secure.reveal(confirmations)
    assert refused.value.clients == (FIRST,)


def test_an_ml_kem_key_that_is_not_that_of_the_shared_secret_names_its_owner(secure: SecureRound) -> None:
    other = secure.client(LAST).announcement.mask_key[32:]
    for name in secure.names:
        secure.clients[name] = secure.client(name)
        keys = secure.clients[name].announcement
        if name == LAST:
            keys = replace(keys, mask_key=keys.mask_key[:32] + other)
            signature = secure.identities[LAST].sign(keys.signed_bytes(secure.context.digest))
            keys = secure.clients[LAST].announcement = replace(keys, signature=signature)
        secure.server.add_keys(keys)
    secure.roster = secure.server.freeze_keys()
    secure.share()
    with pytest.raises(Refused, match="c000 sealed a pair secret for c005 that c005 cannot open"):
        secure.clients[LAST].mask(secure.inboxes[LAST], secure.words[LAST])
    secure.lost_in[LAST] = 2
    with pytest.raises(NoSum, match="c005 sent shares of another secret than it committed to") as refused:
        secure.reveal(secure.confirm(secure.mask()))
    assert refused.value.clients == (LAST,)


def test_words_of_another_mask_give_no_sum(secure: SecureRound) -> None:
    secure.announce()
    secure.share()
    for name in secure.names[1:]:
        secure.server.add_vector(secure.clients[name].mask(secure.inboxes[name], secure.words[name]))
    signed = secure.clients[FIRST].mask(secure.inboxes[FIRST], secure.words[FIRST])
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 2**64, 5, np.uint64)
    secure.server.add_vector(MaskedVector(FIRST, noise, signed.signature))
    with pytest.raises(NoSum, match="masks_do_not_cancel"):
        secure.reveal(secure.confirm(secure.server.freeze_vectors()))


def test_too_few_reveals_give_no_sum_until_more_arrive(secure: SecureRound) -> None:
    survivors = secure.until_survivors()
    confirmations = secure.confirm(survivors)
    for name in secure.names[:3]:
        secure.server.add_reveals(secure.clients[name].reveal(confirmations))
    with pytest.raises(NoSum, match="3 of 6 survivors revealed shares, and fewer than 4"):
        secure.server.finish()
    secure.server.add_reveals(secure.clients["c003"].reveal(confirmations))
    assert np.array_equal(secure.server.finish().words, secure.expected(survivors.clients))


def test_a_vector_of_a_client_that_was_shown_other_sharers_is_refused(secure: SecureRound) -> None:
    secure.announce()
    secure.share()
    inbox = secure.inboxes[FIRST]
    fewer = replace(inbox, sharers=inbox.sharers[:-1], deliveries=inbox.deliveries[:-1])
    with pytest.raises(InvalidMessage, match="c000 did not sign the same list of clients that sent shares"):
        secure.server.add_vector(secure.clients[FIRST].mask(fewer, secure.words[FIRST]))


def test_a_confirmation_of_another_list_or_client_is_refused(secure: SecureRound) -> None:
    secure.lost_in[LAST] = 2
    survivors = secure.until_survivors()
    right = secure.clients[FIRST].confirm(survivors)
    for wrong in (replace(right, client=SECOND), replace(right, client=LAST), replace(right, signature=b"")):
        with pytest.raises(InvalidMessage, match="is not a survivor that confirmed this list"):
            secure.server.add_confirmation(wrong)
    without = replace(survivors, clients=survivors.clients[:-1])
    with pytest.raises(InvalidMessage, match="c001 is not a survivor that confirmed this list"):
        secure.server.add_confirmation(secure.clients[SECOND].confirm(without))


def test_too_few_confirmations_end_the_round(secure: SecureRound) -> None:
    outcome = secure.outcome(dict.fromkeys(secure.names[3:], 3))
    assert isinstance(outcome, NoSum)
    assert str(outcome) == "3 of 6 survivors confirmed their list, and 4 must"
    assert secure.server.phase == "failed"


@pytest.mark.parametrize("phase", [0, 1, 2])
def test_fewer_clients_than_a_sum_needs_end_the_round(secure: SecureRound, phase: int) -> None:
    outcome = secure.outcome(dict.fromkeys(secure.names[2:], phase))
    assert isinstance(outcome, NoSum)
    assert secure.server.phase == "failed"
    assert str(outcome).startswith(("2 of 6 clients sent keys", "2 clients sent"))
