"""A whole federation on one machine, with the same engine. On one CPU thread, its bits are those of a deployed one."""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from fedssl.artifacts.header import file_bytes, frozen_bytes
from fedssl.artifacts.tensors import Tensors
from fedssl.data import ImageData
from fedssl.data.image_cache.build import CachedData
from fedssl.data.partitioning import load_public, partition_images, require_images
from fedssl.data.site_labels import SiteLabels, own_labels, with_run_classes
from fedssl.dimensions import client_dimensions
from fedssl.engine import (
    DistillationProgress,
    LocalProgress,
    LocalResult,
    release_trainer,
    run_aggregation,
    run_local_round,
    start_run,
)
from fedssl.engine.aggregation import ValueOutOfRange, split_state
from fedssl.engine.devices import devices_of, memory_errors_explained, require_device
from fedssl.engine.narrow_words import bits_of_round
from fedssl.engine.norm_bounding import Norms, TooFewUpdates
from fedssl.engine.secure_sums import NoSecureSum, num_vector_bytes
from fedssl.engine.summed_metrics import mean_loss
from fedssl.engine.unusual_updates import MOST_ROUNDS, NUM_EXAMPLES, find_unusual
from fedssl.errors import DataError, Paused, SpecError
from fedssl.evaluation import labels_of
from fedssl.evaluation.monitoring import LOSS, find_collapse_alerts, find_summed_alerts
from fedssl.evaluation.site import SiteEvaluation, evaluate_at_site, evaluate_head, weights_at_site
from fedssl.evaluation.site_heads import run_heads
from fedssl.evaluation.suite import Labelled, evaluate_encoder, load_encoder, load_labelled
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, ClientState, Context, Metrics, ServerState, Update
from fedssl.methods.composition.rounding import restored_update
from fedssl.methods.composition.weighting import is_fixed
from fedssl.methods.site_data import client_data
from fedssl.models.pretrained import encoder_of
from fedssl.models.start_files import Start, read_start, with_digest
from fedssl.parallel.pool import ClientProcesses
from fedssl.protocol.chance import Chance, chance_of
from fedssl.protocol.explanation import spec_of
from fedssl.protocol.measures import UPDATE_NORM
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts, SiteHead
from fedssl.protocol.training import CohortConfig
from fedssl.seeding import sample_cohort

if TYPE_CHECKING:
    from fedssl.engine.secure_rounds import Phase

