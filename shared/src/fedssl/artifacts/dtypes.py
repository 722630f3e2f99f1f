"""The dtypes that an artifact's tensors may have, under the names of the safetensors format.

Imports neither torch nor numpy, because the command line reads headers.
"""

from typing import NamedTuple, get_args

from fedssl.protocol.plan import DType


class DTypeInfo(NamedTuple):
    """One dtype. `numpy_name` has the same bits; BF16, which numpy does not have, is read as unsigned integers."""

    torch_name: str
    numpy_name: str
    item_size: int
    is_float: bool


INFO: dict[DType, DTypeInfo] = {
    "F64": DTypeInfo("float64", "<f8", 8, is_float=True),
    "F32": DTypeInfo("float32", "<f4", 4, is_float=True),
    "F16": DTypeInfo("float16", "<f2", 2, is_float=True),
    "BF16": DTypeInfo("bfloat16", "<u2", 2, is_float=True),
    "I64": DTypeInfo("int64", "<i8", 8, is_float=False),
    "I32": DTypeInfo("int32", "<i4", 4, is_float=False),
    "I16": DTypeInfo("int16", "<i2", 2, is_float=False),
    "I8": DTypeInfo("int8", "i1", 1, is_float=False),
    "U8": DTypeInfo("uint8", "u1", 1, is_float=False),
}
assert tuple(INFO) == get_args(DType)

ITEM_SIZES: dict[str, int] = {name: info.item_size for name, info in INFO.items()}
FLOATS = frozenset(name for name, info in INFO.items() if info.is_float)

FILE_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8")
"""The order in which the safetensors library writes tensors; tensors of one dtype are in name order."""
