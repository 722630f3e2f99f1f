"""The rounds of a simulation."""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fedssl.artifacts.header import file_bytes, frozen_bytes
from fedssl.artifacts.tensors import Tensors
from fedssl.dimensions import client_dimensions
from fedssl.engine import DistillationProgress, LocalProgress, LocalResult, run_aggregation, start_run
from fedssl.engine.aggregation import ServerResult, ValueOutOfRange, split_state
from fedssl.engine.narrow_words import bits_of_round
from fedssl.engine.norm_bounding import Norms, TooFewUpdates
from fedssl.engine.secure_sums import NoSecureSum, num_vector_bytes
from fedssl.engine.summed_metrics import mean_loss
from fedssl.engine.unusual_updates import MOST_ROUNDS, NUM_EXAMPLES, find_unusual
from fedssl.evaluation.monitoring import LOSS, find_collapse_alerts, find_summed_alerts
from fedssl.methods import METHODS
from fedssl.methods.api import ClientState, Context, Metrics, Update
from fedssl.methods.composition.rounding import restored_update
from fedssl.methods.composition.weighting import is_fixed
from fedssl.models.start_files import Start
from fedssl.protocol.measures import UPDATE_NORM
from fedssl.seeding import sample_cohort
from fedssl.simulation.results import Result, RoundRecord

if TYPE_CHECKING:
    from fedssl.engine.secure_rounds import Phase

OnProgress = Callable[[int, str, LocalProgress], None]
OnDistillation = Callable[[int, DistillationProgress], None]
OnTrained = Callable[[int, str, Tensors], None]
"""Receives the round, a client and the model that the client has trained, before anything is averaged."""
Train = Callable[
    [Tensors, Mapping[str, ClientState], Sequence[Context], Callable[[str, LocalProgress], None]],
    dict[str, LocalResult],
]
"""Trains clients on a broadcast, starting from their kept states, and returns their results by name."""


