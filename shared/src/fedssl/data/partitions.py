"""Partition one labelled data set among clients, as in the papers' experiments.

Every variant is a rule for the number of images that each client gets of each class; the images themselves are drawn at
random. All random numbers come from one generator, which the seed determines. The redraws of a rule are bounded.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedssl.errors import DataError

Scheme = Literal["iid", "classes", "dirichlet"]
Variant = Literal["fedx", "ssd", "flesd", "orchestra"]
Indices = NDArray[np.int64]
_Rule = Callable[[NDArray[np.int64], int, float, np.random.Generator], NDArray[np.int64]]

MIN_IMAGES = 10
"""FedX draws again until every client has this many images."""

_MAX_DRAWS = 10_000
_NUM_NORMALISATIONS = 100
# Streams, so that functions do not draw the same numbers. `stratified_share` draws from stream 0, too, because
# `default_rng(seed)` equals `default_rng([seed, 0])`; another stream would change every image that was ever held out.
# With equal seeds, it and the scheme `classes` take the images of a class in the same order.
_PARTITION_STREAM, _SUBSET_STREAM, _SHARE_STREAM = 0, 1, 2


def partition(
    labels: NDArray[np.int64],
    num_clients: int,
    scheme: Scheme,
    seed: int,
    alpha: float | None = None,
    variant: Variant = "fedx",
) -> list[Indices]:
    """Split N labelled images among clients.

    Args:
        labels: class numbers (N,).
        num_clients: K.
        scheme: `iid` splits at random, as EasyFL's code does; sizes differ by at most one image, and numbers per class
            vary (FedU and FedRLC print equal ones). `classes` gives client i the i-th sequence of whole classes (two of
            CIFAR-10 with five clients); if K exceeds the number of classes, the clients of one class share its images.
            `dirichlet` spreads every class over the clients by a draw from Dirichlet(alpha).
        seed: 0 or larger; the same seed gives the same split.
        alpha: the concentration, needed for `dirichlet`: the smaller it is, the fewer classes a client has.
        variant: how `dirichlet` treats sizes.
            `fedx` (FedX, FedU, FedEMA): a client that has N/K images gets none of the remaining classes, and the draw
            is repeated until every client has 10 images. `ssd` (SSD, FedU2): sizes are not corrected, and clients may
            be empty. `flesd`: the draw is repeated until every client's shares, summed over classes, exceed 0.5/K;
            numbers are rounded down, so up to K images per class belong to no client. `orchestra`: the shares are
            balanced until all clients have the same number of images.

    Returns:
        K sorted index arrays, disjoint, together all N images (except with `flesd`).

    Raises:
        DataError: there is no such split; the message explains what to change.
    """
    labels = np.asarray(labels, np.int64)
    if num_clients < 1:
        raise DataError(f"num_clients must be at least 1, got {num_clients}")
    if len(labels) < num_clients:
        raise DataError(f"{len(labels)} images cannot be split among {num_clients} clients: take fewer clients")
    rng = np.random.default_rng([seed, _PARTITION_STREAM])
    if scheme == "iid":
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), num_clients)]
    class_sizes = np.bincount(labels)
    if scheme == "classes":
        return _deal(labels, _whole_classes(class_sizes, num_clients), rng)
    if scheme != "dirichlet" or variant not in _RULES:
        raise DataError(f"there is no partition {scheme!r}, {variant!r}: take iid, classes or dirichlet")
    if alpha is None or not alpha > 0:
        raise DataError(f"a dirichlet partition needs alpha, a number above 0, but got {alpha}")
    return _deal(labels, _RULES[variant](class_sizes, num_clients, alpha, rng), rng)


def describe_partition(labels: NDArray[np.int64], parts: list[Indices]) -> NDArray[np.int64]:
    """Return how many images of each class each client has, (K, number of classes)."""
    labels = np.asarray(labels, np.int64)
    num_classes = int(labels.max(initial=-1)) + 1
    return np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts]).astype(np.int64)


def keep_share(parts: Sequence[Indices], share: float, seed: int) -> list[Indices]:
    """Return the same share of every client's images, drawn at random, as in FedX's Table 3a.

    Args:
        parts: one index array per client.
        share: above 0, at most 1. A client keeps `share` times its images, rounded half up, and at least one if it has
            any.
        seed: decides the draw of each client separately. With the same seed, a smaller share is part of a larger one.

    Returns:
        K sorted index arrays; `parts` unchanged if `share` is 1.
    """
    if not 0 < share <= 1:
        raise DataError(f"share must be above 0 and at most 1, got {share}")
    if share == 1:
        return list(parts)
    kept = []
    for client, part in enumerate(parts):
        rng = np.random.default_rng([seed, _SHARE_STREAM, client])
        # The decimal share, as it was written: in binary, 0.29 * 50 is a little less than 14.5.
        num_kept = min(len(part), max(1, int(Fraction(str(share)) * len(part) + Fraction(1, 2))))
        kept.append(np.sort(rng.permutation(part)[:num_kept]))
    return kept


def stratified_share(labels: NDArray[np.int64], share: float, seed: int) -> Indices:
    """Return the sorted indices of a share of each class, drawn at random, at least one image of each.

    Args:
        labels: class numbers (N,).
        share: in (0, 1], rounded to whole images per class.
        seed: with the same seed, a smaller share is part of a larger one.
    """
    rng = np.random.default_rng(seed)
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    return np.sort(np.concatenate([indices[: max(1, round(share * len(indices)))] for indices in members]))


def effective_classes(counts_KC: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each client's effective number of classes: the exponential of the entropy of its labels.

    It is 1 if all images are of one class, the number of classes if it has the same number of images of each, and 0 if
    it has no images.
    """
    sizes_K = counts_KC.sum(axis=1, keepdims=True)
    shares_KC = counts_KC / np.maximum(sizes_K, 1)
    entropy_K = -(shares_KC * np.log(np.where(shares_KC > 0, shares_KC, 1))).sum(axis=1)
    return np.where(sizes_K[:, 0] > 0, np.exp(entropy_K), 0.0)


