"""Updates that no run can use are left out and named, and only finite results are published."""

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import run_aggregation, run_local_round, start_run
from fedssl.engine.aggregation import ServerResult, published
from fedssl.engine.norm_bounding import TooFewUpdates
from fedssl.errors import MethodError
from fedssl.methods import METHODS, Method
from fedssl.methods.api import ClientData, Context, Metrics, ServerState, Update
from fedssl.methods.composition.method import BoundMethod
from fedssl.methods.composition.server import Reducer
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import context, method_spec, shards

SCAFFOLD = {"name": "fedsimclr", "add_ons": [{"name": "scaffold"}]}


def _first(ctx: Context) -> ServerResult:
    return start_run(METHODS[ctx.spec.method.name], ctx)


def _aggregate(ctx: Context, first: ServerResult, **updates: Tensors) -> ServerResult:
    loaded = [Update(name, 10, lambda own=own: own) for name, own in updates.items()]  # type: ignore[misc]
    return run_aggregation(METHODS[ctx.spec.method.name], first.state, loaded, ctx)


def _ctx(**changes: Any) -> Context:
    return Context(spec=method_spec("fedsimclr", **changes), round_number=1)


def _with(tensors: Tensors, name: str, value: float) -> Tensors:
    changed = tensors[name].clone()
    changed.view(-1)[0] = value
    return {**tensors, name: changed}


def _moved(tensors: Tensors, step: float) -> Tensors:
    return {name: each + step if each.is_floating_point() else each for name, each in tensors.items()}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -3e38])
def test_an_update_with_one_number_that_is_not_finite_or_too_large_is_left_out(value: float) -> None:
    """The squares of 3e38 overflow in float32, and no client could train from such a mean: this used to end the run."""
    ctx = _ctx()
    first = _first(ctx)
    honest = {name: _moved(first.broadcast, step) for name, step in {"a": 0.1, "b": 0.2, "c": 0.4}.items()}
    name = next(name for name in sorted(first.broadcast) if name.endswith("weight"))
    result = _aggregate(ctx, first, **honest, mallory=_with(first.broadcast, name, value))
    without = _aggregate(ctx, first, **honest)
    assert result.norms.rejected.keys() == {"mallory"}
    assert all(torch.equal(result.broadcast[name], without.broadcast[name]) for name in without.broadcast)
    assert all(math.isfinite(number) for found in result.norms.measures.values() for number in found.values())
    expected = "its update_norm is 3e+38" if abs(value) == 3e38 else "its update_norm is not finite"
    assert result.norms.rejected["mallory"] == expected


@pytest.mark.parametrize("method", ["fedbyol", "fedu2", "ldawa"])
def test_an_update_with_a_negative_batch_norm_variance_is_left_out(method: str) -> None:
    """Such a variance is finite and not large, but the encoder embedded every image as NaN, and no client was named."""
    ctx = context(method_spec(method), 1)
    first = start_run(METHODS[method], context(method_spec(method), 0))
    name = next(name for name in sorted(first.broadcast) if name.endswith(".running_var"))
    honest = {"a": _moved(first.broadcast, 0.1), "b": _moved(first.broadcast, 0.2)}
    without = _aggregate(ctx, first, **honest)
    for least in (-0.5, -9.0):  # the mean is negative too only with the second
        result = _aggregate(ctx, first, **honest, mallory=_with(first.broadcast, name, least))
        assert result.norms.rejected == {"mallory": f"a variance of its BatchNorms is {least:g}"}
        assert all(torch.equal(result.broadcast[name], without.broadcast[name]) for name in without.broadcast)
    rounded = _aggregate(ctx, first, **honest, c=_with(first.broadcast, name, -1e-8))
    assert rounded.norms.rejected == {}


