"""Weighted k-nearest-neighbour classification of representations (Wu et al. 2018)."""

import torch
from torch import Tensor

from fedssl.unit_vectors import directions

_CHUNK = 1024
_MAX_COSINES = 2**26  # at once, a quarter of a gigabyte


def nearest(searched_NH: Tensor, queries_QH: Tensor, k: int) -> Tensor:
    """Return the positions (Q, k) of the most similar representations by cosine, the nearest first.

    If fewer than k are searched, all of them are returned. The order of equal cosines is not defined. Use it for few
    queries only, because all cosines are computed at once.
    """
    searched_NH, queries_QH = (directions(x.float()) for x in (searched_NH, queries_QH))
    return (queries_QH @ searched_NH.T).topk(min(k, len(searched_NH)), dim=1).indices


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 200,
    temperature: float = 0.1,
) -> float:
    """Return the share of the test set, 0..1, that its neighbours in the training set classify correctly.

    Args:
        train_features, test_features: float (N, H), on one device; they are normalised here.
        train_labels, test_labels: int64 (N,).
        k: the number of neighbours that vote; all of them if the training set is smaller. If the k-th has the cosine of
            others, torch chooses which of them vote.
        temperature: a neighbour of cosine s votes with weight exp(s / temperature).

    Goes through the test set in pieces, so memory grows with the training set only.
    """
    device = train_features.device
    train_NH, test_NH = (directions(x.float()) for x in (train_features, test_features))
    train_labels, test_labels = train_labels.to(device), test_labels.to(device)
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    num_right = torch.zeros((), dtype=torch.int64, device=device)
    chunk = max(1, min(_CHUNK, _MAX_COSINES // len(train_NH)))
    for start in range(0, len(test_NH), chunk):
        cosine, index = (test_NH[start : start + chunk] @ train_NH.T).topk(min(k, len(train_NH)), dim=1)
        weights = _weights(cosine, temperature)
        votes = torch.zeros(len(cosine), num_classes, device=device)
        votes.scatter_add_(1, train_labels[index], weights)
        num_right += (votes.argmax(dim=1) == test_labels[start : start + chunk]).sum()
    return int(num_right) / len(test_NH)


def knn_scores(
    train_features: Tensor, presence_NC: Tensor, test_features: Tensor, k: int = 200, temperature: float = 0.1
) -> Tensor:
    """Return for each test image (Q, C) the share of its neighbours' votes, 0..1, that have each label.

    Args:
        train_features, test_features: float (N, H) and (Q, H), on one device; they are normalised here.
        presence_NC: 1 for each label that a training image has, else 0.
        k, temperature: see :func:`knn_accuracy`.
    """
    train_NH, test_NH = (directions(x.float()) for x in (train_features, test_features))
    presence_NC = presence_NC.to(train_NH)
    k, parts = min(k, len(train_NH)), [presence_NC[:0]]
    chunk = max(1, min(_CHUNK, _MAX_COSINES // max(len(train_NH), k * presence_NC.shape[1])))
    for start in range(0, len(test_NH), chunk):
        cosine, index = (test_NH[start : start + chunk] @ train_NH.T).topk(k, dim=1)
        weights = _weights(cosine, temperature)
        parts.append((weights[:, :, None] * presence_NC[index]).sum(dim=1) / weights.sum(dim=1, keepdim=True))
    return torch.cat(parts)


def _weights(cosine_QK: Tensor, temperature: float) -> Tensor:
    """Return exp(cosine / temperature) of each query's neighbours, divided by that of the nearest, which comes first.

    So the weights neither overflow nor are all 0, however small the temperature is.
    """
    return ((cosine_QK - cosine_QK[:, :1]) / temperature).exp()
