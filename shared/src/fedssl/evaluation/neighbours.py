"""Weighted k-nearest-neighbour classification of representations (Wu et al. 2018)."""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 1024


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 200,
    temperature: float = 0.1,
) -> float:
    """Share of the test set, 0..1, that its neighbours in the training set classify rightly.

    Args:
        train_features, test_features: float (N, H), on one device; they are normalised here.
        train_labels, test_labels: int64 (N,).
        k: neighbours that vote; all of them where the training set has fewer.
        temperature: a neighbour of cosine s votes with weight exp(s / temperature).

    Goes through the test set in pieces, so memory grows with the training set only.
    """
    train_NH, test_NH = (F.normalize(x.detach().float(), dim=1) for x in (train_features, test_features))
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    num_right = 0
    for start in range(0, len(test_NH), _CHUNK):
        cosine, index = (test_NH[start : start + _CHUNK] @ train_NH.T).topk(min(k, len(train_NH)), dim=1)
        # Less 1 in the exponent: the same order of the classes, and no overflow at small temperatures.
        weights = ((cosine - 1) / temperature).exp()
        votes = torch.zeros(len(cosine), num_classes, device=cosine.device)
        votes.scatter_add_(1, train_labels[index], weights)
        num_right += int((votes.argmax(dim=1) == test_labels[start : start + _CHUNK]).sum())
    return num_right / len(test_NH)
