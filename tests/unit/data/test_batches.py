"""Batches contain every image at most once, and no batch is too small to train on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedssl.data import epoch_batches
from fedssl.data.batches import distinct_batches, num_batches, num_trained
from fedssl.errors import DataError


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(num_images=st.integers(0, 200), batch_size=st.integers(2, 64), drop_last=st.booleans())
def test_every_image_occurs_at_most_once(num_images: int, batch_size: int, drop_last: bool) -> None:  # noqa: FBT001
    batches = epoch_batches(num_images, batch_size, _generator(), drop_last)
    seen = torch.cat([torch.zeros(0, dtype=torch.int64), *batches])
    assert len(set(seen.tolist())) == len(seen) == num_trained(num_images, batch_size, drop_last)
    assert len(batches) == num_batches(num_images, batch_size, drop_last)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    left_out = num_images - len(seen)
    if num_images < 2:
        assert not batches, "one image alone cannot be trained on"
    elif num_images <= batch_size:
        assert left_out == 0
        assert len(batches) == 1, "an only batch is never dropped"
    elif drop_last:
        assert left_out == num_images % batch_size
        assert len(batches[-1]) == batch_size
    else:
        assert left_out == (num_images % batch_size == 1)
        assert len(batches[-1]) >= 2


def test_the_order_comes_from_the_generator() -> None:
    first, second = (torch.cat(epoch_batches(50, 8, _generator(1), drop_last=False)) for _ in range(2))
    assert torch.equal(first, second)
    generator = _generator(1)
    epochs = [torch.cat(epoch_batches(50, 8, generator, drop_last=False)) for _ in range(2)]
    assert not torch.equal(epochs[0], epochs[1])
    assert sorted(first.tolist()) == list(range(50))


def test_a_batch_size_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        epoch_batches(10, 1, _generator(), drop_last=False)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20), batch_size=st.integers(2, 9), drop_last=st.booleans()
)
def test_no_batch_has_two_images_of_a_group(sizes: list[int], batch_size: int, drop_last: bool) -> None:  # noqa: FBT001
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    groups = groups[torch.randperm(len(groups), generator=_generator(7))]
    count = num_batches(len(groups), batch_size, drop_last)
    usable = min(sum(min(size, count) for size in sizes), count * batch_size)
    if usable < 2 * count:
        with pytest.raises(DataError, match="too few groups"):
            distinct_batches(groups, batch_size, _generator(), drop_last)
        return
    batches = distinct_batches(groups, batch_size, _generator(), drop_last)
    assert len(batches) == count
    for batch in batches:
        assert usable // max(1, count) <= len(batch) <= min(batch_size, -(-usable // count))
        assert len(set(groups[batch].tolist())) == len(batch)
    seen = torch.cat([torch.zeros(0, dtype=torch.int64), *batches]).tolist()
    assert len(set(seen)) == len(seen) == usable
    again = distinct_batches(groups, batch_size, _generator(), drop_last)
    assert all(map(torch.equal, batches, again))


def test_distinct_batches_match_a_hand_calculation() -> None:
    """There are two batches of at most three. Each has one image of the group of four; the other two are left out."""
    groups = torch.tensor([5, 5, 5, 5, 9, 7])
    first, second = distinct_batches(groups, 3, _generator(3), drop_last=False)
    assert len(first) == len(second) == 2
    assert sorted([*groups[first].tolist(), *groups[second].tolist()]) == [5, 5, 7, 9]
    used = {frozenset(torch.cat(distinct_batches(groups, 3, _generator(seed), drop_last=False)).tolist())
            for seed in range(40)}  # fmt: skip
    assert len(used) == 6, "each pair of the four is drawn in some epoch"
