"""Ways to hide data in an update besides the tensors that its plan declares, for both sides that must refuse them.

Each takes an update's correct tensors and returns a file's bytes. The errors of both sides contain the text next to
it.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

from fedssl.artifacts.tensors import Tensors, serialised
from support.uploads import build_file, split_file

Smuggle = Callable[[Tensors], bytes]

PAYLOAD = b"patient 42: Jane Doe"


def _tensors(change: Callable[[Tensors, str], Tensors]) -> Smuggle:
    """Return a way that changes the tensors. `change` gets the name of one with at least two floats."""
    return lambda tensors: serialised(change(dict(tensors), _some_float(tensors)))


def _header(change: Callable[[dict[str, Any], bytes], bytes]) -> Smuggle:
    return lambda tensors: change(*split_file(serialised(tensors)))


def _text(change: Callable[[str], str]) -> Smuggle:
    """Return a way that changes the header's JSON and pads it to a multiple of 8 bytes."""

    def smuggle(tensors: Tensors) -> bytes:
        header, body = split_file(serialised(tensors))
        text = change(json.dumps(header, separators=(",", ":")))
        return build_file(text + " " * (-len(text) % 8), body)

    return smuggle


def _some_float(tensors: Tensors) -> str:
    return next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel() > 1)


def _with_bits(bits: int) -> Smuggle:
    """Return a way that sets the last number of a float32 tensor to these bits."""

    def change(tensors: Tensors, name: str) -> Tensors:
        spoilt = tensors[name].clone()
        spoilt.view(-1)[-1:].view(torch.int32).fill_(bits - 2**32 if bits >= 2**31 else bits)
        return {**tensors, name: spoilt}

    return _tensors(change)


def _moved(header: dict[str, Any], by: int) -> dict[str, Any]:
    """Return the header with every tensor moved `by` bytes towards the end."""
    return {
        name: {**entry, "data_offsets": [offset + by for offset in entry["data_offsets"]]}
        for name, entry in header.items()
    }


def _renamed(tensors: Tensors, name: str) -> Tensors:
    return {(f"{name}_of_jane_doe" if key == name else key): tensor for key, tensor in tensors.items()}


NOT_DECLARED = "does not match the method's artifact plan"
NOT_FINITE = "holds NaN or infinity"
OTHER_FORM = "not in the only permitted form"
METADATA = "carries __metadata__, which may not travel"
PLACES = "leave a gap or overlap another's"

SMUGGLING: dict[str, tuple[Smuggle, str]] = {
    "one extra tensor": (_tensors(lambda t, name: {**t, "images": torch.zeros(4)}), NOT_DECLARED),
    "an empty tensor with a telling name": (_tensors(lambda t, name: {**t, "jane.doe": torch.zeros(0)}), NOT_DECLARED),
    "a renamed tensor": (_tensors(_renamed), NOT_DECLARED),
    "no tensors": (_tensors(lambda t, name: {}), NOT_DECLARED),
    "double precision": (_tensors(lambda t, name: {**t, name: t[name].double()}), NOT_DECLARED),
    "half precision": (_tensors(lambda t, name: {**t, name: t[name].half()}), NOT_DECLARED),
    "floats as integers": (_tensors(lambda t, name: {**t, name: t[name].view(torch.int32)}), NOT_DECLARED),
    "one extra row": (_tensors(lambda t, name: {**t, name: torch.cat([t[name], t[name][:1]])}), NOT_DECLARED),
    "a flattened tensor": (_tensors(lambda t, name: {**t, name: t[name].flatten()[None]}), NOT_DECLARED),
    "NaN with payload bits": (_with_bits(0x7FC0BEEF), NOT_FINITE),
    "a negative signalling NaN": (_with_bits(0xFF80DEAD), NOT_FINITE),
    "infinity": (_with_bits(0x7F800000), NOT_FINITE),
    "metadata": (_header(lambda h, b: build_file({**h, "__metadata__": {"jane": "doe"}}, b)), METADATA),
    "empty metadata": (_header(lambda h, b: build_file({**h, "__metadata__": {}}, b)), METADATA),
    "a gap before the tensors": (
        _header(lambda h, b: build_file(_moved(h, 24), PAYLOAD + bytes(4) + b)),
        PLACES,
    ),
    "spaces after the header": (_text(lambda text: text + " " * 64), OTHER_FORM),
    "tabs instead of spaces": (_text(lambda text: text + "\t" * (-len(text) % 8 or 8)), OTHER_FORM),
    "spaces in the header": (_text(lambda text: text.replace(":", ": ").replace(",", ",\n")), OTHER_FORM),
    "letters as escape sequences": (_text(lambda text: text.replace('"dtype"', '"\\u0064type"')), OTHER_FORM),
    "keys in another order": (
        _header(lambda h, b: build_file({name: dict(reversed(entry.items())) for name, entry in h.items()}, b)),
        OTHER_FORM,
    ),
}
"""Ways to smuggle data with any method, and a part of the refusal. Each side words the refusal of sizes that do not fit
by itself: see `append_payload`."""

SEVERAL: dict[str, tuple[Smuggle, str]] = {
    "names in another order": (_header(lambda h, b: build_file(dict(reversed(h.items())), b)), OTHER_FORM),
    "a gap between tensors": (
        _header(lambda h, b: build_file({**h, **_moved({_last(h): h[_last(h)]}, 8)}, b + bytes(8))),
        PLACES,
    ),
    "overlapping tensors": (
        _header(lambda h, b: build_file({**h, **_moved({_last(h): h[_last(h)]}, -4)}, b)),
        PLACES,
    ),
    "one missing tensor": (_tensors(lambda t, name: {key: v for key, v in t.items() if key != name}), NOT_DECLARED),
}
"""Ways that need at least two tensors."""


def append_payload(tensors: Tensors) -> bytes:
    """Return the correct file with a payload at its end."""
    return serialised(tensors) + PAYLOAD


def _last(header: dict[str, Any]) -> str:
    return max(header, key=lambda name: int(header[name]["data_offsets"][1]))
