"""The tensors of unfinished work, in one file that is replaced atomically. Needs torch, like `artifacts.tensors`."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from fedssl.artifacts.tensors import Tensors, load_tensors, save_tensors
from fedssl.files import replaced_file


@dataclass(frozen=True, slots=True)
class FileCheckpoint:
    """Tensors in one file, kept until `discard`."""

    path: Path

    def load(self) -> Tensors | None:
        """Return what was saved last, or None if nothing was saved or it cannot be read."""
        try:
            return load_tensors(self.path)
        except (OSError, SafetensorError):
            return None

    def save(self, tensors: Tensors) -> None:
        """Replace the file."""
        with replaced_file(self.path) as incoming:
            save_tensors(tensors, incoming)

    def discard(self) -> None:
        """Remove the file, because the work is done."""
        self.path.unlink(missing_ok=True)
