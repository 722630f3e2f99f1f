"""Writes the representations of many images into one file, in memory that does not grow with their number."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fedssl.embeddings.encoders import BATCH_SIZE, Model
from fedssl.embeddings.half_made import HalfMade, partial_folder
from fedssl.embeddings.identity import difference
from fedssl.embeddings.index_file import Content, read_about, require_format, write_index
from fedssl.embeddings.outcome import Done, summarised
from fedssl.embeddings.sources import Source, describe
from fedssl.errors import ResultsError

_ROWS_PER_PART = 16 * BATCH_SIZE


@dataclass(frozen=True, slots=True)
class Embedded:
    """A complete file: its JSON document, and how many images an earlier call had embedded."""

    about: dict[str, Any]
    num_before: int


def embed(
    source: Source,
    model: Model,
    model_name: str,
    destination: Path,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] = lambda num: None,
) -> Embedded:
    """Write the representations of all images of a source.

    Images that cannot be decoded are left out, and listed in the file's JSON document. If the process is killed, the
    next call with the same arguments continues after the last complete batch, and writes the same bytes. If the file is
    complete already, nothing is computed.

    Args:
        source: the images.
        model: the encoder; it is moved to `device`.
        model_name: how `fedssl search` finds the encoder again: a path or a run's id.
        destination: the file; its suffix chooses the format.
        device: where the encoder runs.
        on_progress: called after each batch with the number of images that are done.

    Raises:
        ResultsError: the file, or the folder of a partial one, is from another encoder or other images, or other
            versions of packages have decoded the images of a partial one.
        DataError: no image can be decoded, or the representations are not finite.
        ExportError: the format is unknown, or needs pyarrow.
        FolderInUseError: another process writes the same file.
    """
    require_format(destination)
    about = {"model": model_name, **model.identity(), "images": describe(source), "decoders": source.decoders()}
    if destination.exists():
        return _complete(destination, about)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with HalfMade(destination) as half:
        half.start(about, model.encoder.feature_dim)
        num_before = sum(done.num for done in half.batches)
        model.encoder.to(device)
        on_progress(min(len(source), len(half.batches) * BATCH_SIZE))
        batches = source.batches(model.encoder.data, BATCH_SIZE, len(half.batches) * BATCH_SIZE)
        with contextlib.closing(batches):
            for batch in batches:
                done = Done(len(batch.images), batch.damaged, batch.num_deep, batch.highest)
                half.append(model.represent(batch.images, device).numpy(), done)
                on_progress(min(len(source), len(half.batches) * BATCH_SIZE))
        num, left_out = summarised(source, half.batches)
        complete = half.about | {"num_embedded": num, "left_out": left_out}
        write_index(destination, _content(source, half, complete))
        half.remove()
    return Embedded(complete, num_before)


def _complete(destination: Path, about: dict[str, Any]) -> Embedded:
    """Return a file that is complete already. Raises ResultsError if it is from another encoder or other images."""
    found = read_about(destination)
    if different := difference(found, about):
        raise ResultsError(f"{destination} holds representations of {different}: remove it, or choose another --out")
    shutil.rmtree(partial_folder(destination), ignore_errors=True)  # left by a process that was killed at the end
    return Embedded(found, int(found["num_embedded"]))


def _content(source: Source, half: HalfMade, about: dict[str, Any]) -> Content:
    damaged = {position for done in half.batches for position, _ in done.damaged}

    def names() -> Iterator[list[str]]:
        kept = (
            name
            for start in range(0, len(source), BATCH_SIZE)
            for at, name in enumerate(source.names(start, start + BATCH_SIZE), start)
            if at not in damaged
        )
        while part := list(islice(kept, _ROWS_PER_PART)):
            yield part

    return Content(about, int(about["num_embedded"]), half.width, names, half.rows(_ROWS_PER_PART))
