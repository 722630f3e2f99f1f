"""If a client state is missing or damaged, the worker reports it before it trains without the state."""

import pytest

from fedssl.client import Unavailable
from fedssl.engine import run_local_round
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.work import HeartbeatReply, StateLost
from support.tensors import are_equal

from .conftest import CLIENT, WorkerHarness, make_spec
from .coordinator import Refusal


def _lose_the_state(harness: WorkerHarness) -> None:
    """Train and submit the first round, and flip one bit of the state that was stored with it."""
    harness.offer(make_spec(), 1)
    harness.restart().step()
    [state] = (harness.folder / "runs").glob("*/*/state.safetensors")
    content = state.read_bytes()
    state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _reports(harness: WorkerHarness) -> list[StateLost]:
    return [beat.state_lost for beat in harness.coordinator.heartbeats if beat.state_lost is not None]


def test_a_lost_state_is_reported_and_the_client_trains_without_it(harness: WorkerHarness) -> None:
    _lose_the_state(harness)
    harness.offer(make_spec(), 2, harness.sent())
    harness.restart().step()
    assert _reports(harness) == [StateLost(round_number=1, reason="damaged")]
    broadcast = harness.sent(0)
    context = Context(spec=make_spec(), round_number=2, client_id=CLIENT)
    cold = run_local_round(METHODS["fedbyol"], broadcast, None, harness.images.data, context)
    assert are_equal(harness.sent(1), cold.update)


def test_a_missing_state_is_not_reported_for_a_method_without_client_state(harness: WorkerHarness) -> None:
    spec = make_spec(method={"name": "fedsimclr"})
    harness.offer(spec, 1)
    harness.restart().step()
    [state] = (harness.folder / "runs").glob("*/*/state.safetensors")
    state.unlink()
    harness.offer(spec, 2, harness.sent())
    harness.restart().step()
    assert _reports(harness) == []
    assert len(harness.coordinator.submissions) == 2


def test_a_client_does_not_train_without_its_state_if_the_coordinator_pauses_the_run(harness: WorkerHarness) -> None:
    _lose_the_state(harness)
    harness.coordinator.reply = HeartbeatReply(carry_on=False, reason="the run is paused")
    harness.offer(make_spec(), 2, harness.sent())
    harness.restart().step()
    assert len(harness.coordinator.submissions) == 1
    assert harness.coordinator.declined == []
    assert harness.coordinator.leased is not None  # the claim after the pause returns the same work
    harness.coordinator.reply = HeartbeatReply()
    harness.restart().step()
    assert len(harness.coordinator.submissions) == 2


def test_an_update_that_was_trained_without_the_state_is_reported_again_with_the_next_claim(
    harness: WorkerHarness,
) -> None:
    """The coordinator forgets a report at the next claim, because the state may have been restored by then."""
    _lose_the_state(harness)
    harness.offer(make_spec(), 2, harness.sent())

    def away(call: str) -> None:
        if call == "submit":
            raise Refusal("unavailable", 503)

    harness.coordinator.before = away
    with pytest.raises(Unavailable):
        harness.restart().step()
    harness.coordinator.before = lambda call: None
    harness.restart().step()
    assert _reports(harness) == 2 * [StateLost(round_number=1, reason="damaged")]
    assert len(harness.coordinator.submissions) == 2


def test_a_client_does_not_train_until_its_lost_state_could_be_reported(harness: WorkerHarness) -> None:
    _lose_the_state(harness)
    harness.offer(make_spec(), 2, harness.sent())

    def away(call: str) -> None:
        if call == "heartbeat":
            raise Refusal("unavailable", 503)

    harness.coordinator.before = away
    with pytest.raises(Unavailable):
        harness.restart().step()
    assert len(harness.coordinator.submissions) == 1
