"""Runs with `model.trainable`: which bytes are transferred, and patterns that match no parameter.

The API has no torch and cannot know the names, so the aggregator ends such a run before it offers any work.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from fedssl.artifacts.header import file_bytes
from fedssl.client import WorkerClient
from fedssl.methods import METHODS
from fedssl.protocol.states import Outcome, RunState
from fedssl.simulation import simulate
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.dashboard.run.traffic import traffic
from fedssl_coordinator.federation import run_rows
from support.agents import Workers
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.methods import method_spec, shards

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("patterns", [("layer4.*",), ("blocks.0.*", "layer4.*")])
def test_a_pattern_that_matches_nothing_ends_the_run_before_any_work(
    coordinator: Coordinator, patterns: tuple[str, ...]
) -> None:
    worker = coordinator.worker("a")
    model = tiny_spec().model_dump(mode="json")["model"]
    run = coordinator.client.create_run(tiny_spec(model={**model, "trainable": patterns}))
    assert run.state == RunState.RUNNING
    coordinator.advance(run.id)
    ended = coordinator.client.run(run.id)
    assert (ended.state, ended.outcome) == (RunState.FINISHED, Outcome.FAILED)
    assert ended.reason is not None
    assert ended.reason.startswith(
        "model.trainable names layer4.*, which matches no parameter of the encoder: patterns of this encoder are, for "
        "example, blocks.*"
    )
    assert ended.current_round is None
    assert worker.claim(0) is None


def test_transferred_bytes_match_the_plan_and_the_simulation(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client receives the frozen tensors once, and the others in each round. A damaged file is fetched again."""
    model = {"encoder": {"widths": [8, 16]}, "trainable": ["blocks.1.*"]}
    spec = method_spec("fedsimclr", model=model, num_rounds=3)
    plan, sizes = METHODS["fedsimclr"].bind(spec).plan, list[int]()
    download = WorkerClient.download

    def measured(client: WorkerClient, digest: str, path: Path, *args: object) -> None:
        download(client, digest, path, *args)  # type: ignore[arg-type]
        sizes.append(path.stat().st_size)

    monkeypatch.setattr(WorkerClient, "download", measured)
    workers = Workers(coordinator, tmp_path, spec)
    workers.train()
    workers.train()
    result = simulate(spec, shards(spec))
    down, once, up = file_bytes(plan.broadcast), file_bytes(plan.frozen), file_bytes(plan.update)
    assert Counter(sizes) == {down: 3 * 2, once: 3}
    assert sum(sizes) == sum(record.bytes_down for record in result.history[:2]) == 3 * (2 * down + once)
    assert [record.bytes_up for record in result.history] == [3 * up] * 3
    [kept] = (tmp_path / "client-1" / "broadcasts" / "frozen").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    workers.train()
    assert Counter(sizes) == {down: 3 * 3, once: 3 + 1}
    workers.assert_simulated(result)
    run = coordinator.client.run(workers.id)
    assert run.model is not None
    assert run.initial_model is not None
    before, after = coordinator.tensors(run.initial_model), coordinator.tensors(run.model)
    assert before.keys() == after.keys() == {each.name for each in plan.received}
    assert all(torch.equal(before[each.name], after[each.name]) for each in plan.frozen)
    assert coordinator.client.estimate(spec).bytes_in_total in (None, 3 * (3 * (down + up) + once))
    with transaction() as session:
        row = run_rows.get_one(session, workers.id)
        for _ in range(2):  # the first two rounds are added up once, and kept
            assert traffic(session, row) == (9 * up, 9, 3 * (3 * down + once))
