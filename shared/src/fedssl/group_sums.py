"""Sums over groups of rows, with the same bits every time."""

from torch import Tensor


def group_sums(rows: Tensor, groups_N: Tensor, num_groups: int) -> Tensor:
    """Return the sum of each group's rows, added in the rows' order: (num_groups, ...). A group without rows has 0.

    Args:
        rows: (N, ...).
        groups_N: int64, the group of each row.
        num_groups: the number of groups.

    Example:
        >>> import torch
        >>> group_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 0]), 3).tolist()
        [5.0, 0.0, 2.0]
    """
    sums = rows.new_zeros(num_groups, *rows.shape[1:])
    if rows.is_cuda:  # on a GPU, index_add adds in any order, and index_put_ sorts first
        return sums.index_put_((groups_N,), rows, accumulate=True)
    return sums.index_add_(0, groups_N, rows)
