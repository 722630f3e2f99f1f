"""Files of linear classifiers: safetensors with `weight` (C, H) and `bias` (C,), and one JSON document.

The document is under the key `fedssl` of the file's metadata: the names of the classes, the digest of the encoder, how
images are prepared for it, and how the classifier was fitted. Equal classifiers give equal bytes.
"""

import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedssl.embeddings.encoders import Model
from fedssl.embeddings.identity import difference
from fedssl.errors import SpecError
from fedssl.files import write_atomically
from fedssl.models.classifier import Head

VERSION = 1
MAX_HEAD_BYTES = 1 << 28
_KEY = "fedssl"


class _Document(BaseModel):
    version: Literal[1]
    classes: tuple[str, ...]
    multi_label: bool
    encoder: dict[str, Any]
    preprocessing: dict[str, Any]
    fit: dict[str, Any]


def write_head(head: Head, destination: Path) -> None:
    """Write a classifier to a file. The name must end in .safetensors, or SpecError is raised."""
    require_name(destination)
    document = {"version": VERSION, "classes": head.class_names, "multi_label": head.multi_label, **head.about}
    content = save({"weight": head.weight, "bias": head.bias}, metadata={_KEY: json.dumps(document)})
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(destination, content)


def require_name(path: Path) -> None:
    """Raise SpecError unless a classifier can be written to a file of this name."""
    if path.suffix != ".safetensors":
        raise SpecError(f"{path}: the name of a classifier's file must end in .safetensors")


def read_head(path: Path) -> Head:
    """Read the file of a classifier. Raises SpecError."""
    try:
        if (size := path.stat().st_size) > MAX_HEAD_BYTES:
            raise SpecError(f"{path} has {size:,} bytes, more than a classifier can have: is it another file?")
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            if text is None or set(file.keys()) != {"weight", "bias"}:
                _fail(path, "it is another kind of file")
            document = _Document.model_validate_json(text)
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        _fail(path, str(error).splitlines()[0])
    except ValidationError as error:
        _fail(path, f"its description: {error.errors()[0]['msg']!s}")
    _require_tensors(path, weight, bias, len(document.classes))
    about = document.model_dump(include={"encoder", "preprocessing", "fit"})
    return Head(weight, bias, document.classes, document.multi_label, about)


def require_encoder(head: Head, model: Model, where: str) -> None:
    """Raise SpecError unless a classifier was fitted to the representations of this encoder."""
    wanted = model.identity()
    if different := difference(head.about, wanted):
        raise SpecError(f"{where} was fitted to {different}: give the encoder that it was fitted to")
    if head.weight.shape[1] != model.encoder.feature_dim:
        raise SpecError(f"{where} takes {head.weight.shape[1]} numbers per image; the encoder gives another number")


def _require_tensors(path: Path, weight: Tensor, bias: Tensor, num_classes: int) -> None:
    shapes = weight.ndim == 2 and len(weight) == num_classes >= 1 and tuple(bias.shape) == (num_classes,)
    if not shapes or str(weight.dtype) != "torch.float32" or str(bias.dtype) != "torch.float32":
        _fail(path, f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} for {num_classes} classes")
    if not bool(weight.isfinite().all() & bias.isfinite().all()):
        _fail(path, "its numbers are not finite")


def _fail(path: Path, reason: str) -> NoReturn:
    raise SpecError(
        f"{path} is not a classifier that can be read ({reason}): make it with `fedssl classify`, or give the folder "
        "of a run"
    )
