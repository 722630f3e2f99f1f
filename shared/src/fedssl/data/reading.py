"""How image files become pixels, besides their shape."""

from dataclasses import dataclass

from fedssl.protocol.data import DataConfig, WindowConfig


@dataclass(frozen=True, slots=True)
class Reading:
    """How image files are read.

    Attributes:
        window: the values that become black and white; None for images of 8 bits.
    """

    window: WindowConfig | None = None

    @classmethod
    def of(cls, data: DataConfig) -> "Reading":
        """Return how the images of a run are read."""
        return cls(window=data.window)


AS_STORED = Reading()
"""Images of 8 bits as they are."""
