"""Updates that are read from their files again are measured together, with the same results as one by one."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fedssl.artifacts.tensors import FileTensors, read_tensors, save_tensors
from fedssl.engine.update_measures import Layout, Step, measure, measure_all
from fedssl.methods.api import Update
from fedssl.protocol.plan import ArtifactPlan, TensorSpec

SPECS = (
    TensorSpec(name="control.w", dtype="F32", shape=(2, 3), kind="control"),
    TensorSpec(name="double", dtype="F64", shape=(3,)),
    TensorSpec(name="empty", dtype="F32", shape=(0, 3)),
    TensorSpec(name="half", dtype="BF16", shape=(5,)),
    TensorSpec(name="rows", dtype="F32", shape=(4, 2), kind="representations"),
    TensorSpec(name="steps", dtype="I64", shape=()),
    TensorSpec(name="w", dtype="F32", shape=(3, 100_001)),  # more than one piece
)
LAYOUT = Layout.of(ArtifactPlan(broadcast=tuple(s for s in SPECS if s.kind == "weights"), update=SPECS))
TORCH = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "I64": torch.int64}


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(TORCH[spec.dtype]) for spec in SPECS}


def _update(path: Path, *, is_checked: bool = True) -> Update:
    @contextmanager
    def reopen() -> Iterator[FileTensors | None]:
        with path.open("rb", buffering=0) as file:
            yield FileTensors(file) if is_checked else None

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Update(path.name, 1, lambda: read_tensors(path, digest), reopen=reopen)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set torch's number of threads, on which the last bits of a scalar product depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_measuring_together_or_one_by_one_gives_equal_bits(tmp_path: Path) -> None:
    before, after = _tensors(0), _tensors(1)
    kept = [(each, each.clone()) for each in (*before.values(), *after.values())]
    paths = [tmp_path / f"client-{number:02}" for number in range(19)]
    for number, path in enumerate(paths):
        save_tensors(_tensors(2 + number), path)
    step = Step.between(before, after, LAYOUT)
    updates = [_update(path, is_checked=number not in (3, 18)) for number, path in enumerate(paths)]
    updates[5] = Update(updates[5].client_id, 1, updates[5].load)
    expected = [measure(_tensors(2 + number), before, LAYOUT, step) for number in range(19)]
    assert measure_all(updates, before, LAYOUT, step) == expected
    assert len({found["update_cosine"] for found in expected}) == 19
    assert all(torch.equal(each, as_before) for each, as_before in kept)
    assert measure_all([], before, LAYOUT, step) == []


def test_a_file_that_cannot_be_reopened_raises_an_error(tmp_path: Path) -> None:
    save_tensors(_tensors(0), tmp_path / "a")
    update = _update(tmp_path / "a")
    (tmp_path / "a").unlink()
    with pytest.raises(FileNotFoundError):
        measure_all([update], _tensors(1), LAYOUT, Step.between(_tensors(1), _tensors(2), LAYOUT))
