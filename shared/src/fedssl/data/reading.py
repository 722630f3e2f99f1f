"""How image files become pixels, besides their shape."""

import math
from dataclasses import dataclass

from fedssl.protocol.data import DataConfig, WindowConfig


@dataclass(frozen=True, slots=True)
class Reading:
    """How image files are read.

    Attributes:
        window: the values that become black and white; None for images of 8 bits.
        max_unreadable: the share of a folder's files that may be unreadable, and are left out then.
    """

    window: WindowConfig | None = None
    max_unreadable: float = 0

    @classmethod
    def of(cls, data: DataConfig) -> "Reading":
        """Return how the images of a run are read."""
        return cls(window=data.window, max_unreadable=data.max_unreadable)


def num_tolerated(share: float, num_files: int) -> int:
    """Return how many of `num_files` files may be unreadable.

    >>> num_tolerated(0.01, 199), num_tolerated(0.29, 100)  # 0.29 * 100 is 28.999...
    (1, 29)
    """
    return math.floor(share * num_files + 1e-9)


AS_STORED = Reading()
"""Images of 8 bits as they are, all of them readable."""
