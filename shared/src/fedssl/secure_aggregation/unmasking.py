"""Removing the masks that do not cancel from the sum of masked vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedssl.secure_aggregation.context import RoundContext
from fedssl.secure_aggregation.errors import InvalidMessage, NoSum
from fedssl.secure_aggregation.mask_keys import MaskKeys
from fedssl.secure_aggregation.masks import Mask, Words, apply_masks
from fedssl.secure_aggregation.messages import SealedShares, secret_commitment
from fedssl.secure_aggregation.roster import CheckedRoster, self_mask_key
from fedssl.secure_aggregation.shamir import combine


@dataclass(frozen=True, slots=True, eq=False)
class UnmaskedSum:
    """The sum of the survivors' words, modulo 2^64, without the word that counts them."""

    words: Words
    survivors: tuple[str, ...]


def removed_masks(
    context: RoundContext,
    roster: CheckedRoster,
    total: Words,
    survivors: Sequence[str],
    sent: Mapping[str, SealedShares],
    shares: Mapping[str, Mapping[int, bytes]],
) -> UnmaskedSum:
    """Return the sum of the survivors' words.

        sum x_u = sum y_u - sum_u m_u - sum_(u survived, v lost, connected) (m_uv if v > u, otherwise -m_uv)

    Args:
        context, roster: of the round.
        total: the sum of the survivors' masked vectors. It is not changed.
        survivors: whose vectors it has.
        sent: what each client sent in phase 2.
        shares: for each survivor, shares of its own mask's secret, by their points; for each lost client whose masks
            are in the sum, shares of its mask secret.

    Raises NoSum, with the client's name, if shares or a pair secret are not what their owner committed to. Raises NoSum
    without a name if the first word is not the number of survivors, because some client used other masks than those of
    this round.

    Reference: Bonawitz et al. 2017, figure 4, round 4; Bell et al. 2020, algorithm 3.
    """
    among, masks = set(survivors), list[Mask]()
    for owner, given in sorted(shares.items()):
        secret = _recovered(context.digest, roster, owner, given, is_lost=owner not in among)
        if owner in among:
            masks.append(Mask(self_mask_key(context.digest, secret, owner), is_negative=True))
            continue
        keys = MaskKeys(context.digest, owner, secret)
        for other in sorted(among.intersection(roster.graph[owner])):
            key = _pair_key(keys, roster, owner, other, sent)
            masks.append(Mask(key, is_negative=owner > other))  # `other` has added it, if it is the first of the two
    result = total.copy()
    apply_masks(result, masks)
    if int(result[0]) != len(survivors):
        raise NoSum("masks_do_not_cancel: some client used other masks than those of this round")
    return UnmaskedSum(result[1:], tuple(survivors))


def _pair_key(keys: MaskKeys, roster: CheckedRoster, lost: str, other: str, sent: Mapping[str, SealedShares]) -> bytes:
    """Return the key of the mask that a lost client and a survivor share."""
    first, second = sorted((lost, other))
    try:
        return keys.pair_key(roster, other, sent[first].pairs[second])
    except InvalidMessage as error:
        raise NoSum(str(error), (first,)) from None


def _recovered(
    context: bytes, roster: CheckedRoster, owner: str, shares: Mapping[int, bytes], *, is_lost: bool
) -> bytes:
    """Return a client's secret. Every share was compared with its commitment, so only its owner can be at fault."""
    keys = roster.keys[owner]
    try:
        secret = combine(shares)
    except InvalidMessage:
        secret = b""
    found = secret and (MaskKeys(context, owner, secret).public if is_lost else secret_commitment(context, secret))
    if not secret or found != (keys.mask_key if is_lost else keys.commitment):
        raise NoSum(f"{owner} sent shares of another secret than it committed to", (owner,))
    return secret
