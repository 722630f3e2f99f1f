"""The files of a pulled model: the weights, the encoder, and the spec that describes it. Does not import torch."""

import json
from pathlib import Path

from fedssl.artifacts.header import LENGTH_BYTES, Header, TensorEntry, read_header
from fedssl.errors import ArtifactError
from fedssl.files import replaced_file
from fedssl.run_files import ENCODER, INITIAL, MODEL, SPEC, write_spec

__all__ = ["ENCODER", "INITIAL", "MODEL", "SPEC", "encoder_part", "export_encoder", "write_spec"]

_PREFIX = "encoder."


def encoder_part(header: Header, what: str) -> tuple[bytes, list[TensorEntry]]:
    """Return the beginning of the file that holds only the encoder of a model, and the tensors that follow in it.

    Their names and bytes are those of the model, whose header is given. Raises ArtifactError, which names the file
    `what`, if the model holds no encoder.
    """
    chosen = [entry for entry in header.entries if entry.name.startswith(_PREFIX)]
    if not chosen:
        raise ArtifactError(f"{what} holds no tensor whose name begins with {_PREFIX}: it is not a fedssl model")
    described, offset = {}, 0
    for entry in chosen:
        end = offset + entry.stop - entry.start
        described[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # the format requires that tensors begin aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, chosen


def export_encoder(model: Path, destination: Path) -> None:
    """Copy the tensors `encoder.*` of a safetensors file, byte for byte and under their names, into another file.

    Raises:
        ArtifactError: if the file is not a model, or holds no encoder.
    """
    with model.open("rb") as source:
        header = read_header(source)
        beginning, chosen = encoder_part(header, str(model))
        with replaced_file(destination) as incoming, incoming.open("wb") as target:
            target.write(beginning)
            for entry in chosen:
                source.seek(header.data_start + entry.start)
                target.write(source.read(entry.stop - entry.start))
