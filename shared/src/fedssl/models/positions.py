"""Position embeddings of a square grid of patches, for grids of other sizes."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def are_grids(*shapes: tuple[int, ...]) -> bool:
    """Return whether these are shapes (1, 1 + N, H) of position embeddings, each N a square and all H equal.

    >>> are_grids((1, 1 + 196, 192), (1, 1 + 16, 192)), are_grids((1, 1 + 8, 192), (1, 1 + 16, 192))
    (True, False)
    """
    tokens = [shape[1] - 1 for shape in shapes]
    squares = all(number > 0 and math.isqrt(number) ** 2 == number for number in tokens)
    return squares and len({(shape[0], shape[2]) for shape in shapes}) == 1 and shapes[0][0] == 1


def resized_positions(embeddings: Tensor, rows: int, columns: int) -> Tensor:
    """Return position embeddings (1, 1 + rows * columns, H) from those (1, 1 + N, H) of a square grid of N patches.

    The first one, of the class token, is kept. The others are interpolated bicubically, without smoothing before that,
    as in the code of DINO and MAE.
    """
    side = math.isqrt(embeddings.shape[1] - 1)
    grid = embeddings[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
    return torch.cat([embeddings[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)
