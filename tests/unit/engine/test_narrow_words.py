"""Rounds with 32-bit words: plain and secure aggregation, the size of a vector, and values that do not fit."""

import dataclasses

import pytest
import torch

from fedssl.aggregation.fixed_point import TotalBits
from fedssl.aggregation.layerwise import is_variance
from fedssl.artifacts.header import file_bytes
from fedssl.engine import run_aggregation
from fedssl.engine.aggregation import ServerResult, ValueOutOfRange
from fedssl.engine.narrow_words import bits_of_round, narrow_words
from fedssl.engine.secure_rounds import run_secure_round
from fedssl.engine.secure_sums import num_vector_bytes
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.protocol.runs import RunSpec
from support.methods import context, method_spec

NARROW = {"arithmetic": "fixed", "matrix_bits": 32}
SECURE = {"aggregation": NARROW, "secure_aggregation": {"min_cohort": 3, "collusion": 0}}
NAMES, NUM_IMAGES = ("a", "b", "c"), (10, 20, 30)


class Cohort:
    """Three clients after a first round, with updates near its result."""

    def __init__(self, bits: TotalBits | None = None, *, is_narrow: bool = True) -> None:
        self.spec = method_spec("fedsimclr", **SECURE)
        self.method, plan = METHODS["fedsimclr"], METHODS["fedsimclr"].bind(self.spec).plan
        generator = torch.Generator().manual_seed(5)
        self.state = {
            t.name: torch.randn(t.shape, generator=generator) if t.dtype == "F32" else torch.zeros(t.shape).long()
            for t in plan.broadcast
        }
        self.state |= {name: value.abs() for name, value in self.state.items() if is_variance(name)}
        self.sent = {
            name: {key: value + 1 if value.dtype == torch.int64 else 1.25 * value for key, value in self.state.items()}
            for name in NAMES
        }
        bits = (bits or TotalBits.after(60, 3)) if is_narrow else None
        self.ctx = dataclasses.replace(context(self.spec, 2), total_bits=bits)

    def updates(self) -> list[Update]:
        return [
            Update(name, number, lambda name=name: self.sent[name])  # type: ignore[misc]
            for name, number in zip(NAMES, NUM_IMAGES, strict=True)
            if name in self.sent
        ]

    def move_beyond_32_bits(self, client: str) -> str:
        """Move one value of a matrix out of the range of its words, and return the matrix's name."""
        matrix = next(name for name, value in self.state.items() if value.ndim == 2)
        moved = self.sent[client][matrix].clone()
        moved[0, 0] += 9 * moved.abs().max()
        self.sent[client][matrix] = moved
        return matrix

    def secure(self) -> None:
        run_secure_round(self.method, self.state, self.state, self.updates(), self.ctx)

    def plain(self) -> ServerResult:
        spec: RunSpec = self.spec.model_copy(update={"secure_aggregation": None})
        return run_aggregation(self.method, self.state, self.updates(), dataclasses.replace(self.ctx, spec=spec))


def test_only_trained_matrices_have_words_of_32_bits() -> None:
    spec = method_spec(
        "fedrlc",
        aggregation=NARROW,
        method={"name": "fedrlc", "add_ons": [{"name": "crossed_kl"}, {"name": "scaffold"}]},
    )
    bound = METHODS["fedrlc"].bind(spec)
    narrow = narrow_words(bound, Context(spec=spec, round_number=2, total_bits=TotalBits(8, 3)))
    assert narrow is not None
    plan = {each.name: each for each in bound.plan.update}
    assert {plan[name].kind for name in narrow.names} == {"weights"}
    assert {len(plan[name].shape) for name in narrow.names} == {2, 4}
    others = plan.keys() - set(narrow.names)
    assert {plan[name].kind for name in others} == {"weights", "centers", "control"}
    assert {len(plan[name].shape) for name in others if plan[name].kind == "weights"} <= {0, 1}


def test_a_masked_vector_is_smaller_than_1_1_updates() -> None:
    spec = method_spec("fedsimclr", **SECURE, model={"encoder": {"widths": [64, 128]}})
    method = METHODS["fedsimclr"]
    wide, update = context(spec, 1), file_bytes(method.bind(spec).plan.update)
    narrow = dataclasses.replace(wide, total_bits=TotalBits(16, 4))
    assert 1.9 < num_vector_bytes(method, wide) / update < 2.0
    assert 1.0 < num_vector_bytes(method, narrow) / update < 1.1


def test_the_bits_of_a_round_follow_from_the_previous_round() -> None:
    cohort = Cohort()
    result = run_aggregation(cohort.method, cohort.state, cohort.updates(), context(cohort.spec, 1))
    assert result.state["fixed_point.totals"].tolist() == [60, 3]
    assert "fixed_point.totals" not in result.broadcast
    assert bits_of_round(cohort.spec, result.state, follows_weights=True) == TotalBits(7, 3)
    assert bits_of_round(cohort.spec, result.state, follows_weights=False) is None
    assert bits_of_round(cohort.spec, cohort.state, follows_weights=True) is None
    plain = method_spec("fedsimclr", aggregation={"arithmetic": "fixed"})
    assert bits_of_round(plain, result.state, follows_weights=True) is None
    other = run_aggregation(cohort.method, cohort.state, cohort.updates(), context(plain, 1))
    assert other.state.keys() == cohort.state.keys()


def test_a_value_or_a_total_weight_that_does_not_fit_gives_no_secure_result() -> None:
    cohort = Cohort()
    cohort.secure()
    matrix = cohort.move_beyond_32_bits("b")
    with pytest.raises(ValueOutOfRange, match=f"out of range: {matrix}: a value is "):
        cohort.secure()
    cohort = Cohort(TotalBits(5, 3))  # 60 images are more than 2^5
    with pytest.raises(ValueOutOfRange, match="the weights of all clients are more than its 32-bit words carry: 32"):
        cohort.secure()


def test_a_plain_round_that_does_not_fit_32_bits_uses_words_of_64_bits() -> None:
    """Otherwise one client could end every second round without a result, with its weights or its number of images."""
    cohort = Cohort(TotalBits(5, 3))
    wide = Cohort(is_narrow=False)
    assert _same(cohort.plain(), wide.plain())
    cohort = Cohort()
    assert not _same(cohort.plain(), wide.plain())
    cohort.move_beyond_32_bits("b")
    wide.sent = cohort.sent
    assert _same(cohort.plain(), wide.plain())
    assert cohort.plain().norms.rejected == {}


def test_an_update_that_does_not_fit_64_bits_does_not_change_the_words_of_the_others() -> None:
    cohort = Cohort()
    counter = next(name for name, value in cohort.state.items() if value.dtype == torch.int64)
    without = Cohort()
    del without.sent["b"]
    cohort.sent["b"] = {**cohort.sent["b"], counter: torch.tensor(1 << 62)}
    assert list(cohort.plain().norms.rejected) == ["b"]
    assert _same(cohort.plain(), without.plain())


def _same(some: ServerResult, other: ServerResult) -> bool:
    return all(torch.equal(some.broadcast[name], other.broadcast[name]) for name in other.broadcast)
