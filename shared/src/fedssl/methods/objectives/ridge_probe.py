"""A linear probe by ridge regression, exact over all sites: `evaluation/ridge.py` has the mathematics.

It trains no network. In the first round each client sends the Gram matrix X'X and the moment X'Y of its labelled
training images, X = [h, 1]. The coordinator adds them up and solves for the weights of ten penalties. In each later
round every client counts how many of its held-out images each of the ten predicts correctly, and sends these counts.
The penalty with the most gives the classifier. If several are equal, it is the largest penalty, hence the smallest
weights. With the counts come sums of cross-entropies, from which the coordinator chooses the scale that turns the
chosen scores into logits: `evaluation/calibration.py`. Until then the classifier has the scale 1.

With `aggregation.arithmetic = "fixed"` the sums are of integers, which a secure aggregation can carry. Those of each
client are rounded once: cross-entropies to 2^-8, the others to 2^-24. What one client adds to the cross-entropies then
has no limit, because the coordinator does not see the clients' own.

With several labels per image, a prediction is right or wrong for each pair of image and label; a score of 0.5 or more
predicts the label, and its logit is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedssl.aggregation.fixed_point import COUNTED_BITS
from fedssl.artifacts.tensors import Tensors
from fedssl.data.image_batches import Images
from fedssl.errors import ArtifactError, DataError, FedSSLError, MethodError
from fedssl.evaluation.calibration import NUM_SCALES, best_scale, cross_entropy_sums, impossible_sums
from fedssl.evaluation.ridge import NUM_PENALTIES, require_sums, ridge_path, ridge_solution, ridge_sums
from fedssl.methods.api import Batch, ClientData, Context, Metrics, Schedule, ServerState, Terms, Update
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.embedding import embed
from fedssl.methods.composition.modules import encoder_width, module_of
from fedssl.methods.composition.part import ENCODER, Objective, Online, Wire
from fedssl.methods.composition.server import Reducer
from fedssl.methods.composition.weighting import is_fixed, sum_of
from fedssl.models.classifier import BIAS, CLASSES, WEIGHT, classes_digest
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.methods.ridge_probe import RidgeProbeConfig
from fedssl.protocol.plan import ArtifactPlan, TensorSpec

PROBE = "probe"
GRAM, MOMENT, RIGHT, HELD_OUT = (f"{PROBE}.{name}" for name in ("gram", "moment", "right", "held_out"))
CROSS_ENTROPY = f"{PROBE}.cross_entropy"
PENALTIES, SOLUTIONS, SCALE = f"{PROBE}.penalties", f"{PROBE}.solutions", f"{PROBE}.scale"

_FIRST_CHOICE = 3  # 1e-3 of the Gram matrix's mean diagonal, until held-out images have chosen one
_THRESHOLD = 0.5
_LOSSES = (2, NUM_PENALTIES, NUM_SCALES)
_LOSS_BITS = 8  # bits of a sum of cross-entropies in fixed point: sums are large, and only compared with one another


class Solutions(nn.Module):
    """The penalties (P,), all 0 before they are known, and the solutions' weights (P, H+1, C), in float64."""

    penalties: torch.Tensor
    weights: torch.Tensor

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("penalties", torch.zeros(NUM_PENALTIES, dtype=torch.float64))
        self.register_buffer("weights", torch.zeros(NUM_PENALTIES, width + 1, num_classes, dtype=torch.float64))


