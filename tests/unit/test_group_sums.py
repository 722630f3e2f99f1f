"""Sums over groups of rows."""

import torch

from fedssl.group_sums import group_sums


def test_each_group_is_the_sum_of_its_rows_added_in_order() -> None:
    rows = torch.tensor([[1.0, 2.0], [1e8, 4.0], [3.0, 5.0], [-1e8, 6.0]])
    sums = group_sums(rows, torch.tensor([2, 0, 2, 0]), 4)
    assert sums.tolist() == [[0.0, 10.0], [0.0, 0.0], [4.0, 7.0], [0.0, 0.0]]
    in_turn = group_sums(torch.tensor([1e8, 1.0, -1e8]), torch.tensor([0, 0, 0]), 1)
    assert in_turn.tolist() == [0.0]  # 1e8 + 1 is 1e8 in float32
    assert rows[0].tolist() == [1.0, 2.0]