@pytest.mark.parametrize("method", ["fedbyol", "fedu2", "ldawa"])
@pytest.mark.parametrize("count", [1 << 62, -(1 << 63)])
def test_an_update_with_an_impossible_counter_is_left_out(method: str, count: int) -> None:
    """After about 100 rounds the global counter was so close to 2^63 that those of the honest clients overflowed."""
    ctx = context(method_spec(method), 1)
    first = start_run(METHODS[method], context(method_spec(method), 0))
    name = next(name for name in sorted(first.broadcast) if name.endswith(".num_batches_tracked"))
    honest = {"a": _moved(first.broadcast, 0.1), "b": _moved(first.broadcast, 0.2)}
    without = _aggregate(ctx, first, **honest)
    result = _aggregate(ctx, first, **honest, mallory={**first.broadcast, name: torch.tensor(count)})
    assert result.norms.rejected == {"mallory": f"one of its counters has moved by {abs(count):.6g}"}
    assert all(torch.equal(result.broadcast[name], without.broadcast[name]) for name in without.broadcast)


def test_negative_variances_are_never_published() -> None:
    """The individual updates of a secure sum are not visible: only its result can be checked."""
    ctx = _ctx()
    first = _first(ctx)
    name = next(name for name in sorted(first.broadcast) if name.endswith(".running_var"))
    bound = METHODS["fedsimclr"].bind(ctx.spec)
    with pytest.raises(MethodError, match=rf"negative variances \({name}\): nothing of it is published"):
        published(bound, _with(first.state, name, -1.0), {}, {}, ctx)


def test_an_update_full_of_3e38_is_reported_with_its_norm() -> None:
    ctx = _ctx()
    first = _first(ctx)
    huge = {name: torch.full_like(each, 3e38) if each.is_floating_point() else each
            for name, each in first.broadcast.items()}  # fmt: skip
    updates = [Update(name, 10, lambda own=own: own, reopen=lambda own=own: nullcontext(read_again.append(1) or own))  # type: ignore[misc]
               for name, own in {"a": _moved(first.broadcast, 0.1), "mallory": huge}.items()]  # fmt: skip
    read_again: list[int] = []
    given: list[tuple[ServerResult, int]] = []
    result = run_aggregation(METHODS["fedsimclr"], first.state, updates, ctx,
                             on_result=lambda found: given.append((found, len(read_again))))  # fmt: skip
    # The first result contains both updates. Each result is given before its updates are read again to be measured.
    assert [seen for _, seen in given] == [0, 2]
    assert len(read_again) == 4
    assert given[-1][0].state is result.state
    count = sum(each.numel() for each in huge.values() if each.is_floating_point())
    norm = result.norms.measures["mallory"]["update_norm"]
    assert norm == pytest.approx(3e38 * math.sqrt(count), rel=1e-6)


def test_a_round_with_too_few_usable_updates_names_only_the_dishonest_client() -> None:
    ctx = _ctx(cohort={"min_updates": 3})
    first = _first(ctx)
    name = next(iter(sorted(first.broadcast)))
    with pytest.raises(TooFewUpdates) as caught:
        _aggregate(ctx, first, a=first.broadcast, b=first.broadcast, mallory=_with(first.broadcast, name, math.nan))
    message = str(caught.value)
    assert message == "1 of 3 updates was rejected, and 3 are needed. mallory: its update_norm is not finite"
    assert "learning_rate" not in message
    assert caught.value.norms.measures.keys() == {"a", "b", "mallory"}


@pytest.mark.parametrize("name", ["fedema", "fedrlc", "orchestra", "fedca", "ldawa", "fedu2", "flesd", "scaffold"])
def test_one_nan_in_any_kind_of_tensor_costs_only_its_clients_update(name: str) -> None:
    """This holds for whatever the method combines."""
    spec = method_spec("fedsimclr", method=SCAFFOLD) if name == "scaffold" else method_spec(name)
    ctx = context(spec, 1)
    method = METHODS[spec.method.name]
    first = start_run(method, context(spec, 0))
    good = {
        client: run_local_round(
            method,
            first.broadcast,
            None,
            ClientData(torch.from_numpy(shards(spec)[client].images)),
            context(spec, 1, client),
        ).update
        for client in sorted(shards(spec))[:2]
    }
    without = _aggregate(ctx, first, **good)
    one = next(iter(good.values()))
    for kind in sorted({tensor.kind for tensor in method.bind(spec).plan.update}):
        tensor = next(each for each in method.bind(spec).plan.update if each.kind == kind and each.dtype != "I64")
        result = _aggregate(ctx, first, **good, zz=_with(one, tensor.name, math.nan))
        assert result.norms.rejected.keys() == {"zz"}, kind
        assert all(torch.equal(result.broadcast[name], without.broadcast[name]) for name in without.broadcast), kind
        assert all(torch.equal(result.state[name], without.state[name]) for name in without.state), kind


