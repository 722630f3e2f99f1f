"""Secure rounds of any size, with clients lost in any phase, give the exact sum of the survivors or a refusal."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedssl.secure_aggregation import NoSum, Thresholds, Words
from fedssl.secure_aggregation.mask_keys import MaskKeys
from fedssl.secure_aggregation.masks import Mask, apply_masks
from fedssl.secure_aggregation.roster import check_roster
from support.secure_rounds import NEVER, SecureRound

quick = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = st.integers(0, 7)


def check(secure: SecureRound, lost_in: dict[str, int]) -> bool:
    """Assert that the outcome is right, and return whether there was a sum."""
    outcome = secure.outcome(lost_in)
    survivors = tuple(secure.at(2))
    if isinstance(outcome, NoSum):
        return False
    assert outcome.survivors == survivors
    assert len(survivors) >= secure.context.thresholds.min_survivors
    assert np.array_equal(outcome.words, secure.expected(survivors))
    return True


@pytest.mark.full
@quick
@given(st.integers(3, 40), SIZES, st.data())
def test_a_complete_graph_gives_the_sum_unless_too_many_are_lost(
    num_clients: int, num_words: int, data: st.DataObject
) -> None:
    secure = SecureRound(num_clients, num_words=num_words)
    lost = data.draw(st.dictionaries(st.sampled_from(secure.names), st.integers(0, NEVER - 1)))
    limits, revealing = secure.context.thresholds, num_clients - len(lost)
    survivors = num_clients - sum(phase < 3 for phase in lost.values())
    is_possible = revealing >= limits.threshold and survivors >= limits.min_survivors
    assert check(secure, lost) == is_possible


def require_size(limits: Thresholds, num_clients: int) -> None:
    """Raise ValueError as `require_private` does if there are too few clients, but for no other reason."""
    if limits.min_survivors > num_clients or limits.threshold > min(limits.degree, num_clients - 1) + 1:
        raise ValueError("there are too few clients")


@pytest.mark.full
@quick
@given(st.integers(7, 30), st.sampled_from([4, 6]), SIZES, st.data())
def test_a_sparse_graph_gives_the_exact_sum_or_none(
    num_clients: int, degree: int, num_words: int, data: st.DataObject
) -> None:
    # Such a small graph is not private enough, so only the sizes are checked.
    threshold = data.draw(st.integers(degree // 2 + 1, degree + 1))
    limits = Thresholds(degree=degree, threshold=threshold, collusion=0, min_survivors=3)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("context", "roster"):
            patch.setattr(f"fedssl.secure_aggregation.{module}.require_private", require_size)
        secure = SecureRound(num_clients, num_words=num_words, limits=limits)
        lost = data.draw(st.dictionaries(st.sampled_from(secure.names), st.integers(0, NEVER - 1), max_size=4))
        has_sum = check(secure, lost)
        assert has_sum or lost


@pytest.mark.full
def test_every_schedule_of_losses_of_five_clients_gives_the_sum_or_none() -> None:
    limits = Thresholds(degree=4, threshold=3, collusion=0, min_survivors=3)
    num_sums = 0
    for phases in itertools.product((0, 1, 2, 3, NEVER), repeat=5):
        secure = SecureRound(5, num_words=2, limits=limits)
        lost = dict(zip(secure.names, phases, strict=True))
        is_possible = sum(phase == NEVER for phase in phases) >= 3
        assert check(secure, lost) == is_possible, phases
        num_sums += is_possible
    # Either 3, 4 or 5 of 5 reveal, and each of the others is lost in one of four phases: 10 * 16 + 5 * 4 + 1.
    assert num_sums == 181


@pytest.mark.full(but=2)
@pytest.mark.parametrize("revealing", [2, 4, 3, 5, 1, 0])
def test_any_numbers_of_losses_of_five_clients_in_each_phase_give_the_sum_or_none(revealing: int) -> None:
    limits = Thresholds(degree=4, threshold=3, collusion=0, min_survivors=3)
    for lost_in in itertools.combinations_with_replacement(range(NEVER), 5 - revealing):
        secure = SecureRound(5, num_words=2, limits=limits)
        lost = dict(zip(secure.names, (*lost_in, *[NEVER] * revealing), strict=True))
        assert check(secure, lost) == (revealing >= 3), lost


def is_uniform(words: Words) -> bool:
    """Return whether the chi-squared statistic of the words' bytes is within 5 sigma: 255 + 5 sqrt(510) = 368."""
    counts = np.bincount(words[1:].view(np.uint8), minlength=256)
    return bool(((counts - counts.mean()) ** 2).sum() / counts.mean() < 368)


def until_shares_with_zeros() -> SecureRound:
    """Return a round of four clients before its vectors, which are zeros."""
    secure = SecureRound(4, num_words=40_000)
    secure.words = {name: np.zeros(40_000, np.uint64) for name in secure.names}
    secure.announce()
    secure.share()
    return secure


def test_masked_zeros_are_uniform() -> None:
    secure = until_shares_with_zeros()
    assert not is_uniform(secure.words[secure.names[0]])
    for name in secure.names:
        assert is_uniform(secure.clients[name].mask(secure.inboxes[name], secure.words[name]).words)


def test_a_late_vector_stays_uniform_without_the_masks_of_its_pairs() -> None:
    # The coordinator got the lost client's mask key, and with it every mask of its pairs, but not its own mask.
    secure = until_shares_with_zeros()
    late = secure.names[0]
    vector = secure.clients[late].mask(secure.inboxes[late], secure.words[late]).words.copy()
    sent, roster = secure.server.collected.shares[late].pairs, check_roster(secure.context, secure.roster)
    keys = MaskKeys(secure.context.digest, late, secure.clients[late]._secrets.mask)
    for other in secure.names[1:]:
        apply_masks(vector, [Mask(keys.pair_key(roster, other, sent[other]), is_negative=True)])
    assert is_uniform(vector)