Counted = TypeVar("Counted", SiteEvaluation, SiteCounts)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One finished round: its cohort's metrics and images by client, the coordinator's metrics, and its costs.

    `num_images`: the images trained on, each counted as often as it was used. `bytes_down`, `bytes_up`: the bytes of
    the artifacts that a deployment would transfer to and from the whole cohort. `seconds`: the time on this machine,
    without evaluations. `alarms`: the metrics that crossed a threshold of the spec's `watch`. `rejected`: the clients
    whose update was left out, because it could not be used or exceeded the limits of the spec's `robustness`.
    `updates`: the coordinator's measurements of each client's update. `unusual`: the updates about which it raises an
    alarm. `skipped`: why the round has no result, or None if it has one.
    """

    round_number: int
    clients: dict[str, Metrics]
    num_examples: dict[str, int]
    server: Metrics = field(default_factory=dict)
    num_images: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    alarms: Sequence[str] = ()
    rejected: Sequence[str] = ()
    updates: dict[str, Metrics] = field(default_factory=dict)
    unusual: Sequence[str] = ()
    skipped: str | None = None

    @property
    def gave_weights(self) -> bool:
        """True if the round had updates and was not skipped."""
        return bool(self.num_examples) and self.skipped is None

    @property
    def loss(self) -> float | None:
        """The mean loss of the clients whose updates were used, weighted by their images, or None if there is none.

        It is computed from the coordinator's sum if the spec has `aggregation.arithmetic = "fixed"`.
        """
        if LOSS in self.server or NUM_EXAMPLES in self.server:
            return self.server.get(LOSS)
        known = {
            name: metrics["loss"]
            for name, metrics in self.clients.items()
            if "loss" in metrics and name not in self.rejected
        }
        if not known:
            return None
        total = sum(self.num_examples[name] for name in known)
        return sum(loss * self.num_examples[name] for name, loss in known.items()) / total


@dataclass(slots=True)
class Result:
    """A simulation, finished or in progress.

    `model`: the last round's weights, with the averaged encoder if the spec has one; `initial`: those before training.
    `evaluations`: the measures that `spec.evaluation` asks for, of the last evaluated round; `evaluations_by_round`:
    those of all evaluated rounds, where round 0 is before training. `chance`: the accuracy without an encoder on the
    same test images. `site_evaluations`: by round, each client's counts on its own labelled images, or why it has none.
    `cross_site`: by round and by the site whose classifier it is, the counts of every other site. `loaded`: the tensors
    that were loaded if the encoder did not start from random weights; empty after a simulation was resumed.
    """

    spec: RunSpec
    initial: Tensors
    model: Tensors
    history: list[RoundRecord] = field(default_factory=list)
    client_states: dict[str, ClientState] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)
    evaluations_by_round: dict[int, dict[str, float]] = field(default_factory=dict)
    server_state: ServerState = field(default_factory=dict)
    chance: Chance | None = None
    site_evaluations: dict[int, dict[str, SiteCounts | str]] = field(default_factory=dict)
    cross_site: dict[int, dict[str, dict[str, SiteCounts | str]]] = field(default_factory=dict)
    loaded: str = ""

    @property
    def rounds_done(self) -> int:
        """The number of finished rounds."""
        return len(self.history)


OnProgress = Callable[[int, str, LocalProgress], None]
OnDistillation = Callable[[int, DistillationProgress], None]
OnJudging = Callable[[int, str, float | None], None]
OnEvaluation = Callable[[int, dict[str, float]], None]
OnTrained = Callable[[int, str, Tensors], None]
"""Receives the round, a client and the model that the client has trained, before anything is averaged."""


class Checkpoint(Protocol):
    """Stores a simulation while it runs, so that it can be resumed after an interruption."""

    def load(self, spec: RunSpec) -> Result | None:
        """Return the result that was saved last, or None if none was saved."""
        ...

    def save(self, result: Result) -> None:
        """Replace the saved result, whole or not at all. Called after every round."""
        ...


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
    they start cold, as in a deployed run that has the event `client.state_lost`. `lost_clients`: the clients that are
    lost in a round of a spec with `secure_aggregation`, each with the phase in which it is lost
    (`engine.secure_rounds.Phase`). If the spec has an evaluation, the encoder is evaluated accordingly, also before
    training. If the spec has `model.initial`, its file is read, and the digest of its weights is in the result's spec.

    `on_progress(round, client, progress)` is called about twice a second, `on_distillation(round, progress)` after
    every epoch of a training on the coordinator, `on_judging(round, what, share or None)` while an encoder is evaluated
    and `on_evaluation(round, measures)` after that. `on_trained(round, client, model)` receives the broadcast's tensors
    with the values that a client has trained, before the checkpoint of the round is written. Raises SpecError,
    DataError, DeviceError, MethodError, LocalError if one of the processes was killed, and Paused if the spec's watch
    asks for it.
    """
    spec = spec_of(spec)
    if jobs < 1:
        raise SpecError(f"jobs is {jobs}: give the number of processes that train clients, 1 or more")
    if (start := read_start(spec)) is not None:
        spec = with_digest(spec, start)
    require_device(device)
    shards = clients if clients is not None else _partition(spec, data_root)
    names = _participants(spec.cohort, shards)
    _require_masks(spec, len(names))
    everywhere = Context(
        spec=spec, round_number=0, device=torch.device(device), public=_public(spec, public, data_root, device)
    )
    judges = _Judges(spec, data_root, device, on_judging, on_evaluation)
    require_images(shards, names)
    sites = _Sites(spec, {name: shards[name] for name in names}, device, on_judging)
    for name in names:
        _require_images(f"the images of {name}", shards[name], spec)
    sizes = {name: len(shards[name]) for name in names}
    num_processes = min(jobs, spec.cohort.num_wanted(len(names)))
    with contextlib.ExitStack() as stack:
        data = {name: client_data(shards[name], spec, name) for name in names}
        if num_processes > 1:
            devices = devices_of(device, num_processes)
            train = stack.enter_context(ClientProcesses(spec, data, everywhere.public, devices)).train
            del data, shards  # the processes share a copy
        else:
            train = functools.partial(_train_here, {name: each.to(device) for name, each in data.items()})
            stack.callback(release_trainer)
        federation = _Federation(
            everywhere,
            sizes,
            train,
            on_progress,
            on_distillation,
            cohorts or {},
            lost_states or {},
            lost_clients or {},
            on_trained,
        )
        result = (checkpoint.load(spec) if checkpoint is not None else None) or federation.start(start)
        result.chance = judges.chance
        judges.judge(result)
        sites.judge(result)
        for number in range(result.rounds_done + 1, spec.num_rounds + 1):
            with memory_errors_explained(device, spec.training.batch_size):
                federation.train(result, number)
            if checkpoint is not None:
                checkpoint.save(result)
            on_round(result.history[-1])
            judges.judge(result)
            sites.judge(result)
            if result.history[-1].alarms and spec.watch.action == "pause" and number < spec.num_rounds:
                raise Paused(f"paused after round {number}: {result.history[-1].alarms[0]}")
    return result


