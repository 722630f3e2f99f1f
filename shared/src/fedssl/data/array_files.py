"""The errors of reading NumPy's files, and the bound on their memory.

This module does not import torch, because the processes that decode images import it.
"""

import os
import tokenize
import zipfile
import zlib
from pathlib import Path

# What reading an `.npz` file raises. numpy parses a header as a literal of Python, and repairs those of Python 2 with
# its tokenizer.
ARRAY_ERRORS = (OSError, EOFError, ValueError, KeyError, MemoryError, RuntimeError, SyntaxError, tokenize.TokenError,
                 zipfile.BadZipFile, zlib.error)  # fmt: skip


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(path: Path) -> None:
    """Raise ValueError if an array of an `.npz` file is larger than this machine's memory."""
    with zipfile.ZipFile(path) as archive:
        needed = max((member.file_size for member in archive.infolist()), default=0)
    memory = memory_bytes()
    if needed > memory:
        raise ValueError(f"an array takes {needed / 1e9:,.1f} GB, but the machine has {memory / 1e9:,.1f} GB of memory")
