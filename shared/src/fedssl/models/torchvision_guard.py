"""Makes `import torchvision` work beside a CPU build of torch.

torchvision's wheel is built for CUDA. Its operator library does not load beside a CPU torch, and the import then fails
because two operators that it annotates, `nms` and `qnms`, have no schema. With the two schemas declared, models, data
sets and transforms work; only the operators themselves and the codecs of `torchvision.io` stay missing.

Nothing else in the project imports torchvision directly: all ask :func:`import_torchvision`.
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
    """Imports and returns torchvision, declaring the missing operators first where the plain import fails.

    Cheap after the first call, and does nothing special where torchvision imports by itself.
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
