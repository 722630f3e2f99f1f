"""The dtypes that an artifact's tensors may have, under the names of the safetensors format. Does not import torch."""

from typing import Any, NamedTuple, get_args

import numpy as np

from fedssl.protocol.plan import DType


class DTypeInfo(NamedTuple):
    """One dtype. `numpy` has the same bits; BF16, which numpy does not have, is read as unsigned integers."""

    torch_name: str
    numpy: np.dtype[Any]
    is_float: bool

    @property
    def item_size(self) -> int:
        """Bytes per number."""
        return self.numpy.itemsize


INFO: dict[DType, DTypeInfo] = {
    "F64": DTypeInfo("float64", np.dtype("<f8"), is_float=True),
    "F32": DTypeInfo("float32", np.dtype("<f4"), is_float=True),
    "F16": DTypeInfo("float16", np.dtype("<f2"), is_float=True),
    "BF16": DTypeInfo("bfloat16", np.dtype("<u2"), is_float=True),
    "I64": DTypeInfo("int64", np.dtype("<i8"), is_float=False),
    "I32": DTypeInfo("int32", np.dtype("<i4"), is_float=False),
    "I16": DTypeInfo("int16", np.dtype("<i2"), is_float=False),
    "I8": DTypeInfo("int8", np.dtype("i1"), is_float=False),
    "U8": DTypeInfo("uint8", np.dtype("u1"), is_float=False),
}
assert tuple(INFO) == get_args(DType)

ITEM_SIZES: dict[str, int] = {name: info.item_size for name, info in INFO.items()}
FLOATS: dict[str, np.dtype[Any]] = {name: info.numpy for name, info in INFO.items() if info.is_float}

FILE_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8")
"""The order in which the safetensors library writes tensors; tensors of one dtype are in name order."""