_Train = Callable[
    [Tensors, Mapping[str, ClientState], Sequence[Context], Callable[[str, LocalProgress], None]],
    dict[str, LocalResult],
]
"""Trains clients on a broadcast, starting from their kept states, and returns their results by name."""


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


class _Federation:
    """The clients and the coordinator, simulated with the engine. `sizes`: the clients' numbers of images."""

    def __init__(
        self,
        everywhere: Context,
        sizes: Mapping[str, int],
        train: _Train,
        on_progress: OnProgress,
        on_distillation: OnDistillation,
        cohorts: Mapping[int, Sequence[str]],
        lost_states: Mapping[int, Collection[str]],
        lost_clients: Mapping[int, Mapping[str, "Phase"]],
        on_trained: OnTrained | None,
    ) -> None:
        self._on_trained = on_trained
        self._cohorts, self._lost_states, self._lost_clients = cohorts, lost_states, lost_clients
        self._spec, self._everywhere, self._sizes = everywhere.spec, everywhere, sizes
        self._train_clients = train
        self._on_progress, self._on_distillation = on_progress, on_distillation
        self._method = METHODS[self._spec.method.name]
        self._dimensions = client_dimensions(self._spec, sizes)
        self._bound = self._method.bind(self._spec)
        plan = self._bound.plan
        self._bytes_down, self._bytes_up = file_bytes(plan.broadcast), file_bytes(plan.update)
        self._frozen_bytes = frozen_bytes(plan)

    def start(self, start: Start | None) -> Result:
        """Return the result as it is before the first round."""
        first = start_run(
            self._method,
            self._everywhere,
            on_epoch=functools.partial(self._on_distillation, 0),
            initial=None if start is None else start.tensors,
        )
        return Result(
            spec=self._spec,
            initial=first.model,
            model=first.model,
            server_state=first.state,
            loaded=first.loaded,
        )

    def train(self, result: Result, number: int) -> None:
        """Train one round, and change `result` only once the round is finished."""
        started = time.perf_counter()
        cohort = self._cohorts.get(number)
        if cohort is None:
            cohort = sample_cohort(self._sizes, self._spec.cohort, self._spec.seed, number)
        if not cohort:
            result.history.append(RoundRecord(round_number=number, clients={}, num_examples={}))
            return
        lost = result.client_states.keys() & set(cohort).intersection(self._lost_states.get(number, ()))
        restart = bool(lost) and self._spec.method.restarts_states
        contexts = [
            dataclasses.replace(
                self._everywhere, round_number=number, client_id=name, dimensions=self._dimensions.get(name)
            )
            for name in cohort
        ]
        kept = {name: state for name, state in result.client_states.items() if name not in lost}
        received, _ = split_state(result.server_state)
        trained = self._train_clients(received, kept, contexts, functools.partial(self._on_progress, number))
        if self._on_trained is not None:
            for name, local in trained.items():
                self._on_trained(number, name, self._trained_model(received, local))
        clients = {name: local.metrics for name, local in trained.items()}
        updates = [
            Update(name, local.num_examples, lambda tensors=local.update: tensors, local.metrics)  # type: ignore[misc]
            for name, local in trained.items()
        ]
        num_examples = {update.client_id: update.num_examples for update in updates}
        make_record = functools.partial(
            RoundRecord,
            round_number=number,
            clients=clients,
            num_examples=num_examples,
            num_images=sum(local.num_images for local in trained.values()),
            bytes_down=len(cohort) * self._bytes_down + self._num_new(result, cohort) * self._frozen_bytes,
            bytes_up=len(cohort) * self._bytes_up,
        )
        follows_weights = bool(result.history) and result.history[-1].gave_weights
        bits = bits_of_round(self._spec, result.server_state, follows_weights=follows_weights)
        ctx = dataclasses.replace(self._everywhere, round_number=number, total_bits=bits)
        if self._spec.secure_aggregation is not None:
            self._train_securely(result, updates, trained, make_record, ctx, started, restart=restart)
            return
        try:
            aggregated = run_aggregation(
                self._method,
                result.server_state,
                updates,
                ctx,
                on_epoch=functools.partial(self._on_distillation, number),
                restart=restart,
            )
        except (TooFewUpdates, ValueOutOfRange) as error:
            if isinstance(error, TooFewUpdates) and self._spec.cohort.without_quorum != "skip":
                raise
            record = make_record(
                seconds=time.perf_counter() - started,
                rejected=sorted(error.norms.rejected),
                updates=dict(error.norms.measures),
                unusual=_unusual(result.history, error.norms, num_examples),
                skipped=str(error),
            )
            result.history.append(record)
            return
        norms = aggregated.norms
        if self._spec.robustness.max_update_norm is not None:
            for name, norm in norms.by_client.items():
                clients[name] = {**clients[name], UPDATE_NORM: norm}
        used = {name: local.state for name, local in trained.items() if name not in norms.rejected}
        result.client_states = {} if restart else {**result.client_states, **used}
        result.server_state, result.model = aggregated.state, aggregated.model
        losses = {name: clients[name][LOSS] for name in used if LOSS in clients[name]} if is_fixed(ctx) else {}
        record = make_record(
            server={**aggregated.metrics, **mean_loss(losses, num_examples)},
            seconds=time.perf_counter() - started,
            rejected=sorted(norms.rejected),
            updates=dict(norms.measures),
            unusual=_unusual(result.history, norms, num_examples),
            alarms=[str(alarm) for alarm in find_collapse_alerts(self._spec.watch, number, clients)],
        )
        result.history.append(record)

    def _train_securely(
        self,
        result: Result,
        updates: Sequence[Update],
        trained: Mapping[str, LocalResult],
        make_record: Callable[..., RoundRecord],
        ctx: Context,
        started: float,
        *,
        restart: bool,
    ) -> None:
        """Finish a round in which the coordinator receives only masked vectors, and measures no update."""
        from fedssl.engine.secure_rounds import run_secure_round

        lost = self._lost_clients.get(ctx.round_number, {})
        make_record = functools.partial(make_record, bytes_up=len(updates) * num_vector_bytes(self._method, ctx))
        try:
            secure = run_secure_round(
                self._method,
                result.server_state,
                split_state(result.server_state)[0],
                updates,
                ctx,
                lost=lost,
                restart=restart,
            )
        except (NoSecureSum, ValueOutOfRange) as error:
            rejected = sorted(error.rejected) if isinstance(error, NoSecureSum) else []
            seconds = time.perf_counter() - started
            result.history.append(make_record(seconds=seconds, rejected=rejected, skipped=str(error)))
            return
        clients = {name: trained[name].metrics for name in secure.survivors}
        used = {name: trained[name].state for name in secure.survivors}
        result.client_states = {} if restart else {**result.client_states, **used}
        result.server_state, result.model = secure.result.state, secure.result.model
        record = make_record(
            clients=clients,
            num_examples={name: trained[name].num_examples for name in secure.survivors},
            server=secure.result.metrics,
            seconds=time.perf_counter() - started,
            rejected=sorted(secure.rejected),
            alarms=[
                str(alarm)
                for alarm in find_summed_alerts(self._spec.watch, secure.result.metrics, len(secure.survivors))
            ],
        )
        result.history.append(record)

    def _trained_model(self, broadcast: Tensors, local: LocalResult) -> Tensors:
        """Return the broadcast with the values that a client has trained, whether it sends or keeps them."""
        weights = {tensor.name for tensor in self._bound.plan.broadcast if tensor.kind == "weights"}
        sent = restored_update(local.update, broadcast, self._bound.rounded) if local.update else {}
        own = {**local.state, **sent}
        return {**broadcast, **{name: tensor for name, tensor in own.items() if name in weights}}

    @staticmethod
    def _num_new(result: Result, cohort: Sequence[str]) -> int:
        """Return the number of clients in the cohort that have not taken part yet, and so lack the frozen tensors."""
        return len(set(cohort).difference(*(record.num_examples for record in result.history)))