class Federation:
    """The clients and the coordinator, simulated with the engine. `sizes`: the clients' numbers of images."""

    def __init__(
        self,
        everywhere: Context,
        sizes: Mapping[str, int],
        train: Train,
        *,
        on_progress: OnProgress,
        on_distillation: OnDistillation,
        on_trained: OnTrained | None,
        cohorts: Mapping[int, Sequence[str]],
        lost_states: Mapping[int, Collection[str]],
        lost_clients: Mapping[int, Mapping[str, "Phase"]],
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
        """Return the result before the first round."""
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
        lost = self.lacking(result, number).intersection(cohort)
        kept = {name: state for name, state in result.client_states.items() if name not in lost}
        trained = self._train_cohort(result, number, cohort, kept)
        record = RoundRecord(
            round_number=number,
            clients={name: local.metrics for name, local in trained.items()},
            num_examples={name: local.num_examples for name, local in trained.items()},
            num_images=sum(local.num_images for local in trained.values()),
            bytes_down=len(cohort) * self._bytes_down + self._num_new(result, cohort) * self._frozen_bytes,
            bytes_up=len(cohort) * self._bytes_up,
        )
        follows_weights = bool(result.history) and result.history[-1].gave_weights
        ctx = dataclasses.replace(
            self._everywhere,
            round_number=number,
            total_bits=bits_of_round(self._spec, result.server_state, follows_weights=follows_weights),
            restarting=lost if self._spec.method.restarts_states else (),
        )
        aggregate = self._aggregate if self._spec.secure_aggregation is None else self._aggregate_securely
        record = aggregate(result, trained, ctx, record)
        result.history.append(dataclasses.replace(record, seconds=time.perf_counter() - started))

    def lacking(self, result: Result, number: int) -> set[str]:
        """Return the clients that lack their state in a round, or after it if `result` has the round.

        A client that has lost it lacks it until one of its updates is used: a round that is skipped, or that ends
        without the client, gives it none.
        """
        used = dict.fromkeys(result.client_states, 0)
        for record in result.history if self._lost_states else ():
            if record.gave_weights:
                used |= dict.fromkeys(
                    used.keys() & record.num_examples.keys() - set(record.rejected), record.round_number
                )
        return {
            name
            for name, newest in used.items()
            if any(newest < each <= number and name in names for each, names in self._lost_states.items())
        }

    def _train_cohort(
        self, result: Result, number: int, cohort: Sequence[str], kept: Mapping[str, ClientState]
    ) -> dict[str, LocalResult]:
        contexts = [
            dataclasses.replace(
                self._everywhere, round_number=number, client_id=name, dimensions=self._dimensions.get(name)
            )
            for name in cohort
        ]
        received, _ = split_state(result.server_state)
        trained = self._train_clients(received, kept, contexts, functools.partial(self._on_progress, number))
        if self._on_trained is not None:
            for name, local in trained.items():
                self._on_trained(number, name, self._trained_model(received, local))
        return trained

    def _aggregate(
        self, result: Result, trained: Mapping[str, LocalResult], ctx: Context, record: RoundRecord
    ) -> RoundRecord:
        """Give `result` the weights of a round, unless it is skipped, and return its completed record."""
        try:
            found = run_aggregation(
                self._method,
                result.server_state,
                _updates(trained),
                ctx,
                on_epoch=functools.partial(self._on_distillation, ctx.round_number),
            )
        except (TooFewUpdates, ValueOutOfRange) as error:
            if isinstance(error, TooFewUpdates) and self._spec.cohort.without_quorum != "skip":
                raise
            return dataclasses.replace(_measured(record, error.norms, result.history), skipped=str(error))
        record = _measured(record, found.norms, result.history)
        clients = dict(record.clients)
        if self._spec.robustness.max_update_norm is not None:
            for name, norm in found.norms.by_client.items():
                clients[name] = {**clients[name], UPDATE_NORM: norm}
        used = {name: metrics for name, metrics in clients.items() if name not in found.norms.rejected}
        losses = {name: metrics[LOSS] for name, metrics in used.items() if LOSS in metrics} if is_fixed(ctx) else {}
        _publish(result, found, {name: trained[name].state for name in used}, ctx)
        return dataclasses.replace(
            record,
            clients=clients,
            server={**found.metrics, **mean_loss(losses, record.num_examples)},
            alarms=[str(alarm) for alarm in find_collapse_alerts(self._spec.watch, ctx.round_number, used)],
        )

    def _aggregate_securely(
        self, result: Result, trained: Mapping[str, LocalResult], ctx: Context, record: RoundRecord
    ) -> RoundRecord:
        """Do what `_aggregate` does, if the coordinator receives only masked vectors, and measures no update."""
        from fedssl.engine.secure_rounds import run_secure_round

        record = dataclasses.replace(record, bytes_up=len(trained) * num_vector_bytes(self._method, ctx))
        received, _ = split_state(result.server_state)
        lost = self._lost_clients.get(ctx.round_number, {})
        try:
            secure = run_secure_round(self._method, result.server_state, received, _updates(trained), ctx, lost=lost)
        except (NoSecureSum, ValueOutOfRange) as error:
            rejected = sorted(error.rejected) if isinstance(error, NoSecureSum) else []
            return dataclasses.replace(record, rejected=rejected, skipped=str(error))
        metrics = secure.result.metrics
        _publish(result, secure.result, {name: trained[name].state for name in secure.survivors}, ctx)
        return dataclasses.replace(
            record,
            clients={name: record.clients[name] for name in secure.survivors},
            num_examples={name: record.num_examples[name] for name in secure.survivors},
            server=metrics,
            rejected=sorted(secure.rejected),
            alarms=[str(alarm) for alarm in find_summed_alerts(self._spec.watch, metrics, len(secure.survivors))],
        )

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


def _updates(trained: Mapping[str, LocalResult]) -> list[Update]:
    return [
        Update(name, local.num_examples, lambda tensors=local.update: tensors, local.metrics)  # type: ignore[misc]
        for name, local in trained.items()
    ]


def _publish(result: Result, found: ServerResult, states: Mapping[str, ClientState], ctx: Context) -> None:
    """Give `result` the weights of a round, and the states of the clients whose updates were used."""
    restarts = not states.keys().isdisjoint(ctx.restarting)
    result.client_states = {} if restarts else {**result.client_states, **states}
    result.server_state, result.model = found.state, found.model


def _measured(record: RoundRecord, norms: Norms, history: Sequence[RoundRecord]) -> RoundRecord:
    return dataclasses.replace(
        record,
        rejected=sorted(norms.rejected),
        updates=dict(norms.measures),
        unusual=_unusual(history, norms, record.num_examples),
    )


def _unusual(history: Sequence[RoundRecord], norms: Norms, num_examples: Mapping[str, int]) -> list[str]:
    """Return the alarms about the updates that were used. Those that were left out are not compared."""

    def numbers(
        measures: Mapping[str, Metrics], images: Mapping[str, int], rejected: Collection[str]
    ) -> dict[str, Metrics]:
        return {
            name: {**found, NUM_EXAMPLES: float(images[name])}
            for name, found in measures.items()
            if name not in rejected
        }

    earlier: dict[str, list[Metrics]] = {name: [] for name in norms.measures}
    for record in history[-MOST_ROUNDS:]:
        for name, found in numbers(record.updates, record.num_examples, record.rejected).items():
            earlier.setdefault(name, []).append(found)
    return [str(alarm) for alarm in find_unusual(numbers(norms.measures, num_examples, norms.rejected), earlier)]
