"""Run specs: what is accepted is read back unchanged, and invalid values are refused with an explanation."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedssl.protocol.aggregation import AggregationConfig
from fedssl.protocol.base import ClientId, Digest
from fedssl.protocol.data import AugmentationConfig, DataConfig
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.model import EncoderConfig, MLPConfig
from fedssl.protocol.runs import RunName, RunSpec
from fedssl.protocol.training import CohortConfig, OptimizerConfig, Seed, TrainingConfig


def _mistakes(model: Any, values: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    return [(".".join(map(str, error["loc"])), error["msg"]) for error in caught.value.errors()]


def test_an_empty_spec_has_defaults_for_everything() -> None:
    spec = RunSpec()
    assert RunSpec.model_validate({}) == spec
    assert spec.method.name in METHOD_CONFIGS


@given(
    st.builds(
        RunSpec,
        seed=st.integers(0, 2**63 - 1),
        num_rounds=st.integers(1, 100_000),
        training=st.builds(
            TrainingConfig,
            local_epochs=st.integers(0, 10_000),
            optimizer=st.builds(OptimizerConfig, learning_rate=st.floats(1e-300, 100)),
        ),
        cohort=st.builds(
            CohortConfig,
            clients=st.none() | st.lists(st.from_regex(r"\A[a-z0-9]{1,9}\Z"), min_size=1, unique=True).map(tuple),
            fraction=st.floats(1e-300, 1),
            deadline_seconds=st.floats(1e-300, 30 * 86_400),
        ),
    )
)
def test_a_spec_is_read_back_from_json_bit_for_bit(spec: RunSpec) -> None:
    """Simulation and deployment read the same numbers: one through a file, the other through Postgres."""
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunSpec().seed = 1  # type: ignore[misc]


SECTIONS = ["", "model", "model.encoder", "model.projector", "data", "data.augmentation", "training",
            "training.optimizer", "cohort"]  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_a_misspelt_key_of_a_section_is_refused(section: str) -> None:
    values: dict[str, Any] = {"mispelt": 1}
    for name in reversed(section.split(".") if section else []):
        values = {name: values}
    place = f"{section}.mispelt".lstrip(".")
    assert (place, "Extra inputs are not permitted") in _mistakes(RunSpec, values)


@pytest.mark.parametrize("name", sorted(METHOD_CONFIGS))
def test_a_misspelt_key_of_a_method_is_refused(name: str) -> None:
    mistakes = _mistakes(RunSpec, {"method": {"name": name, "mispelt": 1}})
    assert (f"method.{name}.mispelt", "Extra inputs are not permitted") in mistakes


def test_an_unknown_method_is_refused_with_a_list_of_methods() -> None:
    [(place, message)] = _mistakes(RunSpec, {"method": {"name": "fedmagic"}})
    assert place == "method"
    assert all(f"'{name}'" in message for name in METHOD_CONFIGS)


@pytest.mark.parametrize(
    ("fraction", "num_batches", "num_steps"),
    [(1, 7, 7), (0.5, 7, 4), (0.29, 50, 15), (1 / 3, 15, 5), (1e-9, 7, 1), (0.5, 1, 1)],
)
def test_a_fraction_of_an_epoch_is_rounded_half_up_to_at_least_one_step(
    fraction: float, num_batches: int, num_steps: int
) -> None:
    assert TrainingConfig(epoch_fraction=fraction).num_steps(num_batches) == num_steps


def test_whole_epochs_are_serialised_as_before() -> None:
    assert "epoch_fraction" not in TrainingConfig().model_dump(mode="json")
    assert TrainingConfig(local_epochs=3, epoch_fraction=0.5).num_epochs == 1.5


IMPOSSIBLE: list[tuple[Any, dict[str, Any], str]] = [
    (CohortConfig, {"clients": []}, "cohort.clients is empty: name the clients, or leave it out for all of them"),
    (CohortConfig, {"clients": ["a", "b", "a"]}, "cohort.clients names a client twice"),
    (CohortConfig, {"clients": ["a"], "min_clients": 2}, "cohort.min_clients is larger than the list"),
    (CohortConfig, {"fraction": 1.01}, "less than or equal to 1"),
    (CohortConfig, {"lease_seconds": 1.9}, "greater than or equal to 2"),
    (CohortConfig, {"max_attempts": 0}, "greater than or equal to 1"),
    (CohortConfig, {"without_quorum": "retry"}, "'fail' or 'skip'"),
    (CohortConfig, {"deadline_seconds": float("inf")}, "finite number"),
    (TrainingConfig, {"batch_size": 1}, "greater than or equal to 2"),
    (TrainingConfig, {"precision": "fp8"}, "'fp32' or 'bf16'"),
    (OptimizerConfig, {"momentum": 1}, "less than 1"),
    (OptimizerConfig, {"learning_rate": float("nan")}, "finite number"),
    (OptimizerConfig, {"weight_decay": -1e-9}, "greater than or equal to 0"),
    (DataConfig, {"channels": 3, "std": [1.0]}, "data.std needs 3 values, one per channel; got 1"),
    (DataConfig, {"channels": 1, "std": [0.0]}, "greater than 0"),
    (DataConfig, {"image_size": 7}, "greater than or equal to 8"),
    (AugmentationConfig, {"min_scale": 0.9, "max_scale": 0.5}, "min_scale must not exceed"),
    (AugmentationConfig, {"blur_sigma": [2.0, 1.0]}, "the smaller first"),
    (AugmentationConfig, {"blur_sigma": [0.0, 1.0]}, "two positive numbers"),
    (AugmentationConfig, {"flip": 1.5}, "less than or equal to 1"),
    (EncoderConfig, {"widths": []}, "at least 1 item"),
    (EncoderConfig, {"widths": [0]}, "greater than or equal to 1"),
    (MLPConfig, {"hidden_dims": [8] * 5}, "at most 4 items"),
]


@pytest.mark.parametrize(("model", "values", "what"), IMPOSSIBLE)
def test_impossible_values_are_refused(model: Any, values: dict[str, Any], what: str) -> None:
    assert any(what in message for _, message in _mistakes(model, values))


def _takes(kind: Any, value: object) -> bool:
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", ["a", "0", "a-b", "a" * 63, "client-1", "1-a"])
def test_valid_names_of_clients_are_accepted(name: str) -> None:
    assert _takes(ClientId, name)


@pytest.mark.parametrize(
    "name", ["", "-", "-a", "a-", "A", "a_b", "a.b", "a b", "ä", "a" * 64, "a\n", "\na", "a\x00", "a/b", "٣", 1, None]
)
def test_invalid_names_of_clients_are_refused(name: object) -> None:
    assert not _takes(ClientId, name)


@pytest.mark.parametrize("digest", ["0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", "٣" * 64, 0])
def test_invalid_digests_are_refused(digest: object) -> None:
    assert not _takes(Digest, digest)
    assert _takes(Digest, "0123456789abcdef" * 4)


@pytest.mark.parametrize("name", ["unnamed", "SSD alpha=0.1".replace("=", "-"), "a", "9 lives", "x" * 100, "a.b+c_d-e"])
def test_valid_names_of_runs_are_accepted(name: str) -> None:
    assert _takes(RunName, name)


@pytest.mark.parametrize("name", ["", " a", "-a", "x" * 101, "a\n", "a\tb", "a/b", "<b>", "é", "a\u202e"])
def test_invalid_names_of_runs_are_refused(name: str) -> None:
    assert not _takes(RunName, name)


@pytest.mark.parametrize(("seed", "fits"), [(0, True), (2**63 - 1, True), (2**63, False), (-1, False), (0.5, False)])
def test_seeds_are_integers_from_zero_to_2_63_minus_1(seed: object, fits: bool) -> None:  # noqa: FBT001
    assert _takes(Seed, seed) == fits


@pytest.mark.parametrize(
    ("values", "later"),
    [
        ({"method": {"name": "fedalignuniform"}}, {"method": {"views": "separate"}}),
        (
            {"method": {"name": "flesd"}, "public_data": {"dataset": "cifar10"}},
            {"method": {"views": "separate"}},
        ),
        ({"evaluation": {"dataset": "cifar10"}}, {"evaluation": {"embedding_map": "pca"}}),
    ],
)
def test_newer_keys_are_serialised_only_if_they_differ_from_their_defaults(
    values: dict[str, Any], later: dict[str, Any]
) -> None:
    """A worker or coordinator of the previous version refuses keys that it does not know."""
    [(part, changes)] = later.items()
    [key] = changes
    spec = RunSpec.model_validate(values)
    assert key not in spec.model_dump(mode="json")[part]
    changed = RunSpec.model_validate(values | {part: values[part] | changes})
    assert changed.model_dump(mode="json")[part][key] == changes[key]
    assert RunSpec.model_validate_json(changed.model_dump_json()) == changed


def test_secure_aggregation_is_left_out_of_a_spec_without_it() -> None:
    assert "secure_aggregation" not in RunSpec().model_dump(mode="json")
    secure = RunSpec.model_validate({"aggregation": {"arithmetic": "fixed"}, "secure_aggregation": {}})
    assert secure.model_dump(mode="json")["secure_aggregation"] == {"min_cohort": 5, "collusion": 1}
    assert RunSpec.model_validate_json(secure.model_dump_json()) == secure


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"aggregation": {"arithmetic": "float"}}, 'set aggregation.arithmetic = "fixed"'),
        (
            {"method": {"name": "fedu2"}, "aggregation": {}},
            "method.reducer eua compares each update with every other one; choose another",
        ),
        ({"method": {"name": "single"}}, "single sends no tensors here, so there is no sum"),
        ({"robustness": {"max_update_norm": 1.0, "action": "reject"}}, "so that no one can reject it"),
        (
            {"aggregation": {"arithmetic": "fixed", "server_optimizer": {"name": "fedadam", "learning_rate": 0.01}}},
            "aggregation.server_optimizer cannot be combined with it yet",
        ),
        ({"cohort": {"clients": list("abcdefgh"), "fraction": 0.5}}, "a round wants 4 of the 8 clients, fewer than"),
        (
            {"evaluation": {"dataset": "digits", "at": "both", "sites": {"classes": ["a", "b"]}}},
            'set evaluation.at = "coordinator"',
        ),
        ({"secure_aggregation": {"min_cohort": 3, "collusion": 2}}, "a sum needs 4 updates or more"),
        ({"secure_aggregation": {"min_cohort": 2}}, "greater than or equal to 3"),
        ({"aggregation": {"matrix_bits": 32}}, 'matrix_bits applies to integers: set aggregation.arithmetic = "fixed"'),
    ],
)
def test_settings_that_secure_aggregation_does_not_support_are_refused(changes: dict[str, Any], why: str) -> None:
    sections = {"aggregation": {"arithmetic": "fixed"}, "secure_aggregation": {}}
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate({**sections, **changes})
    assert why in str(refused.value)


def test_clipping_can_be_combined_with_secure_aggregation() -> None:
    sections = {"aggregation": {"arithmetic": "fixed"}, "secure_aggregation": {}}
    assert RunSpec.model_validate({**sections, "robustness": {"max_update_norm": 1.0}}).secure_aggregation
    assert RunSpec.model_validate({**sections, "robustness": {"action": "reject"}}).secure_aggregation


def test_float_arithmetic_is_left_out_of_a_serialised_spec() -> None:
    assert "aggregation" not in RunSpec().model_dump(mode="json")
    assert "aggregation" not in RunSpec(aggregation=AggregationConfig(arithmetic="float")).model_dump(mode="json")
    fixed = RunSpec(aggregation=AggregationConfig(arithmetic="fixed"))
    assert fixed.model_dump(mode="json")["aggregation"] == {"arithmetic": "fixed"}
    assert RunSpec.model_validate_json(fixed.model_dump_json()) == fixed
