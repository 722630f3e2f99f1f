"""If a client state is missing or damaged, the worker reports it before it trains without the state."""

import pytest

from fedssl.client import Unavailable
from fedssl.engine import run_local_round
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.work import HeartbeatReply, StateLost
from support.tensors import are_equal

from .conftest import CLIENT, Setting, make_spec
from .coordinator import Refusal


def _lose_the_state(setting: Setting) -> None:
    """Train and submit the first round, and flip one bit of the state that was stored with it."""
    setting.offer(make_spec(), 1)
    setting.restart().step()
    [state] = (setting.folder / "runs").glob("*/*/state.safetensors")
    content = state.read_bytes()
    state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _reports(setting: Setting) -> list[StateLost]:
    return [beat.state_lost for beat in setting.coordinator.heartbeats if beat.state_lost is not None]


def test_a_lost_state_is_reported_and_the_client_trains_without_it(setting: Setting) -> None:
    _lose_the_state(setting)
    setting.offer(make_spec(), 2, setting.sent())
    setting.restart().step()
    assert _reports(setting) == [StateLost(round_number=1, reason="damaged")]
    broadcast = setting.sent(0)
    context = Context(spec=make_spec(), round_number=2, client_id=CLIENT)
    cold = run_local_round(METHODS["fedbyol"], broadcast, None, setting.images.data, context)
    assert are_equal(setting.sent(1), cold.update)


def test_a_missing_state_is_not_reported_for_a_method_without_client_state(setting: Setting) -> None:
    spec = make_spec(method={"name": "fedsimclr"})
    setting.offer(spec, 1)
    setting.restart().step()
    [state] = (setting.folder / "runs").glob("*/*/state.safetensors")
    state.unlink()
    setting.offer(spec, 2, setting.sent())
    setting.restart().step()
    assert _reports(setting) == []
    assert len(setting.coordinator.submissions) == 2


def test_a_client_does_not_train_without_its_state_if_the_coordinator_pauses_the_run(setting: Setting) -> None:
    _lose_the_state(setting)
    setting.coordinator.reply = HeartbeatReply(carry_on=False, reason="the run is paused")
    setting.offer(make_spec(), 2, setting.sent())
    setting.restart().step()
    assert len(setting.coordinator.submissions) == 1
    assert setting.coordinator.declined == []
    assert setting.coordinator.leased is not None  # the claim after the pause returns the same work
    setting.coordinator.reply = HeartbeatReply()
    setting.restart().step()
    assert len(setting.coordinator.submissions) == 2


def test_an_update_that_was_trained_without_the_state_is_reported_again_with_the_next_claim(setting: Setting) -> None:
    """The coordinator forgets a report at the next claim, because the state may have been restored by then."""
    _lose_the_state(setting)
    setting.offer(make_spec(), 2, setting.sent())

    def away(call: str) -> None:
        if call == "submit":
            raise Refusal("unavailable", 503)

    setting.coordinator.before = away
    with pytest.raises(Unavailable):
        setting.restart().step()
    setting.coordinator.before = lambda call: None
    setting.restart().step()
    assert _reports(setting) == 2 * [StateLost(round_number=1, reason="damaged")]
    assert len(setting.coordinator.submissions) == 2


def test_a_client_does_not_train_until_its_lost_state_could_be_reported(setting: Setting) -> None:
    _lose_the_state(setting)
    setting.offer(make_spec(), 2, setting.sent())

    def away(call: str) -> None:
        if call == "heartbeat":
            raise Refusal("unavailable", 503)

    setting.coordinator.before = away
    with pytest.raises(Unavailable):
        setting.restart().step()
    assert len(setting.coordinator.submissions) == 1
