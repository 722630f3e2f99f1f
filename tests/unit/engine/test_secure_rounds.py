"""Secure rounds through the protocol's objects have the bits of plain fixed point, whichever clients are lost."""

from typing import Any

import pytest
import torch

from fedssl.engine import run_aggregation, start_run
from fedssl.engine.aggregation import ServerResult
from fedssl.engine.secure_rounds import Phase, run_secure_round
from fedssl.engine.secure_sums import NoSecureSum, client_words, num_client_words, run_secure_aggregation
from fedssl.engine.summed_metrics import NUM_WORDS
from fedssl.errors import MethodError
from fedssl.methods import METHODS
from fedssl.methods.api import Metrics, Update
from fedssl.protocol.runs import RunSpec
from fedssl.secure_aggregation import SecureServer
from fedssl.secure_aggregation.messages import MaskedVector
from support.methods import context, method_spec
from support.tensors import are_equal

FIXED: dict[str, Any] = {"aggregation": {"arithmetic": "fixed"}}
SECURE: dict[str, Any] = {**FIXED, "secure_aggregation": {"min_cohort": 3, "collusion": 1}}
NAMES = tuple("abcdef")
PHASES: tuple[Phase, ...] = ("keys", "shares", "vectors", "confirmations", "reveals")


class Cohort:
    """Six clients with updates near the first broadcast, and different numbers of images."""

    def __init__(self, name: str = "fedsimclr", **changes: Any) -> None:
        self.spec = method_spec(name, **SECURE, **changes)
        self.method, self.ctx = METHODS[name], context(self.spec, 1)
        first = start_run(self.method, context(self.spec, 0))
        self.state, self.broadcast = first.state, first.broadcast
        self.metrics: dict[str, Metrics] = {}
        plan = self.method.bind(self.spec).plan
        self.sent = {
            client: {t.name: self._tensor(t.name, t.shape, seed) for t in plan.update}
            for seed, client in enumerate(NAMES)
        }

    def _tensor(self, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        base = self.broadcast.get(name, torch.zeros(shape))
        if not base.is_floating_point():
            return base + seed
        return base + 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(name)))

    def updates(self, names: tuple[str, ...] = NAMES) -> list[Update]:
        return [
            Update(name, 10 + 7 * NAMES.index(name), lambda name=name: self.sent[name], self.metrics.get(name, {}))  # type: ignore[misc]
            for name in names
        ]

    def plain(self, names: tuple[str, ...]) -> ServerResult:
        spec: RunSpec = self.spec.model_copy(update={"secure_aggregation": None})
        return run_aggregation(self.method, self.state, self.updates(names), context(spec, 1))

    def secure(self, lost: dict[str, Phase] | None = None) -> Any:
        return run_secure_round(self.method, self.state, self.broadcast, self.updates(), self.ctx, lost=lost)


@pytest.mark.parametrize("method", ["fedsimclr", "ldawa", "scaffold", "fedrlc"])
def test_a_secure_round_has_the_bits_of_a_plain_one(method: str) -> None:
    reducer = {"method": {"name": "ldawa", "reducer": {"name": "ldawa", "num_plain_rounds": 0}}}
    cohort = Cohort(method, **(reducer if method == "ldawa" else {}))
    found = cohort.secure()
    assert (found.survivors, found.rejected) == (NAMES, ())
    assert are_equal(found.result.state, cohort.plain(NAMES).state)
    assert not are_equal(found.result.broadcast, cohort.broadcast)


def test_tensors_sent_next_to_the_sum_are_those_of_the_survivors() -> None:
    cohort = Cohort("orchestra")
    found, survivors = cohort.secure({"e": "vectors"}), tuple("abcdf")
    expected = cohort.plain(survivors).state
    assert are_equal(found.result.state, expected)
    assert not torch.equal(expected["global_centroids"], cohort.plain(NAMES).state["global_centroids"])
    wrong = {name: {"local_centroids": cohort.sent[name]["local_centroids"].clone()} for name in survivors}
    wrong["d"]["local_centroids"][0, 0] = float("inf")
    size = num_client_words(cohort.method, cohort.ctx)
    with pytest.raises(NoSecureSum, match="local_centroids of d, which leaves next to the sum, is not finite"):
        run_secure_aggregation(
            cohort.method, cohort.state, torch.ones(size, dtype=torch.int64), 5, cohort.ctx, apart=wrong
        )


@pytest.mark.full(but=5)
@pytest.mark.parametrize("first", PHASES)
@pytest.mark.parametrize("second", PHASES)
def test_clients_lost_in_any_two_phases_leave_the_plain_result_of_the_survivors(first: Phase, second: Phase) -> None:
    cohort = Cohort()
    lost: dict[str, Phase] = {"b": first, "e": second}
    found = cohort.secure(lost)
    late = ("confirmations", "reveals")  # after the vector was sent
    survivors = tuple(name for name in NAMES if name not in lost or lost[name] in late)
    assert found.survivors == survivors
    assert are_equal(found.result.state, cohort.plain(survivors).state)


@pytest.mark.parametrize("phase", PHASES)
def test_too_many_lost_clients_leave_no_sum(phase: Phase) -> None:
    cohort = Cohort()
    with pytest.raises(NoSecureSum):
        cohort.secure(dict.fromkeys("abcd", phase))


def test_fewer_than_min_cohort_or_min_updates_leave_no_sum() -> None:
    cohort = Cohort(cohort={"min_clients": 3, "min_updates": 6})
    with pytest.raises(NoSecureSum, match="5 clients are fewer than the 6 that a sum must have"):
        cohort.secure({"a": "vectors"})


