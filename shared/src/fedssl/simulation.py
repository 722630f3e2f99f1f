"""A whole federation in one process, over the same engine: the same bits as the deployed one on one CPU thread."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.data import ImageData
from fedssl.dimensions import client_dimensions
from fedssl.engine import DistillationProgress, LocalProgress, run_aggregation, run_local_round, start_run
from fedssl.errors import SpecError
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, ClientState, Context, Metrics, Update
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import CohortConfig
from fedssl.seeding import sample_cohort
from fedssl.shards import deal, load_public


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One finished round: its cohort's metrics, by client."""

    round_number: int
    clients: dict[str, Metrics]
    num_examples: dict[str, int]

    @property
    def loss(self) -> float | None:
        """The clients' mean loss, weighted by their images; None where nobody trained."""
        known = {name: metrics["loss"] for name, metrics in self.clients.items() if "loss" in metrics}
        if not known:
            return None
        total = sum(self.num_examples[name] for name in known)
        return sum(loss * self.num_examples[name] for name, loss in known.items()) / total


@dataclass(slots=True)
class Result:
    """A finished simulation. `model`: the last broadcast; `initial`: the one before training."""

    spec: RunSpec
    initial: Tensors
    model: Tensors
    history: list[RoundRecord] = field(default_factory=list)
    client_states: dict[str, ClientState] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)


def simulate(
    spec: RunSpec,
    clients: dict[str, ImageData] | None = None,
    *,
    public: ImageData | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    on_progress: Callable[[int, str, LocalProgress], None] = lambda number, client, progress: None,
    on_distillation: Callable[[int, DistillationProgress], None] = lambda number, progress: None,
) -> Result:
    """Train `spec` on the images of `clients` (name to images), or on `spec.partition`'s where None.

    `public`: the images that everybody holds, in place of those that `spec.public_data` names (FLESD's experiments make
    one client's images public); as many as it says. `on_progress(round, client, progress)` is called about twice a
    second, `on_distillation(round, progress)` after every epoch of a training on the coordinator. Raises SpecError and
    DataError.
    """
    shards = clients if clients is not None else _partition(spec, data_root)
    names = _participants(spec.cohort, shards)
    dimensions = client_dimensions(spec, names)
    data = {name: _on_device(shards[name], device) for name in names}
    everywhere = Context(
        spec=spec, round_number=0, device=torch.device(device), public=_public(spec, public, data_root, device)
    )
    method = METHODS[spec.method.name]
    start = start_run(method, everywhere)
    server_state, broadcast = start.state, start.broadcast
    result = Result(spec=spec, initial=broadcast, model=broadcast)
    for number in range(1, spec.num_rounds + 1):
        record = RoundRecord(number, {}, {})
        updates = []
        for name in sample_cohort(names, spec.cohort, spec.seed, number):
            ctx = dataclasses.replace(everywhere, round_number=number, client_id=name, dimensions=dimensions.get(name))
            local = run_local_round(
                method,
                broadcast,
                result.client_states.get(name),
                data[name],
                ctx,
                lambda progress, name=name, number=number: on_progress(number, name, progress),  # type: ignore[misc]
            )
            result.client_states[name] = local.state
            record.clients[name] = local.metrics
            record.num_examples[name] = local.num_examples
            updates.append(Update(name, local.num_examples, lambda tensors=local.update: tensors))  # type: ignore[misc]
        aggregated = run_aggregation(
            method,
            server_state,
            updates,
            dataclasses.replace(everywhere, round_number=number),
            on_epoch=functools.partial(on_distillation, number),
        )
        server_state, broadcast = aggregated.state, aggregated.broadcast
        result.model = broadcast
        result.history.append(record)
        on_round(record)
    return result


def _partition(spec: RunSpec, data_root: Path | None) -> dict[str, ImageData]:
    if spec.partition is None:
        raise SpecError("a simulation needs images: add a [partition] section to the spec")
    return deal(spec.partition, spec.data, data_root).by_client


def _public(spec: RunSpec, images: ImageData | None, data_root: Path | None, device: str) -> ClientData | None:
    if spec.public_data is None:
        return None
    if images is None:
        images = load_public(spec.public_data, spec.data, data_root)
    if len(images) != spec.public_data.num_images:
        raise SpecError(f"public_data.num_images is {spec.public_data.num_images}, but {len(images)} images are given")
    return ClientData(torch.from_numpy(images.images).to(device))


def _participants(cohort: CohortConfig, shards: dict[str, ImageData]) -> list[str]:
    names = sorted(shards if cohort.clients is None else cohort.clients)
    if missing := [name for name in names if name not in shards]:
        raise SpecError(f"cohort.clients names {', '.join(missing)}, who have no images here")
    if len(names) < cohort.min_clients:
        raise SpecError(f"cohort.min_clients is {cohort.min_clients}, but there are {len(names)} clients")
    return names


def _on_device(images: ImageData, device: str) -> ClientData:
    labels = None if images.labels is None else torch.from_numpy(images.labels).to(device)
    return ClientData(torch.from_numpy(images.images).to(device), labels)