def choose_images(num_images: int, max_images: int | None, seed: int) -> Indices:
    """Return sorted indices of `max_images` images drawn at random, or of all images if that is not a limit."""
    if max_images is None or max_images >= num_images:
        return np.arange(num_images, dtype=np.int64)
    rng = np.random.default_rng([seed, _SUBSET_STREAM])
    return np.sort(rng.choice(num_images, max_images, replace=False))


def _deal(labels: NDArray[np.int64], counts_CK: NDArray[np.int64], rng: np.random.Generator) -> list[Indices]:
    """Draw the given numbers of images of each class at random."""
    parts: list[list[Indices]] = [[] for _ in range(counts_CK.shape[1])]
    for label, counts_K in enumerate(counts_CK):
        members = rng.permutation(np.flatnonzero(labels == label))
        for part, share in zip(parts, np.split(members, np.cumsum(counts_K))[:-1], strict=True):
            part.append(share)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def _whole_classes(class_sizes: NDArray[np.int64], num_clients: int) -> NDArray[np.int64]:
    num_classes = len(class_sizes)
    counts_CK = np.zeros((num_classes, num_clients), np.int64)
    if num_clients <= num_classes:
        for client, classes in enumerate(np.array_split(np.arange(num_classes), num_clients)):
            counts_CK[classes, client] = class_sizes[classes]
        return counts_CK
    for label, clients in enumerate(np.array_split(np.arange(num_clients), num_classes)):
        counts_CK[label, clients] = [len(part) for part in np.array_split(np.arange(class_sizes[label]), len(clients))]
    return counts_CK


