"""The assignment of dimensions to clients."""

import pytest

from fedssl.dimensions import assign_dimensions, client_dimensions
from fedssl.engine import LocalResult, run_local_round
from fedssl.errors import SpecError
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulator
from support.methods import method_spec, shards

WIDE = {"encoder": {"widths": [8, 16]}, "projector": {"hidden_dims": [16], "out_dim": 16}}


@pytest.mark.parametrize(("width", "num_clients", "share"), [(512, 10, 51), (512, 50, 10), (16, 3, 5), (3, 3, 1)])
def test_shares_are_disjoint_and_of_equal_size(width: int, num_clients: int, share: int) -> None:
    slots = assign_dimensions(17, width, num_clients)
    assert len(slots) == num_clients
    assert {len(slot) for slot in slots} == {share}
    assert all(list(slot) == sorted(slot) for slot in slots)
    together = [dimension for slot in slots for dimension in slot]
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(width))


def test_the_assignment_depends_only_on_the_seed() -> None:
    assert assign_dimensions(1, 64, 4) == assign_dimensions(1, 64, 4)
    assert assign_dimensions(1, 64, 4) != assign_dimensions(2, 64, 4)


def test_more_clients_than_dimensions_are_refused() -> None:
    with pytest.raises(SpecError, match="16 dimensions cannot give each of 17 clients"):
        assign_dimensions(0, 16, 17)


def _spec(add_on: dict[str, object]) -> RunSpec:
    return method_spec("fedalignuniform", method={"name": "fedalignuniform", "add_ons": [add_on]}, model=WIDE)


def test_clients_take_slots_in_name_order() -> None:
    spec = _spec({"name": "dsr"})
    slots = assign_dimensions(spec.seed, 16, 3)
    assert client_dimensions(spec, ["c", "a", "b"]) == {"a": slots[0], "b": slots[1], "c": slots[2]}
    spare = _spec({"name": "hsd", "num_clients": 5})
    assert list(client_dimensions(spare, "ab").values()) == assign_dimensions(spec.seed, 16, 5)[:2]
    assert client_dimensions(method_spec("fedsimclr"), "ab") == {}
    with pytest.raises(SpecError, match="among 2 clients, but there are 3"):
        client_dimensions(_spec({"name": "dsr", "num_clients": 2}), "abc")


def test_the_width_is_that_of_the_embeddings_that_the_losses_compare() -> None:
    spec = _spec({"name": "dsr"})
    assert spec.method.embedding_width(spec.model) == 16
    bare = method_spec(
        "fedalignuniform",
        method={"name": "fedalignuniform", "add_ons": [{"name": "dsr"}]},
        model={"encoder": {"name": "resnet18"}, "projector": None},
    )
    wanted = bare.method.dimensions_wanted(bare.model)
    assert wanted is not None
    assert (wanted.width, wanted.num_clients) == (512, None)


def test_in_simulation_each_client_keeps_its_dimensions_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[int, str], tuple[int, ...] | None] = {}

    def spy(method, broadcast, state, data, ctx, on_progress) -> LocalResult:  # type: ignore[no-untyped-def]
        seen[ctx.round_number, ctx.client_id] = ctx.dimensions
        return run_local_round(method, broadcast, state, data, ctx, on_progress)

    monkeypatch.setattr(simulator, "run_local_round", spy)
    spec = method_spec("ssd", seed=0, num_rounds=3, cohort={"min_clients": 3, "fraction": 0.67})
    simulator.simulate(spec, shards(spec))
    owned = client_dimensions(spec, shards(spec))
    assert {client for _, client in seen} == set(owned)
    assert all(dimensions == owned[client] for (_, client), dimensions in seen.items())


def test_simulation_refuses_more_clients_than_slots() -> None:
    spec = _spec({"name": "dsr", "num_clients": 2})
    with pytest.raises(SpecError, match="raise num_clients"):
        simulator.simulate(spec, shards(spec))