def _unusual(history: Sequence[RoundRecord], norms: Norms, num_examples: Mapping[str, int]) -> list[str]:
    """Return the alarms about the updates that were used."""

    def numbers(measures: Mapping[str, Metrics], images: Mapping[str, int]) -> dict[str, Metrics]:
        return {name: {**found, NUM_EXAMPLES: float(images[name])} for name, found in measures.items()}

    earlier: dict[str, list[Metrics]] = {name: [] for name in norms.measures}
    for record in history[-MOST_ROUNDS:]:
        for name, found in numbers(record.updates, record.num_examples).items():
            earlier.setdefault(name, []).append(found)
    alarms = find_unusual(numbers(norms.measures, num_examples), earlier)
    return [str(alarm) for alarm in alarms if alarm.client_id not in norms.rejected]


class _Judges:
    """Evaluates the encoder of each round that the spec names, once."""

    def __init__(
        self, spec: RunSpec, data_root: Path | None, device: str, on_judging: OnJudging, on_evaluation: OnEvaluation
    ) -> None:
        self._spec, self._device = spec, device
        self._on_judging, self._on_evaluation = on_judging, on_evaluation
        self._labelled: Labelled | None = None
        self.chance: Chance | None = None
        # The data set is read before training, so that a missing one does not end a run later.
        if (config := spec.central_evaluation) is not None:
            limits = {"max_train": config.max_train, "max_test": config.max_test}
            self._labelled = load_labelled(config.dataset, spec.data, **limits, seed=spec.seed, root=data_root)
            self.chance = chance_of(labels_of(self._labelled.test).tolist())

    def judge(self, result: Result) -> None:
        """Evaluate the last round's encoder, if that is due and not done."""
        config, number = self._spec.central_evaluation, result.rounds_done
        if config is None or self._labelled is None:
            return
        if number in result.evaluations_by_round or not config.is_due(number, self._spec.num_rounds):
            return
        tell, data = functools.partial(self._on_judging, number), self._spec.data
        encoders = (load_encoder(tensors, self._spec) for tensors in judged_models(result).values())
        found = [
            evaluate_encoder(each, self._labelled, config, data, device=self._device, on_progress=tell)
            for each in encoders
        ]
        measures = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
        if len(found) > 1:
            accuracies = [name for name in ("probe", "knn") if name in measures]
            measures |= {f"{name}_min": _least([each[name] for each in found]) for name in accuracies}
        result.evaluations = result.evaluations_by_round[number] = measures
        self._on_evaluation(number, measures)


