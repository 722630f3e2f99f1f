"""The errors of reading NumPy's files, and the bound on their memory.

This module does not import torch, because the processes that decode images import it.
"""

import os
import tokenize
import zipfile
import zlib
from collections import Counter
from pathlib import Path

# What reading an `.npz` file raises. numpy parses a header as a literal of Python, and repairs those of Python 2 with
# its tokenizer.
ARRAY_ERRORS = (OSError, EOFError, ValueError, TypeError, KeyError, MemoryError, OverflowError, RuntimeError,
                 SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error)  # fmt: skip


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_members(path: Path) -> None:
    """Raise ValueError if an `.npz` file has two arrays of one name, or one larger than this machine's memory."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    counts = Counter(member.filename.removesuffix(".npy") for member in members)
    if twice := [name for name, num in counts.items() if num > 1]:  # numpy would read one of them
        raise ValueError(f"it has two arrays {twice[0]}, but a name belongs to one: write it again")
    needed = max((member.file_size for member in members), default=0)
    memory = memory_bytes()
    if needed > memory:
        raise ValueError(f"an array takes {needed / 1e9:,.1f} GB, but the machine has {memory / 1e9:,.1f} GB of memory")
