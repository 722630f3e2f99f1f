"""A file of tensors that is replaced whole, for work that may be interrupted. Needs torch, like `artifacts.tensors`."""

import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from fedssl.artifacts.tensors import Tensors, load_tensors, save_tensors


@dataclass(frozen=True, slots=True)
class FileCheckpoint:
    """Tensors in one file, kept until `discard`."""

    path: Path

    def load(self) -> Tensors | None:
        """What was saved last; None where there is nothing, or nothing that can be read."""
        try:
            return load_tensors(self.path)
        except (OSError, SafetensorError):
            return None

    def save(self, tensors: Tensors) -> None:
        """Replace the file."""
        incoming = self.path.with_name(f"{self.path.name}.incoming")
        save_tensors(tensors, incoming)
        os.replace(incoming, self.path)

    def discard(self) -> None:
        """The work is done."""
        self.path.unlink(missing_ok=True)
