"""The last and the best round, and the sentence that explains the choice."""

import math

import pytest

from fedssl.evaluation import choose_best

HISTORY = [(0, {"knn": 0.5}), (10, {"probe": 0.80, "alignment": 0.9}), (30, {"probe": 0.83, "alignment": 0.7}),
           (20, {"probe": 0.84, "alignment": 0.4})]  # fmt: skip


def test_the_last_and_the_best_round_are_chosen_with_a_reason() -> None:
    choice = choose_best(HISTORY, "probe")
    assert (choice.last, choice.last_round) == (0.83, 30)
    assert (choice.best, choice.best_round) == (0.84, 20)
    assert choice.num_rounds == 3
    assert "chosen on the test set by probe itself" in choice.chosen
    assert "last is round 30; best is round 20 of 3 evaluated" in choice.chosen


def test_smaller_is_better_for_alignment() -> None:
    assert choose_best(HISTORY, "alignment").best_round == 20


def test_the_earliest_of_equal_rounds_is_the_best_and_nan_is_never_the_best() -> None:
    choice = choose_best([(1, {"knn": 0.5}), (2, {"knn": math.nan}), (3, {"knn": 0.5})], "knn")
    assert choice.best_round == 1
    assert choose_best([(1, {"knn": math.nan}), (2, {"knn": 0.1})], "knn").best_round == 2


def test_the_sentence_covers_a_single_round_and_a_measure_without_rounds_is_refused() -> None:
    assert choose_best([(5, {"probe": 0.1})], "probe").chosen == "probe: only round 5 was evaluated"
    last_is_best = choose_best([(5, {"probe": 0.1}), (9, {"probe": 0.2})], "probe")
    assert last_is_best.chosen == "probe: the last round, 9, is the best of 2 evaluated"
    with pytest.raises(ValueError, match="no round"):
        choose_best(HISTORY, "uniformity")