@dataclass(frozen=True)
class RidgeProbe(Objective):
    """The sums and the counts of one client."""

    config: RidgeProbeConfig

    shared: ClassVar[tuple[str, ...]] = ()
    num_views: ClassVar[int] = 1

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        return {PROBE: Solutions(encoder_width(modules), len(self.config.classes))}

    def schedule(self, schedule: Schedule, num_images: int, ctx: Context) -> Schedule:
        return Schedule(num_epochs=0, steps_per_epoch=schedule.steps_per_epoch, learning_rate=schedule.learning_rate)

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        if data.labels is None or data.held_out is None:
            raise DataError(f"{ctx.client_id} has no labels, which ridge-probe needs: it cannot take part")
        num_images, least = data.num_trained, fewest_images(self.config, encoder_width(modules))
        if num_images < least:
            raise DataError(
                f"{ctx.client_id} has {num_images} labelled training images, and sums of fewer than {least} do not "
                "leave a site: label more, or lower method.min_images"
            )
        solutions = _solutions(modules)
        solutions.penalties.copy_(broadcast[PENALTIES])
        solutions.weights.copy_(broadcast[SOLUTIONS])

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        raise MethodError("ridge-probe takes no training step")

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        assert data.held_out is not None, "`begin` has checked it"
        solutions, num_classes = _solutions(modules), len(self.config.classes)
        counts = bool(solutions.penalties.any())
        chosen = data.at(data.held_out.nonzero().flatten()) if counts else data.trained()
        assert chosen.labels is not None, "those of `data`"
        h_NH, labels = _representations(modules, chosen.images, ctx), chosen.labels
        if counts:
            gram, moment = (torch.zeros(shape, dtype=torch.float64) for shape in self._shapes(modules))
            return {GRAM: gram, MOMENT: moment, **count_held_out(h_NH, labels, solutions)}
        try:
            gram, moment = ridge_sums(h_NH, labels, num_classes)
        except ValueError as error:
            raise MethodError(f"the run's encoder cannot be probed: {error}") from error
        none, no_losses = torch.zeros(NUM_PENALTIES, dtype=torch.int64), torch.zeros(_LOSSES, dtype=torch.float64)
        return {GRAM: gram, MOMENT: moment, RIGHT: none, HELD_OUT: none[:1].clone(), CROSS_ENTROPY: no_losses}

    @property
    def wire(self) -> Wire:
        return Wire(plan=self._plan, initial_state=self._initial_state, refusal=self._refusal)

    def _shapes(self, modules: nn.ModuleDict) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of the Gram matrix and of the moment."""
        width = encoder_width(modules) + 1
        return (width, width), (width, len(self.config.classes))

    def _plan(self, modules: nn.ModuleDict, ctx: Context) -> ArtifactPlan:
        gram, moment = self._shapes(modules)
        down = (
            TensorSpec(name=WEIGHT, dtype="F32", shape=(moment[1], moment[0] - 1), reduce="method"),
            TensorSpec(name=BIAS, dtype="F32", shape=(moment[1],), reduce="method"),
            TensorSpec(name=PENALTIES, dtype="F64", shape=(NUM_PENALTIES,), reduce="method"),
            TensorSpec(name=SOLUTIONS, dtype="F64", shape=(NUM_PENALTIES, *moment), reduce="method"),
            TensorSpec(name=SCALE, dtype="F64", shape=(1,), reduce="method"),
            TensorSpec(name=CLASSES, dtype="I64", shape=(4,), reduce="keep"),
        )
        up = (
            TensorSpec(name=GRAM, dtype="F64", shape=gram, kind="probe-sums", reduce="sum"),
            TensorSpec(name=MOMENT, dtype="F64", shape=moment, kind="probe-sums", reduce="sum"),
            TensorSpec(name=RIGHT, dtype="I64", shape=(NUM_PENALTIES,), kind="probe-sums", reduce="sum"),
            TensorSpec(name=HELD_OUT, dtype="I64", shape=(1,), kind="probe-sums", reduce="sum"),
            TensorSpec(name=CROSS_ENTROPY, dtype="F64", shape=_LOSSES, kind="probe-sums", reduce="sum"),
        )
        return ArtifactPlan(broadcast=down, update=up)

    def _initial_state(self, modules: nn.ModuleDict, ctx: Context) -> Tensors:
        width, num_classes = encoder_width(modules), len(self.config.classes)
        probe = Solutions(width, num_classes)
        return {
            WEIGHT: torch.zeros(num_classes, width),
            BIAS: torch.zeros(num_classes),
            PENALTIES: probe.penalties,
            SOLUTIONS: probe.weights,
            SCALE: torch.zeros(1, dtype=torch.float64),
            CLASSES: classes_digest(self.config.classes, multi_label=self.config.multi_label),
        }

    def _refusal(self, state: ServerState, update: Update, ctx: Context) -> str | None:
        sent = update.load()
        gram, moment, right, held_out = (sent[name] for name in (GRAM, MOMENT, RIGHT, HELD_OUT))
        if not bool(state[PENALTIES].any()):
            return _why_no_sums(gram, moment, update.num_examples, fewest_images(self.config, len(gram) - 1))
        if bool(gram.any() | moment.any()):
            return "it has sums in a round that only counts right predictions"
        most = update.num_examples * (len(self.config.classes) if self.config.multi_label else 1)
        total = int(held_out)
        if not 0 <= total <= most or bool(((right < 0) | (right > total)).any()):
            return f"it counts {right.tolist()} right predictions of {total}, and at most {most} are possible"
        known, num_classes = state[PENALTIES].nonzero().flatten().tolist(), len(self.config.classes)
        several = self.config.multi_label
        num_images = total // num_classes if several else total
        if bool(sent[CROSS_ENTROPY][:, state[PENALTIES] == 0].any()):
            return "it has cross-entropies of penalties that have no solution"
        checked = (
            impossible_sums(sent[CROSS_ENTROPY][:, index], num_images, num_classes, multi_label=several)
            for index in known
        )
        return next((why for why in checked if why is not None), None)


@dataclass(frozen=True)
class ProbeClient(ClientAlgorithm):
    """A client that keeps the encoder as it is, and sends the sums and counts of its objective."""

    @property
    def sends_modules(self) -> bool:
        return False

    def frozen(self, ctx: Context) -> frozenset[str]:
        with on_meta_device():
            encoder = self.fresh_encoder(ctx)
        return frozenset(f"{ENCODER}.{name}" for name in encoder.state_dict())

    def reduced(self, ctx: Context) -> frozenset[str]:
        return frozenset((GRAM, MOMENT, RIGHT, HELD_OUT, CROSS_ENTROPY))


def fewest_images(config: RidgeProbeConfig, width: int) -> int:
    """Return the fewest labelled training images of a client, for representations of this width."""
    return 2 * width if config.min_images is None else config.min_images


def count_held_out(h_NH: torch.Tensor, labels: torch.Tensor, solutions: Solutions) -> Tensors:
    """Return the counts of right predictions of each solution (P,), that of all predictions (1,), and the solutions'
    sums of cross-entropies at each scale (2, P, S).

    Args:
        h_NH: the representations of held-out images.
        labels: their class numbers (N,), or the presence of several labels (N, C).
        solutions: a penalty of 0 stands for sums that did not determine weights; none of its predictions is right, and
            its cross-entropies are 0.
    """
    x_NX = torch.cat([h_NH.double(), h_NH.new_ones(len(h_NH), 1).double()], dim=1)
    right, losses = torch.zeros(NUM_PENALTIES, dtype=torch.int64), torch.zeros(_LOSSES, dtype=torch.float64)
    for index in solutions.penalties.nonzero().flatten().tolist():
        scores_NC = x_NX @ solutions.weights[index]
        hits = (scores_NC >= _THRESHOLD) == labels.bool() if labels.ndim == 2 else scores_NC.argmax(dim=1) == labels
        right[index] = hits.sum()
        losses[:, index] = cross_entropy_sums(scores_NC, labels)
    return {RIGHT: right, HELD_OUT: torch.tensor([labels.numel()]), CROSS_ENTROPY: losses}


def combine(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
    """Return the sums over the clients. The cross-entropies (K, 2, P, S) and the numbers of held-out predictions (K,)
    are those of each client, or, in fixed point, the sums of all clients as those of one."""
    if not is_fixed(ctx):
        found = {name: _added(name, updates) for name in (GRAM, MOMENT, RIGHT)}
        by_client = {HELD_OUT: torch.cat, CROSS_ENTROPY: torch.stack}
        return found | {name: put([each.load()[name] for each in updates]) for name, put in by_client.items()}, {}

    def sums(*names: str, fraction_bits: int) -> Tensors:
        sent = ({name: each.load()[name].double() for name in names} for each in updates)
        return sum_of(sent, len(updates), ctx, fraction_bits=fraction_bits)

    found = sums(GRAM, MOMENT, RIGHT, HELD_OUT, fraction_bits=COUNTED_BITS)
    found |= sums(CROSS_ENTROPY, fraction_bits=_LOSS_BITS)
    return found | {CROSS_ENTROPY: found[CROSS_ENTROPY][None]}, {}


def finish(found: Tensors, state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
    """Return the next state: the ten solutions from all sums, or the one that the counts choose and its scale."""
    if bool(state[PENALTIES].any()):
        return _chosen(found, state, ctx)
    gram, moment = found[GRAM], found[MOMENT]
    solutions = torch.zeros_like(state[SOLUTIONS])
    penalties = torch.zeros_like(state[PENALTIES])
    for index, penalty in enumerate(ridge_path(gram)):
        try:
            solutions[index] = ridge_solution(gram, moment, penalty)
        except ArtifactError:  # too small a penalty; a larger one determines the weights
            continue
        except FedSSLError as error:
            raise MethodError(f"the sums of the clients give no classifier: {error}") from error
        penalties[index] = penalty
    if not bool(penalties.any()):
        raise MethodError("the sums determine no classifier: is every representation 0?")
    first = max(_FIRST_CHOICE, int(penalties.nonzero()[0]))
    next_state = _classifier(penalties, solutions, first, 0.0, ctx)
    return next_state, {"ridge_penalty": float(penalties[first]), "probe_images": float(gram[-1, -1])}


def _chosen(found: Tensors, state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
    penalties, solutions, config = state[PENALTIES], state[SOLUTIONS], _config(ctx)
    right, total = found[RIGHT], int(found[HELD_OUT].sum())
    if not total:
        first = max(_FIRST_CHOICE, int(penalties.nonzero()[0]))
        return _classifier(penalties, solutions, first, 0.0, ctx), {"ridge_penalty": float(penalties[first])}
    best = int((right == right.max()).nonzero()[-1])
    num_classes = len(config.classes)
    num_images = [int(each) // (num_classes if config.multi_label else 1) for each in found[HELD_OUT]]
    losses = [each[:, best] for each in found[CROSS_ENTROPY]]
    scale, cross_entropy = best_scale(losses, num_images, num_classes, multi_label=config.multi_label)
    return _classifier(penalties, solutions, best, scale, ctx), {
        "ridge_penalty": float(penalties[best]),
        "held_out_accuracy": int(right[best]) / total,
        "held_out_cross_entropy": cross_entropy,
        "scale": scale,
    }


REDUCER = Reducer(combine, declares=None, finish=finish)


def _why_no_sums(gram: torch.Tensor, moment: torch.Tensor, num_images: int, least: int) -> str | None:
    try:
        require_sums(gram, moment, num_images)
    except ArtifactError as error:
        return str(error)
    if float(gram[-1, -1]) < least:
        return f"its sums are of {float(gram[-1, -1]):g} images, and the run needs {least} or more"
    return None


def _classifier(penalties: torch.Tensor, solutions: torch.Tensor, chosen: int, scale: float, ctx: Context) -> Tensors:
    """Return the state whose classifier gives logits.

    A scale of 0 means that it is not known, and 1 takes its place.
    """
    weights = (scale or 1.0) * solutions[chosen]
    bias = weights[-1] - ((scale or 1.0) * _THRESHOLD if _config(ctx).multi_label else 0.0)
    return {
        WEIGHT: weights[:-1].T.float().contiguous(),
        BIAS: bias.float(),
        PENALTIES: penalties,
        SOLUTIONS: solutions,
        SCALE: torch.tensor([scale], dtype=torch.float64),
    }


def _config(ctx: Context) -> RidgeProbeConfig:
    assert isinstance(ctx.spec.method, RidgeProbeConfig), "the reducer is that of ridge-probe"
    return ctx.spec.method


def _added(name: str, updates: Sequence[Update]) -> torch.Tensor:
    """Return the sum over the updates, in their order: floats in float64."""
    first, *others = updates
    total = first.load()[name].clone()
    for update in others:
        total += update.load()[name]
    return total


def _representations(modules: nn.ModuleDict, images: Images, ctx: Context) -> torch.Tensor:
    """Return h (N, H) of zero or more images."""
    if not len(images):
        return torch.zeros(0, encoder_width(modules), device=ctx.device)
    return embed([modules[ENCODER]], images, ctx)


def _solutions(modules: nn.ModuleDict) -> Solutions:
    return module_of(modules, PROBE, Solutions)
