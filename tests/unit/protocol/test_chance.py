"""The accuracy of guessing without an encoder."""

from fedssl.protocol.chance import Chance, chance_of


def test_equally_frequent_classes_give_one_divided_by_their_number() -> None:
    found = chance_of([0, 1, 2, 0, 1, 2])

    assert found == Chance(1 / 3, 3)
    assert found.how == "1 of 3 classes"


def test_a_frequent_class_is_a_better_guess_than_a_random_class() -> None:
    found = chance_of([7] * 9 + [1])

    assert found == Chance(0.9, 2)
    assert found.how == "the share of the largest of 2 classes"


def test_no_images_give_no_chance() -> None:
    assert chance_of([]) is None