class _Sites:
    """Evaluates the encoder of the rounds that the spec names at each client, on its own labelled images."""

    def __init__(
        self, spec: RunSpec, shards: Mapping[str, ImageData | CachedData], device: str, on_judging: OnJudging
    ) -> None:
        self._spec, self._device, self._on_judging = spec, device, on_judging
        self._config = spec.site_evaluation
        self._shards = {} if self._config is None else shards
        self._labels = {name: self._labels_of(name, images) for name, images in self._shards.items()}

    def judge(self, result: Result) -> None:
        """Evaluate the last round's encoder, if that is due and not done."""
        number = result.rounds_done
        if self._config is None or number in result.site_evaluations:
            return
        if self._config.is_due(number, self._spec.num_rounds):
            models = judged_models(result)
            answers = {name: self._answer(models.get(name, models.get("")), name, result) for name in self._shards}
            result.site_evaluations[number] = {
                name: answer if isinstance(answer, str) else answer.counts for name, answer in answers.items()
            }
            known = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
            cross_site = {
                owner: {
                    name: self._judged(models.get(name, models.get("", {})), name, number, answer.head)
                    for name in known
                    if name != owner
                }
                for owner, answer in known.items()
                if answer.head is not None
            }
            if cross_site:
                result.cross_site[number] = cross_site

    def _answer(self, model: Tensors | None, name: str, result: Result) -> SiteEvaluation | str:
        assert self._config is not None, "only with an evaluation at the sites"
        assert self._config.sites is not None, "validated by the spec"
        if model is None:
            return f"this site has not trained up to round {result.rounds_done}, so it has no encoder of its own"
        state = result.client_states.get(name)
        heads = run_heads(self._config.sites, model, state)
        return self._or_reason(evaluate_at_site, model, state, name, result.rounds_done, heads=heads)

    def _judged(self, model: Tensors, name: str, number: int, head: SiteHead) -> SiteCounts | str:
        return self._or_reason(evaluate_head, model, None, name, number, head=head)

    def _or_reason(
        self,
        evaluate: Callable[..., Counted],
        model: Tensors,
        state: Tensors | None,
        name: str,
        number: int,
        **heads: Any,
    ) -> Counted | str:
        """Return a site's counts, or why it has none. A state is only needed if the site has its own BatchNorm."""
        images = self._shards[name]
        try:
            own = weights_at_site(model, state, self._spec, number)
            return evaluate(
                encoder_of(own, self._spec.model.encoder, self._spec.data).to(self._device),
                images.squares if isinstance(images, CachedData) else images.subset,
                self._labels[name],
                self._spec,
                name,
                device=self._device,
                on_progress=lambda: self._on_judging(number, f"images of {name}", None),
                **heads,
            )
        except DataError as error:
            return str(error)

    def _labels_of(self, name: str, images: ImageData | CachedData) -> SiteLabels:
        config = self._config
        assert config is not None, "only with an evaluation at the sites"
        assert config.sites is not None, "validated by the spec"
        labels = own_labels(images, f"the images of {name}")
        return with_run_classes(labels, config.sites.classes, multi_label=config.sites.multi_label)


