"""Each composition declares whether its coordinator needs only sums over the clients, and the coordinator obeys it.

The tests use two cohorts with the same sums but different updates: a coordinator that uses only sums finds the same
weights.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.aggregation.fixed_point import TotalBits
from fedssl.aggregation.layerwise import is_variance
from fedssl.artifacts.tensors import TORCH_DTYPES, Tensors
from fedssl.engine import run_aggregation
from fedssl.engine.secure_sums import client_words, num_client_words, run_secure_aggregation
from fedssl.methods import METHODS, Method
from fedssl.methods.api import Context, Update
from fedssl.methods.registry import ADD_ONS, MERGES, OBJECTIVES, REDUCERS
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.plan import TensorSpec
from fedssl.protocol.runs import RunSpec
from support.methods import CONFIGS, PUBLIC, context, method_spec

PER_IMAGE = frozenset({"dictionary", "similarity", "representations"})
"""Kinds of tensors with an entry per image, which a sum over clients cannot contain."""

REFUSED_IF_RANDOM = frozenset({"probe-sums"})
"""Kinds that the coordinator refuses unless they can be sums of products: see test_ridge_probe.py."""

GRID = 2.0**-10
ABOVE_ZERO = 32  # a higher value than those drawn would change a variance, and updates with a negative one are left out
NUM_CLIENTS = 5  # Multi-Krum needs at least this many

USUAL_OBJECTIVES = ("fedbyol", "fedca", "orchestra")
"""Together they have every part that sends its own tensors. Pytest visits the others if it is called with --full."""

objectives = pytest.mark.parametrize(
    "objective",
    [
        name if name in USUAL_OBJECTIVES else pytest.param(name, marks=pytest.mark.full)
        for name in sorted(str(config.model_fields["name"].default) for config in OBJECTIVES)
    ],
)
add_ons = pytest.mark.parametrize("add_on", ["", *sorted(ADD_ONS)])


def _spec(objective: str, add_on: str, merge: str, reducer: str, **changes: Any) -> RunSpec | None:
    """Return the composition's spec, or None if its parts do not fit each other."""
    combines = CONFIGS["flesd"]["reducer"] if reducer == "distillation" else {"name": reducer}
    config = {
        **CONFIGS.get(objective, {}),
        **({"num_global_steps": 2} if objective == "orchestra" else {}),
        "name": objective,
        "add_ons": [{"name": add_on}] if add_on else [],
        "merge": {"name": merge},
        "reducer": combines,
    }
    uses_public = objective in ("fedca", "flesd") or reducer == "distillation"
    public = {**PUBLIC, "num_images": 128} if uses_public else None
    try:
        cohort = {"min_clients": NUM_CLIENTS, "min_updates": NUM_CLIENTS}
        return method_spec("fedsimclr", method=config, public_data=public, cohort=cohort, **changes)
    except ValidationError:
        return None


@pytest.mark.full(but=5)
@objectives
@add_ons
def test_every_composition_declares_whether_it_is_a_sum(objective: str, add_on: str) -> None:
    visited = 0
    for merge in MERGES:
        for reducer in REDUCERS:
            spec = _spec(objective, add_on, merge, reducer)
            if spec is not None:
                visited += 1
                _check(spec, _spec(objective, add_on, merge, reducer, aggregation={"arithmetic": "fixed"}))
    assert visited or not any(_spec(objective, add_on, m, r) for m in MERGES for r in REDUCERS)


@pytest.mark.parametrize("name", sorted(METHOD_CONFIGS))
def test_every_method_declares_whether_it_is_a_sum(name: str) -> None:
    spec = method_spec(name)
    fixed = None
    if spec.method.why_not_summed is None:
        fixed = method_spec(name, aggregation={"arithmetic": "fixed"})
    _check(spec, fixed)
    kinds = {tensor.kind for tensor in METHODS[name].bind(spec).plan.update}
    if fixed is not None and spec.method.why_not_secure is None and not kinds & REFUSED_IF_RANDOM:
        _check_narrow(fixed)


def test_secure_aggregation_is_refused_by_four_methods_and_only_centroids_leave_separately() -> None:
    """The tests above prove each of these declarations. This one lists the scope of secure aggregation."""
    usual = {name: method_spec(name).method for name in METHOD_CONFIGS}
    refused = {name for name, method in usual.items() if method.why_not_secure is not None}
    assert refused == {"fedca", "fedu2", "flesd", "single"}
    apart = {name: method.sent_apart for name, method in usual.items() if method.sent_apart and name not in refused}
    assert apart == {"orchestra": ("centroids",)}


@pytest.mark.parametrize("name", ["fedca", "fedu2", "flesd"])
def test_a_spec_that_is_not_a_sum_is_refused_with_the_reason(name: str) -> None:
    why = method_spec(name).method.why_not_summed
    assert why is not None
    with pytest.raises(ValidationError) as refused:
        method_spec(name, aggregation={"arithmetic": "fixed"})
    assert f'aggregation.arithmetic = "fixed" needs a coordinator that only adds up updates: {why}' in str(
        refused.value
    )


def test_a_limit_on_shares_of_the_weight_is_refused_with_fixed_point_arithmetic() -> None:
    with pytest.raises(ValidationError, match="max_weight_share changes each weight by those of all others"):
        method_spec("fedsimclr", aggregation={"arithmetic": "fixed"}, robustness={"max_weight_share": 0.4})


