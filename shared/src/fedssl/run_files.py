"""The files in the folder of a simulated or pulled run, written whole or not at all, and on the disk when they are
written. Does not import torch."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl.errors import ResultsError
from fedssl.files import write_atomically

if TYPE_CHECKING:
    from fedssl.protocol.runs import RunSpec

MODEL, INITIAL, ENCODER, SPEC = "model.safetensors", "initial.safetensors", "encoder.safetensors", "spec.yaml"
CARD, LINEAGE = "model-card.md", "lineage.json"
HISTORY, RESULT, CHECKPOINT, LOCK = "history.json", "result.json", "checkpoint", ".lock"
CLIENTS, MEASURES, DEVICE = "clients", "measures.json", "device.json"


def write_spec(spec: "RunSpec", destination: Path) -> None:
    """Write a spec as YAML, which `fedssl run submit` and `fedssl simulate` can read."""
    write_text(destination, spec_as_yaml(spec))


def spec_as_yaml(spec: "RunSpec") -> str:
    """Return a whole spec as YAML, because TOML has no null."""
    import yaml

    return str(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def write_json(destination: Path, value: Any) -> None:
    """Write JSON that every reader accepts, in which numbers that are not finite become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"
    # A path that is not UTF-8 has lone surrogates. Escaped, they are JSON, and the path is read again as it was.
    write_atomically(destination, text.encode(errors="backslashreplace"))


def write_text(destination: Path, text: str) -> None:
    """Replace a file as a whole."""
    write_atomically(destination, text)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no file. Raises ResultsError if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ResultsError(f"{path} cannot be read ({error}): remove it, and run this again") from error
    if not isinstance(value, dict):
        raise ResultsError(f"{path} does not hold a JSON object: remove it, and run this again")
    return value


def finite(value: Any) -> Any:
    """Return the value with infinities and NaN replaced by None.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value