def _fedx(
    class_sizes: NDArray[np.int64], num_clients: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    total = int(class_sizes.sum())
    if total < MIN_IMAGES * num_clients:
        raise DataError(
            f"{total} images are too few for {num_clients} clients with {MIN_IMAGES} each: "
            "take more images, fewer clients, or the partition iid"
        )
    for _ in range(_MAX_DRAWS):
        counts_CK = np.zeros((len(class_sizes), num_clients), np.int64)
        for label, size in enumerate(class_sizes):
            shares_K = rng.dirichlet(np.full(num_clients, alpha))
            shares_K *= counts_CK.sum(axis=0) < total / num_clients
            if not shares_K.sum() > 0:  # with a small alpha, clients that are full can get all shares
                break
            counts_CK[label] = _cut(shares_K / shares_K.sum(), int(size))
        if counts_CK.sum() == total and counts_CK.sum(axis=0).min() >= MIN_IMAGES:
            return counts_CK
    raise _no_draw(f"gave every client {MIN_IMAGES} images")


def _ssd(class_sizes: NDArray[np.int64], num_clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.int64]:
    shares_CK = rng.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))
    return np.stack([_cut(shares_K, int(size)) for shares_K, size in zip(shares_CK, class_sizes, strict=True)])


def _flesd(
    class_sizes: NDArray[np.int64], num_clients: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    for _ in range(_MAX_DRAWS):
        shares_CK = rng.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))
        if shares_CK.sum(axis=0).min() > 0.5 / num_clients:
            return np.floor(shares_CK * class_sizes[:, np.newaxis]).astype(np.int64)
    raise _no_draw(f"gave every client a share above {0.5 / num_clients:g}")


def _orchestra(
    class_sizes: NDArray[np.int64], num_clients: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    total = int(class_sizes.sum())
    target_K = np.array([len(part) for part in np.array_split(np.arange(total), num_clients)])
    tiny = np.finfo(np.float64).tiny  # a share of exactly zero could never be balanced
    wanted_CK = np.maximum(rng.dirichlet(np.full(num_clients, alpha), size=len(class_sizes)), tiny)
    for _ in range(_NUM_NORMALISATIONS):
        wanted_CK *= (class_sizes / np.maximum(wanted_CK.sum(axis=1), tiny))[:, np.newaxis]
        wanted_CK *= target_K / np.maximum(wanted_CK.sum(axis=0), tiny)
    return _rounded(wanted_CK, class_sizes, target_K)


def _rounded(
    wanted_CK: NDArray[np.float64], class_sizes: NDArray[np.int64], target_K: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return whole numbers near `wanted_CK` whose rows sum to the class sizes and columns to the clients' sizes."""
    counts_CK = np.zeros(wanted_CK.shape, np.int64)
    # Two passes over the cells: first the wanted numbers, rounded down; then the rest, largest remainders first.
    for cells_CK, limit_CK in ((wanted_CK, np.floor(wanted_CK)), (wanted_CK % 1, np.full(wanted_CK.shape, np.inf))):
        for cell in np.argsort(-cells_CK, axis=None, kind="stable"):
            label, client = np.unravel_index(cell, counts_CK.shape)
            free = min(class_sizes[label] - counts_CK[label].sum(), target_K[client] - counts_CK[:, client].sum())
            counts_CK[label, client] += int(min(free, limit_CK[label, client]))
    return counts_CK


def _cut(shares_K: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Cut `size` images at the running sum of the shares; no image is lost to rounding."""
    # Without the tolerance a running sum of 0.99...9 would give one image to a last client whose share is zero.
    cuts = (np.cumsum(shares_K)[:-1] * size + 1e-6).astype(np.int64).clip(0, size)
    return np.diff(cuts, prepend=0, append=size)


def _no_draw(success: str) -> DataError:
    return DataError(
        f"none of {_MAX_DRAWS:,} dirichlet draws {success}: "
        "take a larger alpha, fewer clients, more images, or the variant ssd"
    )


_RULES: dict[Variant, _Rule] = {"fedx": _fedx, "ssd": _ssd, "flesd": _flesd, "orchestra": _orchestra}
