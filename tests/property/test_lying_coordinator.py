"""A coordinator that lies to each client of a secure round computes no single update, and at most one sum."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedssl.secure_aggregation import RoundContext, choose_thresholds
from fedssl.secure_aggregation.messages import Confirmation
from support.lying_coordinator import LyingCoordinator
from support.secure_rounds import SecureRound

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def start(num_clients: int, collusion: int) -> LyingCoordinator:
    """Return a coordinator with `collusion` colluding clients, which are the last ones."""
    secure = SecureRound(num_clients, num_words=3, limits=choose_thresholds(num_clients, collusion=collusion))
    return LyingCoordinator(secure, secure.names[num_clients - collusion :])


def require_private(liar: LyingCoordinator) -> int:
    """Assert that at most one sum is known, over enough updates, and return how many are known."""
    found, limits = liar.disclosed(), liar.secure.context.thresholds
    assert len(found) <= 1
    for clients, words in found.items():
        assert np.array_equal(words, liar.secure.expected(tuple(clients)))
        assert len(clients) >= limits.min_survivors - limits.collusion >= 2
    return len(found)


def lists(names: list[str], name: str, common: list[str], data: st.DataObject) -> list[str]:
    """Return the common list, or another one for this client."""
    if data.draw(st.integers(0, 5)) == 5:
        common = data.draw(st.lists(st.sampled_from(names), min_size=len(names) // 2, unique=True))
    return sorted({*common, name})


@pytest.mark.full
@quick
@given(st.integers(5, 8), st.integers(0, 2), st.data())
def test_random_lies_disclose_at_most_one_sum(num_clients: int, collusion: int, data: st.DataObject) -> None:
    liar = start(num_clients, collusion)
    names, absent = liar.secure.names, data.draw(st.integers(0, 1))
    for name in liar.honest:
        liar.share(name, liar.roster(lists(names, name, names, data)))
    for name in liar.honest:
        liar.mask(name, lists(names, name, names, data))
    signed: dict[tuple[str, ...], list[Confirmation]] = {}
    shown = {name: tuple(lists(names, name, names[absent:], data)) for name in liar.honest}
    for name, survivors in shown.items():
        confirmation = liar.confirm(name, survivors)
        if confirmation is not None:
            signed.setdefault(survivors, liar.collude(name, survivors)).append(confirmation)
    for name, survivors in shown.items():
        liar.reveal(name, signed.get(survivors, []))
    require_private(liar)


@pytest.mark.parametrize(("num_clients", "collusion"), [(7, 0), (10, 2)])
@pytest.mark.parametrize("quorum", ["required", "not required"])
def test_lists_of_survivors_cannot_isolate_one_client_if_a_quorum_is_required(
    num_clients: int, collusion: int, quorum: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The victim is shown only t - 1 others that sent shares. All others are shown that the victim survived and that as
    # many of those others as possible did not, so that their mask keys and the victim's own mask would be revealed.
    if quorum == "not required":
        monkeypatch.setattr(RoundContext, "quorum", 0)
        monkeypatch.setattr("fedssl.secure_aggregation.client.check_sharers", lambda *_: None)
    liar = start(num_clients, collusion)
    threshold, names = liar.secure.context.thresholds.threshold, liar.secure.names
    victim, *others = liar.honest
    peers = others[: threshold - 1 - collusion]
    for name in liar.honest:
        liar.share(name, liar.roster(names))
    assert liar.mask(victim, [victim, *peers, *liar.colluding])
    for name in others:
        assert liar.mask(name, names)
    missing = dict.fromkeys(peers, threshold - collusion)
    for name in sorted(others, key=lambda it: it not in peers):
        hidden = sorted((p for p in peers if p != name and missing[p] > 0), key=lambda it: -missing[it])
        hidden = hidden[: num_clients - threshold]
        shown = sorted(set(names) - set(hidden))
        confirmation = liar.confirm(name, shown)
        if confirmation is not None:
            for peer in hidden if liar.reveal(name, [confirmation, *liar.collude(name, shown)]) else ():
                missing[peer] -= 1
    found = liar.disclosed()
    if quorum == "required":
        assert not found
        assert len(liar.refused) == len(others)
    else:
        assert np.array_equal(found[frozenset({victim})], liar.secure.words[victim])


def test_a_client_reported_as_both_lost_and_alive_keeps_its_update_secret() -> None:
    # Flower's implementation answers both for one client, which reveals its own mask and its mask key.
    liar = start(7, 1)
    victim, *others = liar.honest
    for name in liar.honest:
        liar.share(name, liar.roster(liar.secure.names))
    for name in liar.honest:
        liar.mask(name, liar.secure.names)
    lists = {name: liar.secure.names[number >= 2 :] for number, name in enumerate(others)} | {victim: liar.secure.names}
    confirmations = {name: liar.confirm(name, shown) for name, shown in lists.items()}
    for name, shown in lists.items():
        same = [it for other, it in confirmations.items() if lists[other] == shown and it is not None]
        assert liar.reveal(name, [*liar.collude(name, shown), *same]) is None
    assert set(liar.refused.values()) == {"4 clients confirmed this list of survivors, and 5 must"}
    assert not liar.disclosed()


def test_different_weights_for_each_client_disclose_nothing() -> None:
    # LOKI (Zhao et al. 2024) gives each client different weights, so that each one's gradients can be found in the sum.
    liar = start(5, 0)
    for name in liar.honest:
        broadcast = hashlib.sha256(f"weights of {name}".encode()).hexdigest()
        liar.clients[name] = liar.secure.client(name, replace(liar.secure.context, broadcast=broadcast))
    for name in liar.honest:
        assert liar.share(name, liar.roster(liar.secure.names)) is None
    assert {reason.partition(": ")[2].split(" ", 1)[1] for reason in liar.refused.values()} == {
        "did not sign these keys for this round with the identity in the cohort"
    }
    assert not liar.disclosed()


def test_an_honest_round_discloses_only_the_sum_of_the_survivors() -> None:
    liar = start(7, 1)
    for name in liar.honest:
        liar.share(name, liar.roster(liar.secure.names))
    for name in liar.honest:
        liar.mask(name, liar.secure.names)
    survivors = liar.secure.names[1:]
    confirmations = [*liar.collude(liar.honest[1], survivors)]
    for name in liar.honest[1:]:
        confirmation = liar.confirm(name, survivors)
        assert confirmation is not None
        confirmations.append(confirmation)
    for name in liar.honest[1:]:
        liar.reveal(name, confirmations)
    assert require_private(liar) == 1
    assert set(liar.disclosed()) == {frozenset(liar.honest[1:])}
