"""Writes the probabilities of many images' classes into a CSV file, in memory that does not grow with their number."""

import csv
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedssl.embeddings.encoders import BATCH_SIZE, Model
from fedssl.embeddings.outcome import Done, summarised
from fedssl.embeddings.sources import Source
from fedssl.files import replaced_file
from fedssl.models.classifier import Head

_PREFIX = "p_"  # so that a class may have the name of another column
_BETWEEN = ";"


@dataclass(frozen=True, slots=True)
class Classified:
    """The content of a file of probabilities.

    Attributes:
        num: the number of images.
        num_predicted: how many of them each class was predicted for, by name.
        left_out: which images could not be decoded, as in the metadata of a file of representations.
    """

    num: int
    num_predicted: dict[str, int]
    left_out: dict[str, Any]


def classify(
    source: Source,
    model: Model,
    head: Head,
    destination: Path,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] = lambda num: None,
) -> Classified:
    """Write one line per image: its path, the predicted class or classes, and the probability of each class.

    With several labels per image, the classes with a probability of at least 0.5 are predicted. Images that cannot be
    decoded have no line. The file appears when it is complete.

    Args:
        source: the images.
        model: the encoder to which the classifier was fitted; it is moved to `device`.
        head: the classifier, which computes on the CPU.
        destination: the file.
        device: where the encoder runs.
        on_progress: called after each batch with the number of images that are done.

    Raises DataError: no image can be decoded, or the representations are not finite.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    model.encoder.to(device)
    batches_done, counts_C = [], torch.zeros(len(head.class_names), dtype=torch.int64)
    with replaced_file(destination) as incoming, incoming.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["path", "predicted", *(_PREFIX + name for name in head.class_names)])
        with closing(source.batches(model.encoder.data, BATCH_SIZE, 0)) as batches:
            for number, batch in enumerate(batches):
                start = number * BATCH_SIZE
                batches_done.append(Done(len(batch.images), batch.damaged, batch.num_deep, batch.highest))
                if len(batch.images):
                    p_NC = head.probabilities(model.represent(batch.images, device))
                    predicted_NC = predictions(p_NC, multi_label=head.multi_label)
                    counts_C += predicted_NC.sum(dim=0)
                    damaged = {position for position, _ in batch.damaged}
                    names = source.names(start, start + BATCH_SIZE)
                    kept = [name for at, name in enumerate(names, start) if at not in damaged]
                    lines.writerows(_rows(kept, p_NC, predicted_NC, head))
                on_progress(min(len(source), start + BATCH_SIZE))
        num, left_out = summarised(source, batches_done)
    return Classified(num, dict(zip(head.class_names, counts_C.tolist(), strict=True)), left_out)


def predictions(p_NC: Tensor, *, multi_label: bool) -> Tensor:
    """Return which classes are predicted, bool (N, C): the most probable one, or with several labels those from 0.5."""
    if multi_label:
        return p_NC >= 0.5
    return torch.nn.functional.one_hot(p_NC.argmax(dim=1), p_NC.shape[1]).bool()


def _rows(names: list[str], p_NC: Tensor, predicted_NC: Tensor, head: Head) -> "list[list[str]]":
    return [
        [
            name,
            _BETWEEN.join(each for each, is_predicted in zip(head.class_names, predicted, strict=True) if is_predicted),
            *(f"{p:.6g}" for p in row),
        ]
        for name, row, predicted in zip(names, p_NC.tolist(), predicted_NC.tolist(), strict=True)
    ]
