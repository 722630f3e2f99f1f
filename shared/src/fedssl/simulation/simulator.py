"""A whole federation on one machine, with the same engine. On one CPU thread, it gives the same bits as a
deployment."""

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.data import ImageData
from fedssl.data.image_cache.build import CachedData
from fedssl.data.partitioning import require_images
from fedssl.engine import LocalProgress, LocalResult, release_trainer, run_local_round
from fedssl.engine.devices import devices_of, memory_errors_explained, require_device
from fedssl.errors import Paused, ResultsError, SpecError
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, ClientState, Context
from fedssl.methods.site_data import client_data
from fedssl.models.start_files import read_start, with_digest
from fedssl.parallel.pool import ClientProcesses
from fedssl.protocol.explanation import spec_of
from fedssl.protocol.runs import RunSpec
from fedssl.simulation.evaluations import CentralEvaluator, OnEvaluation, OnJudging, SiteEvaluator
from fedssl.simulation.federation import Federation, OnDistillation, OnProgress, OnTrained
from fedssl.simulation.inputs import (
    evaluation_images,
    fingerprint,
    participants,
    partition,
    public_images,
    require_masks,
    require_own_shape,
)
from fedssl.simulation.results import Checkpoint, Result, RoundRecord

if TYPE_CHECKING:
    from fedssl.engine.secure_rounds import Phase


def simulate(
    spec: RunSpec | Mapping[str, Any],
    clients: Mapping[str, ImageData | CachedData] | None = None,
    *,
    public: ImageData | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
    jobs: int = 1,
    checkpoint: Checkpoint | None = None,
    cohorts: Mapping[int, Sequence[str]] | None = None,
    lost_states: Mapping[int, Collection[str]] | None = None,
    lost_clients: Mapping[int, Mapping[str, "Phase"]] | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    on_progress: OnProgress = lambda number, client, progress: None,
    on_distillation: OnDistillation = lambda number, progress: None,
    on_judging: OnJudging = lambda number, what, share: None,
    on_evaluation: OnEvaluation = lambda number, measures: None,
    on_trained: OnTrained | None = None,
) -> Result:
    """Train `spec` on the images of `clients` (name to images), or on those of `spec.partition` if that is None.

    `spec`: a RunSpec, or its keys and values as in a spec file. `public`: the images that every client holds, in place
    of those that `spec.public_data` names, and as many (FLESD's experiments make one client's images public). `jobs`:
    the number of processes that train clients; above 1, this process only aggregates, and `cuda` means all GPUs. On a
    CPU the bits do not depend on it. `checkpoint`: read at the start and written after every round; a simulation that
    is run again continues from there, to the same bits. `cohorts`: the clients whose updates were accepted, by round,
    for a deployed run in which some rounds did not have every update (no clients: the round was skipped); with them the
    simulation gives that run's bits. `lost_states`: the clients that had lost their state before a round, by round;
    they start cold until one of their updates is used, as in a deployed run that has the event `client.state_lost`, and
    refuse evaluations that need it. (A deployed site may also refuse that of the round before, if it lost it earlier.)
    `lost_clients`: the clients that are lost in a round of a spec with `secure_aggregation`, each with the phase in
    which it is lost (`engine.secure_rounds.Phase`). If the spec has an evaluation, the encoder is evaluated
    accordingly, also before training. If the spec has `model.initial`, its file is read, and the digest of its weights
    is in the result's spec.

    `on_progress(round, client, progress)` is called about twice a second, `on_distillation(round, progress)` after
    every epoch of a training on the coordinator, `on_judging(round, what, share or None)` while an encoder is evaluated
    and `on_evaluation(round, measures)` after that. `on_trained(round, client, model)` receives the broadcast's tensors
    with the values that a client has trained, before the checkpoint of the round is written. Raises SpecError,
    DataError, DeviceError, MethodError, ResultsError if the images are not those of the checkpoint, LocalError
    if one of the processes was killed, and Paused if the spec's watch asks for it.
    """
    spec = spec_of(spec)
    if jobs < 1:
        raise SpecError(f"jobs is {jobs}: give the number of processes that train clients, 1 or more")
    if (start := read_start(spec)) is not None:
        spec = with_digest(spec, start)
    require_device(device)
    shards = clients if clients is not None else partition(spec, data_root)
    names = participants(spec.cohort, shards)
    require_masks(spec, len(names))
    with memory_errors_explained(device, spec.training.batch_size):
        on_device = public_images(spec, public, data_root, device)
    everywhere = Context(spec=spec, round_number=0, device=torch.device(device), public=on_device)
    labelled = evaluation_images(spec, data_root)  # before training, so that a missing one does not end a run later
    central = CentralEvaluator(spec, labelled, device, on_judging, on_evaluation)
    require_images(shards, names)
    own = {name: shards[name] for name in names}
    sites = SiteEvaluator(spec, own, device, on_judging)
    for name in names:
        require_own_shape(f"the images of {name}", shards[name], spec)
    sizes = {name: len(shards[name]) for name in names}
    images = "" if checkpoint is None else fingerprint(own, labelled, on_device)
    saved = None if checkpoint is None else checkpoint.load(spec)
    # Until 27 November 2026, the digest left out the images of the evaluation.
    if saved and saved.images not in ("", images) and saved.images != fingerprint(own, None, on_device):
        raise ResultsError(
            "the images of the clients or of the evaluation have changed since the simulation was interrupted: start "
            "again with --restart, or take another folder"
        )
    num_processes = min(jobs, spec.cohort.num_wanted(len(names)))
    with contextlib.ExitStack() as stack:
        data = {name: client_data(shards[name], spec, name) for name in names}
        if num_processes > 1:
            devices = devices_of(device, num_processes)
            train = stack.enter_context(ClientProcesses(spec, data, everywhere.public, devices)).train
            del data, shards, own  # the processes share a copy
        else:
            with memory_errors_explained(device, spec.training.batch_size):
                data = {name: each.to(device) for name, each in data.items()}
            train = functools.partial(_train_here, data)
            stack.callback(release_trainer)
        federation = Federation(
            everywhere,
            sizes,
            train,
            on_progress=on_progress,
            on_distillation=on_distillation,
            on_trained=on_trained,
            cohorts=cohorts or {},
            lost_states=lost_states or {},
            lost_clients=lost_clients or {},
        )
        result = saved or federation.start(start)
        result.images = images
        result.chance = central.chance
        central.evaluate_if_due(result)
        sites.evaluate_if_due(result, federation.lacking(result, result.rounds_done))
        for number in range(result.rounds_done + 1, spec.num_rounds + 1):
            with memory_errors_explained(device, spec.training.batch_size):
                federation.train(result, number)
            if checkpoint is not None:
                checkpoint.save(result)
            on_round(result.history[-1])
            central.evaluate_if_due(result)
            sites.evaluate_if_due(result, federation.lacking(result, number))
            if result.history[-1].alarms and spec.watch.action == "pause" and number < spec.num_rounds:
                raise Paused(f"paused after round {number}: {result.history[-1].alarms[0]}")
    return result


def _train_here(
    data: Mapping[str, ClientData],
    broadcast: Tensors,
    kept: Mapping[str, ClientState],
    contexts: Sequence[Context],
    on_progress: Callable[[str, LocalProgress], None],
) -> dict[str, LocalResult]:
    """Train one client after another in this process."""
    results = {}
    for ctx in contexts:
        name = ctx.client_id
        tell = functools.partial(on_progress, name)
        method = METHODS[ctx.spec.method.name]
        results[name] = run_local_round(method, broadcast, kept.get(name), data[name], ctx, tell)
    return results