def test_a_result_that_is_not_finite_is_never_published() -> None:
    """No update is to blame: the reducer's own step leaves the range of float32."""
    ctx = _ctx()
    first = _first(ctx)

    def overflow(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        names = updates[0].load()
        return {name: names[name] * 1e39 if names[name].is_floating_point() else names[name] for name in names}, {}

    def bind(spec: RunSpec) -> BoundMethod:
        bound = METHODS["fedsimclr"].bind(spec)
        return dataclasses.replace(bound, server=dataclasses.replace(bound.server, reducer=Reducer(overflow)))

    method = Method(METHODS["fedsimclr"].config, bind)
    updates = [Update("a", 10, lambda: _moved(first.broadcast, 0.1))]
    with pytest.raises(MethodError, match=r"result is not finite \(.*no single update is the cause.*learning_rate"):
        run_aggregation(method, first.state, updates, ctx)


def test_a_client_that_received_unusable_weights_is_not_blamed() -> None:
    spec = method_spec("fedsimclr")
    first = start_run(METHODS["fedsimclr"], context(spec, 0))
    poisoned = {name: each * 1e30 if each.is_floating_point() else each for name, each in first.broadcast.items()}
    data = ClientData(torch.from_numpy(next(iter(shards(spec).values())).images))
    with pytest.raises(MethodError, match=r"the cause is what this client received \(weights up to \S+e\+30\), not"):
        run_local_round(METHODS["fedsimclr"], poisoned, None, data, context(spec, 1, "client-0"))


def test_a_skipped_round_of_a_simulation_changes_nothing() -> None:
    """Every update is beyond the bound, and the spec skips such rounds, as a coordinator does."""
    cohort = {"min_clients": 3, "without_quorum": "skip"}
    spec = method_spec("fedbyol", cohort=cohort, robustness={"max_update_norm": 1e-6, "action": "reject"})
    result = simulate(spec, shards(spec))
    assert [bool(record.skipped) for record in result.history] == [True, True]
    assert all(len(record.rejected) == 3 for record in result.history)
    assert all(torch.equal(result.model[name], result.initial[name]) for name in result.initial)
    assert result.client_states == {}


def test_the_control_variates_of_rejected_clients_do_not_advance() -> None:
    """The global c stays the mean of all c_k although one update was left out."""
    free = simulate(method_spec("fedsimclr", method=SCAFFOLD), shards(method_spec("fedsimclr")))
    norms = sorted(found["update_norm"] for found in free.history[0].updates.values())
    robustness = {"max_update_norm": (norms[1] + norms[2]) / 2, "action": "reject"}
    spec = method_spec("fedsimclr", method=SCAFFOLD, num_rounds=1, robustness=robustness)
    result = simulate(spec, shards(spec))
    (record,) = result.history
    (rejected,) = record.rejected
    assert rejected not in result.client_states
    for name, c in result.model.items():
        if name.startswith("control."):
            own = [state[name.replace("control.", "scaffold_own.", 1)] for state in result.client_states.values()]
            torch.testing.assert_close(c, torch.stack(own).sum(dim=0) / 3, rtol=1e-4, atol=1e-6)


def test_the_metrics_of_a_rejected_client_raise_no_alarm() -> None:
    """With `action = "pause"`, a rejected client could otherwise pause a run to which it contributes nothing."""
    free = simulate(method_spec("fedbyol", num_rounds=1), shards(method_spec("fedbyol")))
    norms = sorted(found["update_norm"] for found in free.history[0].updates.values())
    robustness = {"max_update_norm": (norms[1] + norms[2]) / 2, "action": "reject"}
    watch = {"min_effective_rank": 1e6, "min_feature_std": None, "min_embedding_std": None, "first_round": 1}
    spec = method_spec("fedbyol", num_rounds=1, robustness=robustness, watch=watch)
    (record,) = simulate(spec, shards(spec)).history
    alarmed = [alarm.partition(":")[0] for alarm in record.alarms]
    assert alarmed == sorted(record.clients.keys() - set(record.rejected))
    assert len(alarmed) == 2