def _least(values: list[float]) -> float:
    """Return the smallest value, or NaN if any value is NaN, because an encoder that diverged is the worst."""
    return math.nan if any(map(math.isnan, values)) else min(values)


def judged_models(result: Result) -> dict[str, Tensors]:
    """Return the models of a run: the global one, under "", or every client's own state if the method sends nothing.

    The papers' rows without a federation report the clients' mean (FedU) or the worst of them (FLESD's Min-Local).
    """
    sends = bool(METHODS[result.spec.method.name].bind(result.spec).plan.update)
    return {"": result.model} if sends or not result.client_states else result.client_states


def _partition(spec: RunSpec, data_root: Path | None) -> Mapping[str, ImageData | CachedData]:
    if spec.partition is None:
        raise SpecError("a simulation needs images: add a [partition] section to the spec")
    return partition_images(spec.partition, spec.data, data_root)


def _public(spec: RunSpec, images: ImageData | None, data_root: Path | None, device: str) -> ClientData | None:
    if spec.public_data is None:
        return None
    if images is None:
        images = load_public(spec.public_data, spec.data, data_root)
    if len(images) != spec.public_data.num_images:
        raise SpecError(f"public_data.num_images is {spec.public_data.num_images}, but {len(images)} images are given")
    _require_shape("the public images", images, spec)
    return ClientData(torch.from_numpy(images.images).to(device))


def _require_images(what: str, images: ImageData | CachedData, spec: RunSpec) -> None:
    """Raise DataError unless a client's images have the run's shape, and are in a cache if it needs one."""
    if isinstance(images, CachedData):
        images.require(spec.data)
        return
    if spec.data.cache_size is not None:
        raise DataError(
            f"{what} are squares in memory, and data.cache_size needs whole images: load them with "
            "fedssl.data.image_cache.load_cached(folder, spec.data)"
        )
    _require_shape(what, images, spec)


def _require_shape(what: str, images: ImageData, spec: RunSpec) -> None:
    """Raise DataError unless the images have the run's channels and size."""
    data, found = spec.data, images.images.shape[1:]
    if found != (data.channels, data.image_size, data.image_size):
        raise DataError(
            f"{what} are {' x '.join(map(str, found))}, but the run's are {data.channels} x {data.image_size} x "
            f"{data.image_size} (data.channels, data.image_size): convert them with "
            "fedssl.data.conform(images, spec.data)"
        )


def _participants(cohort: CohortConfig, shards: Mapping[str, ImageData | CachedData]) -> list[str]:
    names = sorted(shards if cohort.clients is None else cohort.clients)
    if missing := [name for name in names if name not in shards]:
        raise SpecError(f"cohort.clients names {', '.join(missing)}, who have no images here")
    if len(names) < cohort.min_clients:
        raise SpecError(f"cohort.min_clients is {cohort.min_clients}, but there are {len(names)} clients")
    if (cohort.min_updates or 0) > cohort.num_wanted(len(names)):
        raise SpecError(f"cohort.min_updates is {cohort.min_updates}, more than a cohort of these {len(names)} clients")
    return names


def _require_masks(spec: RunSpec, num_clients: int) -> None:
    """Raise SpecError if the spec asks for secure aggregation, but no round here could use it."""
    config = spec.secure_aggregation
    if config is None:
        return
    if importlib.util.find_spec("cryptography") is None:
        raise SpecError("secure_aggregation needs the package cryptography: pip install 'fedssl[secure]'")
    if (size := spec.cohort.num_wanted(num_clients)) < config.min_cohort:
        raise SpecError(
            f"secure_aggregation.min_cohort is {config.min_cohort}, more than the {size} clients of a cohort of these "
            f"{num_clients}: lower it (to 3 at least), or have more clients"
        )