def test_an_unusable_update_is_not_sent_by_its_client() -> None:
    cohort = Cohort()
    next(iter(cohort.sent["c"].values())).view(-1)[0] = float("nan")
    found = cohort.secure()
    assert found.rejected == ("c",)
    assert found.survivors == tuple("abdef")
    assert are_equal(found.result.state, cohort.plain(NAMES).state)  # the plain round leaves it out as well


def test_an_update_with_a_value_out_of_range_is_left_out_as_in_a_plain_round() -> None:
    cohort = Cohort()
    name = next(name for name, tensor in cohort.sent["c"].items() if tensor.is_floating_point())
    cohort.sent["c"][name].view(-1)[0] = 1e9
    plain = cohort.plain(NAMES)
    assert plain.norms.rejected.keys() == {"c"}
    found = cohort.secure()
    assert (found.rejected, found.survivors) == (("c",), tuple("abdef"))
    assert are_equal(found.result.state, plain.state)


def test_each_client_clips_its_own_update_with_the_bits_of_a_plain_round() -> None:
    cohort = Cohort(robustness={"max_update_norm": 0.2})
    next(iter(cohort.sent["c"].values())).view(-1)[0] += 50
    plain = cohort.plain(NAMES)
    assert "c" in plain.norms.clipped
    assert are_equal(cohort.secure().result.state, plain.state)


def test_masked_vectors_of_equal_updates_share_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unmasked vectors of equal updates would be equal, and so would the vectors of two rounds with the same keys."""
    seen: list[Any] = []
    add = SecureServer.add_vector

    def spy(server: SecureServer, vector: MaskedVector) -> None:
        seen.append(vector.words)
        add(server, vector)

    monkeypatch.setattr(SecureServer, "add_vector", spy)
    cohort = Cohort()
    cohort.sent = dict.fromkeys(NAMES, cohort.sent["a"])
    cohort.secure()
    cohort.secure()
    assert len(seen) == 12
    for place, one in enumerate(seen):
        assert not any((one == other).any() for other in seen[:place])


def test_a_sum_of_the_wrong_size_or_of_weight_zero_is_refused() -> None:
    cohort = Cohort()
    for size, why in ((NUM_WORDS + 3, "was cut to 3"), (100_000, "words more than the method's means")):
        with pytest.raises(MethodError, match=why):
            run_secure_aggregation(cohort.method, cohort.state, torch.ones(size, dtype=torch.int64), 6, cohort.ctx)
    with pytest.raises(MethodError, match="add up to 0: it must be positive"):
        run_secure_aggregation(cohort.method, cohort.state, torch.zeros(100_000, dtype=torch.int64), 6, cohort.ctx)


def test_each_client_caps_its_own_weight_with_the_bits_of_a_plain_round() -> None:
    cohort = Cohort(robustness={"max_examples": 20})  # of 10, 17, 24, 31, 38 and 45 images
    found = cohort.secure({"f": "vectors"})
    assert are_equal(found.result.state, cohort.plain(tuple("abcde")).state)
    assert not are_equal(found.result.state, Cohort().plain(tuple("abcde")).state)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (33, None),  # above the cap, which the sum does not show
        (34, "the weights of 6 clients add up to 121, and robustness.max_examples allows 120"),
        (-87, "add up to 0: it must be positive"),
    ],
)
def test_weights_above_the_cap_are_detected_once_the_sum_exceeds_all_caps(weight: int, why: str | None) -> None:
    cohort = Cohort(robustness={"max_examples": 20})  # the others have weights of 10, 17, and three times 20
    vectors = {
        update.client_id: client_words(cohort.method, cohort.broadcast, update, 6, cohort.ctx)
        for update in cohort.updates()
    }
    assert int(vectors["f"][NUM_WORDS]) == 20
    vectors["f"][NUM_WORDS] = weight
    total = torch.stack(list(vectors.values())).sum(0)
    if why is None:
        run_secure_aggregation(cohort.method, cohort.state, total, 6, cohort.ctx)
        return
    with pytest.raises(NoSecureSum, match=why):
        run_secure_aggregation(cohort.method, cohort.state, total, 6, cohort.ctx)


def test_the_sum_has_the_mean_loss_and_counts_of_clipped_updates_and_crossed_thresholds() -> None:
    cohort = Cohort(robustness={"max_update_norm": 0.2}, watch={"min_feature_std": 0.5, "first_round": 1})
    next(iter(cohort.sent["c"].values())).view(-1)[0] += 50
    losses = {"loss": 1.5, "feature_std": 0.6}
    cohort.metrics = dict.fromkeys(NAMES, losses) | {"b": {"loss": -2.0, "feature_std": 0.4}}
    metrics = cohort.secure({"a": "vectors"}).result.metrics
    weights = {name: 10 + 7 * NAMES.index(name) for name in "bcdef"}
    total = sum(weights.values())
    assert metrics["num_examples"] == total
    assert metrics["loss"] == pytest.approx((1.5 * (total - weights["b"]) - 2 * weights["b"]) / total, abs=1e-8)
    assert metrics["num_crossed/feature_std"] == 1
    assert metrics["num_clipped"] >= 1
    assert "effective_rank" not in metrics


def test_only_a_client_of_the_cohort_can_be_lost() -> None:
    with pytest.raises(ValueError, match="z cannot be lost, because it is not in the cohort"):
        Cohort().secure({"z": "keys"})