def _check(spec: RunSpec, fixed: RunSpec | None) -> None:
    plan, method = METHODS[spec.method.name].bind(spec).plan, spec.method
    kinds = {tensor.kind for tensor in plan.update}
    assert (fixed is None) == (method.why_not_summed is not None)
    if kinds & (PER_IMAGE | REFUSED_IF_RANDOM):
        assert (fixed is None) == bool(kinds & PER_IMAGE)
        _check_secure(spec)
        return
    apart = tuple(sorted(kinds & {"centroids"}))
    assert (method.why_not_secure is None) == (fixed is not None and bool(plan.update))
    _check_secure(spec)
    if plan.update:
        assert tuple(sorted(method.sent_apart)) == apart
    one, two = _results(fixed or spec)
    if method.why_not_secure is None and fixed is not None:
        _check_words(fixed, one)
    if fixed is not None:
        assert all(torch.equal(one[name], two[name]) for name in one)
    else:
        assert max(float((one[name].double() - two[name].double()).abs().max()) for name in one) > GRID


def _check_secure(spec: RunSpec) -> None:
    """Assert that a spec may ask for secure aggregation if and only if its method can take part."""
    why = spec.method.why_not_secure
    arithmetic = "fixed" if spec.method.why_not_summed is None else "float"
    asked = {**spec.model_dump(mode="json"), "aggregation": {"arithmetic": arithmetic}, "secure_aggregation": {}}
    if why is None:
        assert RunSpec.model_validate(asked).secure_aggregation is not None
        return
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(asked)
    assert f"secure_aggregation is impossible here: {why}" in str(refused.value)


def _check_narrow(spec: RunSpec) -> None:
    """Assert the same for words of 32 bits, and that they make a vector smaller."""
    method, (state, sent) = METHODS[spec.method.name], _cohort(spec)
    aggregation = spec.aggregation.model_copy(update={"matrix_bits": 32})
    wide = context(spec.model_copy(update={"aggregation": aggregation}), 2)
    ctx = dataclasses.replace(wide, total_bits=TotalBits(8, 3))
    _check_sum(method, state, sent, ctx, run_aggregation(method, state, _updates(sent), ctx).state)
    assert num_client_words(method, ctx) < num_client_words(method, wide)


def _check_words(spec: RunSpec, expected: Tensors) -> None:
    """Assert that a coordinator finds the same bits from only the sum of the clients' words and what the method
    sends separately."""
    _check_sum(METHODS[spec.method.name], *_cohort(spec), context(spec, 1), expected)


def _check_sum(method: Method, state: Tensors, sent: list[Tensors], ctx: Context, expected: Tensors) -> None:
    words = [client_words(method, state, update, NUM_CLIENTS, ctx) for update in _updates(sent)]
    assert {each.numel() for each in words} == {num_client_words(method, ctx)}
    names = [tensor.name for tensor in ctx.spec.sent_apart(method.bind(ctx.spec).plan)]
    apart = {update.client_id: {name: update.load()[name] for name in names} for update in _updates(sent)}
    total = torch.stack(words).sum(dim=0)
    found = run_secure_aggregation(method, state, total, NUM_CLIENTS, ctx, apart=apart if names else None).state
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _cohort(spec: RunSpec) -> tuple[Tensors, list[Tensors]]:
    """Return a state and the update of each client."""
    plan = METHODS[spec.method.name].bind(spec).plan
    state = {tensor.name: _on_grid(tensor, seed) for seed, tensor in enumerate(plan.broadcast)}
    state |= {name: value + ABOVE_ZERO for name, value in state.items() if is_variance(name)}
    return state, [
        {tensor.name: _moved(tensor, state, 1000 * client + seed) for seed, tensor in enumerate(plan.update)}
        for client in range(NUM_CLIENTS)
    ]


def _results(spec: RunSpec) -> tuple[Tensors, Tensors]:
    """Return the coordinator's tensors after a round, for two cohorts with the same sums."""
    method, plan = METHODS[spec.method.name], METHODS[spec.method.name].bind(spec).plan
    state, first = _cohort(spec)
    second = [dict(update) for update in first]
    for seed, tensor in enumerate(plan.update):
        if tensor.kind not in spec.method.sent_apart:
            shift = _on_grid(tensor, 10_000 + seed)
            second[0][tensor.name] = first[0][tensor.name] + shift
            second[1][tensor.name] = first[1][tensor.name] - shift
    return _aggregated(method, state, first, spec), _aggregated(method, state, second, spec)


def _aggregated(method: Any, state: Tensors, sent: list[Tensors], spec: RunSpec) -> Tensors:
    return run_aggregation(method, state, _updates(sent), context(spec, 1)).state


def _updates(sent: list[Tensors]) -> list[Update]:
    return [
        Update(f"client-{index}", 40, lambda tensors=tensors: tensors)  # type: ignore[misc]
        for index, tensors in enumerate(sent)
    ]


def _on_grid(tensor: TensorSpec, seed: int) -> torch.Tensor:
    """Draw values whose sums and differences are exact in float32."""
    return _drawn(tensor.dtype, tensor.shape, seed).clone()


@functools.lru_cache(maxsize=4096)
def _drawn(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if not TORCH_DTYPES[dtype].is_floating_point:
        return (drawn * 4).round().to(TORCH_DTYPES[dtype])
    return ((drawn / GRID).round() * GRID).to(TORCH_DTYPES[dtype])


def _moved(tensor: TensorSpec, state: Tensors, seed: int) -> torch.Tensor:
    shift = _on_grid(tensor, 100_000 + seed)
    return state[tensor.name] + shift if tensor.name in state else shift
