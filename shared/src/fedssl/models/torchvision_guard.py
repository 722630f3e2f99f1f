"""Makes `import torchvision` work with a CPU build of torch.

torchvision's wheel is built for CUDA. Its operator library does not load with a CPU build of torch, and the import then
fails because two operators that it annotates, `nms` and `qnms`, have no schema. Once the two schemas are declared,
models, data sets and transforms work; only the operators themselves and the codecs of `torchvision.io` are missing.

Nothing else in the project imports torchvision directly: everything calls :func:`import_torchvision`.
"""

import importlib
import sys
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# Schemas live as long as the library object that declared them, so it is kept here.
_library: torch.library.Library | None = None


def import_torchvision() -> ModuleType:
    """Import and return torchvision. If the plain import fails, declare the missing operators first.

    Cheap after the first call. If torchvision can be imported as it is, this does nothing else.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    _declare_operators()
    _forget_half_imported()
    return importlib.import_module("torchvision")


def _declare_operators() -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            _library.define(schema)  # type: ignore[no-untyped-call]


def _forget_half_imported() -> None:
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]
