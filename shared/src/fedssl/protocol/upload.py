"""The form in which updates leave a client."""

from typing import Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel


class UploadConfig(StrictModel):
    """The form of the weights in an update."""

    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="`float32`: the weights. `bfloat16`: their differences from the broadcast, rounded to bfloat16, in "
        "half of the bytes. The client keeps what rounding has left out, and adds it to its next difference. "
        "BatchNorm's statistics, and tensors of other kinds such as control variates, stay as they are.",
    )

    @property
    def rounds(self) -> bool:
        """True if weights are rounded."""
        return self.dtype != "float32"
