"""Which images of an index are alike, and which are like no other, by the cosine of their representations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.embeddings.index_file import Float32
from fedssl.errors import DataError
from fedssl.evaluation import nearest
from fedssl.unit_vectors import directions

_MAX_COSINES = 2**25  # 128 MB
_ROUNDING = 2e-6  # the error of a cosine in float32: that of two equal images may be this far below 1


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An image of an index, by its position, and its cosine similarity, -1..1, to another one."""

    position: int
    cosine: float


@dataclass(frozen=True, slots=True)
class Group:
    """Images that are near-duplicates: each has at least this cosine to another one of the group."""

    positions: list[int]
    cosine: float


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Pairs of near-duplicates.

    Attributes:
        num_pairs: the number of pairs with a cosine of at least the threshold.
        groups: the images that the most similar of these pairs connect, the group with the most similar pair first.
    """

    num_pairs: int
    groups: list[Group]


def find_nearest(h_NH: Float32, query_H: Tensor, num: int) -> list[Neighbour]:
    """Return the images with the largest cosine to a query, the nearest first; all of them if there are fewer."""
    searched_NH, query_1H = torch.from_numpy(h_NH), query_H.reshape(1, -1)
    positions = nearest(searched_NH, query_1H, num)[0]
    cosines = directions(searched_NH[positions]) @ directions(query_1H)[0]
    return [Neighbour(*pair) for pair in zip(positions.tolist(), cosines.tolist(), strict=True)]


def find_duplicates(h_NH: Float32, threshold: float, max_pairs: int, device: torch.device | str = "cpu") -> Duplicates:
    """Return the pairs of images with a cosine of at least `threshold`, up to rounding, joined to groups.

    Args:
        h_NH: the representations. Every pair is compared, so the time grows with N squared.
        threshold: the smallest cosine of near-duplicates.
        max_pairs: join at most this many pairs, the most similar ones.
        device: where the cosines are computed.
    """
    num_pairs, lowest = 0, threshold - _ROUNDING
    best = torch.empty(0, device=device)
    places = torch.empty(0, 2, dtype=torch.int64, device=device)
    for start, cosines_BN in _blocks(h_NH, device):
        # Each pair once: only with the images that come later.
        cosines_BN.masked_fill_(torch.ones_like(cosines_BN, dtype=torch.bool).tril(start), -torch.inf)
        num_pairs += int((cosines_BN >= lowest).sum())
        found, flat = cosines_BN.flatten().topk(min(max_pairs, cosines_BN.numel()))
        flat = flat[found >= lowest]
        pairs = torch.stack([flat // len(h_NH) + start, flat % len(h_NH)], dim=1)
        best, order = torch.cat([best, found[found >= lowest]]).sort(descending=True, stable=True)
        places = torch.cat([places, pairs])[order][:max_pairs]
        best = best[:max_pairs]
    return Duplicates(num_pairs, _joined(places.tolist(), best.tolist()))


def find_outliers(h_NH: Float32, k: int, num: int, device: torch.device | str = "cpu") -> list[Neighbour]:
    """Return the images that are least like their neighbours, the most unusual first.

    The measure is the cosine to the k-th nearest other image (Sun et al. 2022, "Out-of-Distribution Detection with Deep
    Nearest Neighbors"): an outlier has few others near it. `k` larger than 1 also finds small groups of duplicates that
    are unlike everything else. If there are fewer than k others, the farthest one counts.

    Args:
        h_NH: the representations. Every pair is compared, so the time grows with N squared.
        k: the neighbour that counts.
        num: how many images to return.
        device: where the cosines are computed.

    Raises DataError if there is only one image.
    """
    if len(h_NH) < 2:
        raise DataError("there is only one image, which has no neighbours: embed more images")
    kth: list[Tensor] = []
    for start, cosines_BN in _blocks(h_NH, device):
        own = torch.arange(len(cosines_BN), device=device)
        cosines_BN[own, own + start] = -torch.inf
        kth.append(cosines_BN.topk(min(k, len(h_NH) - 1), dim=1).values[:, -1])
    cosines, positions = torch.cat(kth).sort(stable=True)
    return [Neighbour(*pair) for pair in zip(positions[:num].tolist(), cosines[:num].tolist(), strict=True)]


def _blocks(h_NH: Float32, device: torch.device | str) -> Iterator[tuple[int, Tensor]]:
    """Yield the cosines (B, N) of some images to all images, with the position of the first of them."""
    unit_NH = directions(torch.from_numpy(h_NH).to(device))
    step = max(1, min(1024, _MAX_COSINES // len(unit_NH)))
    for start in range(0, len(unit_NH), step):
        yield start, unit_NH[start : start + step] @ unit_NH.T


def _joined(pairs: Sequence[tuple[int, int]], cosines: Sequence[float]) -> list[Group]:
    """Return the groups of images that the pairs connect. `pairs` are sorted, the most similar first."""
    members: dict[int, list[int]] = {}
    lowest: dict[int, float] = {}
    for (one, other), cosine in zip(pairs, cosines, strict=True):
        joined = members.setdefault(one, [one])
        added = members.setdefault(other, [other])
        if added is not joined:
            joined += added
            members |= dict.fromkeys(added, joined)
            lowest |= dict.fromkeys(joined, cosine)
    groups = {id(group): Group(group, lowest[group[0]]) for group in members.values()}
    return list(groups.values())
