"""Simulations with secure aggregation: the bits of the same spec without masks, and rounds without a sum."""

from typing import Any

import pytest

from fedssl.cli.dry_run import traffic_of
from fedssl.errors import SpecError
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.tensors import are_equal

FIXED: dict[str, Any] = {
    "aggregation": {"arithmetic": "fixed"},
    "partition": {"dataset": "digits", "num_clients": 5, "alpha": 1.0, "max_images": 250},
}


def _spec(method: str, **changes: Any) -> RunSpec:
    return method_spec(method, **{**FIXED, "secure_aggregation": {"min_cohort": 3, "collusion": 0}, **changes})


def test_a_run_with_lost_clients_has_the_bits_of_one_without_their_updates() -> None:
    spec, plain = _spec("fedbyol"), method_spec("fedbyol", **FIXED)
    a, b, c, d, e = sorted(shards(spec))
    secure = simulate(spec, shards(spec), lost_clients={1: {a: "vectors"}, 2: {b: "confirmations", c: "keys"}})
    expected = simulate(plain, shards(plain), cohorts={1: [b, c, d, e], 2: [a, b, d, e]})
    assert are_equal(secure.model, expected.model)
    assert secure.client_states.keys() == expected.client_states.keys()
    assert all(are_equal(secure.client_states[name], expected.client_states[name]) for name in secure.client_states)
    for found, wanted in zip(secure.history, expected.history, strict=True):
        assert (found.clients, found.loss, found.num_examples) == (wanted.clients, wanted.loss, wanted.num_examples)
        assert (found.skipped, found.updates, found.unusual) == (None, {}, ())
    assert secure.history[0].bytes_up == 5 * _up(spec) > expected.history[0].bytes_up


def test_a_lost_state_restarts_the_others_once_an_update_of_its_client_is_in_the_sum() -> None:
    spec, plain = _spec("scaffold", num_rounds=4), method_spec("scaffold", num_rounds=4, **FIXED)
    a, *others = sorted(shards(spec))
    secure = simulate(spec, shards(spec), lost_states={2: [a]}, lost_clients={2: {a: "vectors"}})
    expected = simulate(plain, shards(plain), lost_states={3: [a]}, cohorts={2: others})
    assert are_equal(secure.model, expected.model)
    assert all(are_equal(secure.client_states[name], expected.client_states[name]) for name in shards(spec))
    assert not are_equal(secure.model, simulate(plain, shards(plain), cohorts={2: others}).model)


def _up(spec: RunSpec) -> int:
    traffic = traffic_of(spec)
    assert traffic is not None
    return traffic.up


def test_a_round_without_a_sum_is_skipped_and_changes_no_client_state() -> None:
    spec = _spec("fedbyol", num_rounds=1)
    result = simulate(spec, shards(spec), lost_clients={1: dict.fromkeys(sorted(shards(spec))[:3], "shares")})
    assert result.history[0].skipped == ("2 clients sent shares: 2 clients are fewer than the 3 that a sum must have")
    assert are_equal(result.model, result.initial)
    assert result.client_states == {}


def test_32_bit_matrices_have_the_bits_of_plain_runs_and_64_bits_after_a_skipped_round() -> None:
    changes: dict[str, Any] = {"num_rounds": 4, "aggregation": {"arithmetic": "fixed", "matrix_bits": 32}}
    spec, plain = _spec("fedbyol", **changes), method_spec("fedbyol", **{**FIXED, **changes})
    names = sorted(shards(spec))
    lost = {2: {names[0]: "vectors"}, 3: dict.fromkeys(names[:3], "shares")}
    secure = simulate(spec, shards(spec), lost_clients=lost)  # type: ignore[arg-type]
    expected = simulate(plain, shards(plain), cohorts={2: names[1:], 3: []})
    assert are_equal(secure.model, expected.model)
    assert are_equal(secure.server_state, expected.server_state)
    first, second, third, fourth = (record.bytes_up for record in secure.history)
    assert first == fourth == 5 * _up(spec)
    assert second == third < 0.6 * first
    wide = simulate(method_spec("fedbyol", **FIXED), shards(plain), cohorts={2: names[1:]})
    assert not are_equal(wide.model, simulate(plain.model_copy(update={"num_rounds": 2}), shards(plain)).model)


def test_a_min_cohort_above_the_number_of_clients_is_refused() -> None:
    spec = _spec("fedsimclr", secure_aggregation={"min_cohort": 6})
    with pytest.raises(SpecError, match="min_cohort is 6, more than the 5 clients of a cohort of these 5"):
        simulate(spec, shards(spec))


def test_a_simulation_without_the_package_cryptography_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    spec = _spec("fedsimclr")
    with pytest.raises(SpecError, match=r"needs the package cryptography: pip install 'fedssl\[secure\]'"):
        simulate(spec, shards(spec))
