"""A golden curve: what three rounds of a run reported and the tensors that they ended with, as text in git."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fedssl.protocol.runs import RunSpec
from fedssl.simulation import Result, RoundRecord, simulate

FOLDER = Path(__file__).parent / "curves"
TOLERANCE = 1e-3
"""The relative tolerance between processors. README.md has the measured differences."""

FLOOR = 0.1
"""Smaller numbers are compared as if they had this size: biases start at 0, and are hardly more than rounding."""

Curve = dict[str, Any]


def draw(spec: RunSpec, data_root: Path) -> Curve:
    """Simulate the run and return its curve."""
    result = simulate(spec, data_root=data_root)
    own_state = {name: tensor for name, tensor in result.server_state.items() if name not in result.model}
    curve = {
        "machine": machine(),
        "rounds": [_round(record, result) for record in result.history],
        "model": _tensors(result.model),
        "client_states": {name: _tensors(state) for name, state in result.client_states.items()},
        "server_state_besides_the_model": _tensors(own_state),
        "digests": {
            "model": _digest(result.model),
            "client_states": {name: _digest(state) for name, state in result.client_states.items()},
            "server_state": _digest(result.server_state),
        },
    }
    return _rounded(curve)  # type: ignore[no-any-return]


def machine() -> str:
    """Return what determines a simulation's bits: two machines with equal descriptions compute equal ones."""
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()]
        fields = {name.strip(): value.strip() for name, _, value in lines}
    except OSError:
        fields = {}
    processor = " ".join(fields.get(name, "?") for name in ("vendor_id", "cpu family", "model"))
    capability, num_threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"torch {torch.__version__}, {capability}, processor {processor}, threads {num_threads}"


def differences(expected: Curve, found: Curve) -> list[str]:
    """Return one line per number that has changed.

    Compares every digit and digest on the machine that wrote the curve; elsewhere numbers up to the tolerance.
    """
    unlike = [(place, here, there) for place, here, there in _pairs(expected, found) if here != there]
    beyond = [
        f"{place}: {there!r} instead of {here!r}"
        for place, here, there in unlike
        if not place.startswith(("machine", "digests")) and not _is_close(here, there)
    ]
    if unlike and not beyond and expected["machine"] == found["machine"]:
        return [f"equal up to {TOLERANCE}, but not in all bits: {place}" for place, _, _ in unlike]
    return beyond


def read(path: Path) -> Curve:
    """Read a curve."""
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def write(path: Path, curve: Curve) -> None:
    """Write a curve, with each tensor on its own line."""
    text = json.dumps(curve, indent=1, sort_keys=True)
    text = re.sub(r"\[\s*([^][{}\"]+?)\s*\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text)
    path.write_text(text + "\n", encoding="utf-8")


def _round(record: RoundRecord, result: Result) -> dict[str, Any]:
    return {
        "loss": record.loss,
        "clients": record.clients,
        "server": record.server,
        "num_examples": record.num_examples,
        "num_images": record.num_images,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "rejected": list(record.rejected),
        "evaluation": result.evaluations_by_round.get(record.round_number, {}),
    }


def _tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: _summary(tensor) for name, tensor in tensors.items()}


def _summary(tensor: torch.Tensor) -> list[float]:
    """Return the root mean square, and the product with fixed cosines on the same scale, which depends on the order."""
    values = tensor.detach().double().flatten()
    root = max(1, len(values)) ** 0.5
    fixed = torch.arange(1, len(values) + 1, dtype=torch.float64).cos()
    return [float(values.norm()) / root, float(values @ fixed) / root]


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _pairs(expected: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Pair the leaves of two curves. A tensor's two numbers are one leaf."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            yield from _pairs(expected.get(name), found.get(name), f"{place} {name}".strip())
    elif _is_rounds(expected) and _is_rounds(found):
        numbered = [{f"{number}": each for number, each in enumerate(rounds, 1)} for rounds in (expected, found)]
        yield from _pairs(*numbered, place)
    else:
        yield place, expected, found


def _is_rounds(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _is_close(expected: Any, found: Any) -> bool:
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found) == 2:
        scale = max(abs(expected[0]), FLOOR)  # compares both of a tensor's numbers relative to its root mean square
        return all(abs(a - b) <= TOLERANCE * scale for a, b in zip(expected, found, strict=True))
    if isinstance(expected, float) and isinstance(found, int | float):
        return abs(expected - found) <= TOLERANCE * max(abs(expected), FLOOR)
    return bool(expected == found)
