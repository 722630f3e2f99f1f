"""The result of a simulation, finished or in progress."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedssl.artifacts.tensors import Tensors
from fedssl.engine.unusual_updates import NUM_EXAMPLES
from fedssl.evaluation.monitoring import LOSS
from fedssl.methods import METHODS
from fedssl.methods.api import ClientState, Metrics, ServerState
from fedssl.protocol.chance import Chance
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts


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
    `cross_site`: by round and by the site that a classifier is from, the counts of every other site. `loaded`: the
    tensors that were loaded if the encoder did not start from random weights; empty after a simulation was resumed.
    `images`: a digest of the images of all clients and of the evaluation, and of the public ones, if there is a
    checkpoint.
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
    images: str = ""

    @property
    def rounds_done(self) -> int:
        """The number of finished rounds."""
        return len(self.history)


class Checkpoint(Protocol):
    """Stores a simulation while it runs, so that it can be resumed after an interruption."""

    def load(self, spec: RunSpec) -> Result | None:
        """Return the result that was saved last, or None if none was saved."""
        ...

    def save(self, result: Result) -> None:
        """Replace the saved result, whole or not at all. Called after every round."""
        ...


def judged_models(result: Result) -> dict[str, Tensors]:
    """Return the models of a run: the global one, under "", or every client's own state if the method sends nothing.

    The papers' rows without a federation report the clients' mean (FedU) or the worst of them (FLESD's Min-Local).
    """
    sends = bool(METHODS[result.spec.method.name].bind(result.spec).plan.update)
    return {"": result.model} if sends or not result.client_states else result.client_states
