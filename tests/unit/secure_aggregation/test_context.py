"""The context: every part of it changes its digest, and contexts that are not private cannot be made."""

from dataclasses import replace

import pytest

from fedssl.secure_aggregation import Member, RoundContext, Thresholds, choose_thresholds, primitives
from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.roster import check_keys
from support.secure_rounds import SecureRound

CONTEXT = SecureRound(5).context


@pytest.mark.parametrize(
    "change",
    [
        {"run": "another"},
        {"round": 4},
        {"broadcast": "0" * 64},
        {"plan": "0" * 64},
        {"num_words": 3},
        {"thresholds": choose_thresholds(5, min_cohort=4)},
        {"thresholds": choose_thresholds(5, collusion=0)},
        {"cohort": (*CONTEXT.cohort[:4], Member("c900", CONTEXT.cohort[4].identity))},
        {"cohort": (*CONTEXT.cohort[:4], Member("c004", "0" * 64))},
    ],
)
def test_every_part_changes_the_digest(change: dict[str, object]) -> None:
    assert replace(CONTEXT, **change).digest != CONTEXT.digest  # type: ignore[arg-type]


def test_the_same_context_has_the_same_digest() -> None:
    assert replace(CONTEXT).digest == CONTEXT.digest


def test_keys_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    secure, digest = SecureRound(5), CONTEXT.digest
    with monkeypatch.context() as patch:
        patch.setattr(primitives, "_DOMAIN", "fedssl/secagg/1|")
        assert replace(CONTEXT).digest != digest
        old = secure.client("c001").announcement
    with pytest.raises(InvalidMessage, match="c001 did not sign these keys for this round"):
        check_keys(replace(secure.context), old)


def _with(**change: object) -> RoundContext:
    return replace(CONTEXT, **change)  # type: ignore[arg-type]


def test_contexts_that_cannot_be_are_refused() -> None:
    cohort = CONTEXT.cohort
    with pytest.raises(ValueError, match="needs 3 to 10000 clients, not 2"):
        _with(cohort=cohort[:2])
    with pytest.raises(ValueError, match="in name order"):
        _with(cohort=cohort[::-1])
    with pytest.raises(ValueError, match=r"'c0\|05' is not the name of a client"):
        _with(cohort=(*cohort[:4], replace(cohort[4], client="c0|05")))
    with pytest.raises(ValueError, match="the same identity key"):
        _with(cohort=(*cohort[:4], replace(cohort[4], identity=cohort[0].identity)))
    with pytest.raises(ValueError, match="not 32 bytes in lower-case hexadecimal"):
        _with(broadcast="A" * 64)
    with pytest.raises(ValueError, match="not 32 bytes"):
        _with(cohort=(*cohort[:4], replace(cohort[4], identity="ab")))
    with pytest.raises(ValueError, match="does not resist 1"):
        _with(thresholds=Thresholds(degree=4, threshold=3, collusion=1, min_survivors=3))


@pytest.mark.parametrize("num_clients", [3, 5, 10, 40, 200])
@pytest.mark.parametrize("collusion", [0, 1])
def test_two_lists_cannot_both_be_confirmed(num_clients: int, collusion: int) -> None:
    # Honest clients confirm one list, colluding ones both.
    context = SecureRound(num_clients, limits=choose_thresholds(num_clients, collusion=collusion)).context
    assert 2 * context.quorum > (num_clients - collusion) + 2 * collusion
    assert context.quorum <= num_clients
