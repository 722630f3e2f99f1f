"""Measures each update of a round: how far it lies from the broadcast, and whether it points the way the round moved.

Everything is summed in float64, in name order and tensor by tensor, so the numbers are the same wherever they are
computed, and whichever updates are measured together. An update of any size is read in constant memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from fedssl.aggregation.layerwise import is_variance
from fedssl.aggregation.mean import CHUNK, chunks
from fedssl.artifacts.dtypes import FLOATS
from fedssl.artifacts.tensors import FileTensors, Tensors
from fedssl.artifacts.weight_files import LEAST_VARIANCE
from fedssl.methods.api import Metrics, Update
from fedssl.protocol.measures import CENTER_NORM, CONTROL_NORM, COSINE, FEATURE_NORM, MEASURES, UPDATE_NORM
from fedssl.protocol.plan import ArtifactPlan, Kind

LARGEST = 1e18
"""An update with a larger norm is rejected, whatever the spec bounds: no training moves so far, and the squares of
larger weights overflow in float32, so that no client could train from their mean."""

_DIFFERENCES: Mapping[Kind, str] = {"weights": UPDATE_NORM, "centers": CENTER_NORM}
_FEATURES: tuple[Kind, ...] = ("similarity", "representations", "centroids", "dictionary")
_OTHER = "other"
_LEAST_VARIANCE, _COUNTED = "least_variance", "counted"
_MOST_COUNTED = 1 << 53
"""No training moves a counter further. Near 2^63 the counters of honest clients overflow, and none of their updates
fits the fixed-point scale any more, in this run or in one that starts from its weights."""
_ROWS = 4096
_NUM_THREADS, _MOST_TOGETHER = 2, 5  # updates that are measured at a time in each thread


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of an update's floating-point tensors, in name order, by the norm that they belong to. `variances` are
    BatchNorm's, which have a norm too. `counters`: the weights that are integers, as BatchNorm's number of batches."""

    differences: Mapping[str, tuple[str, ...]]
    sums: Mapping[str, tuple[str, ...]]
    features: tuple[str, ...]
    variances: tuple[str, ...]
    counters: tuple[str, ...]

    @classmethod
    def of(cls, plan: ArtifactPlan) -> "Layout":
        """Return the layout of a plan's updates."""
        sent = {spec.name: (spec.dtype, spec.shape) for spec in plan.broadcast}
        differences: dict[str, list[str]] = {}
        sums: dict[str, list[str]] = {}
        features = []
        counters = []
        for spec in sorted(plan.update, key=lambda spec: spec.name):
            if spec.dtype not in FLOATS:
                if spec.kind == "weights" and sent.get(spec.name) == (spec.dtype, spec.shape):
                    counters.append(spec.name)
                continue
            if spec.kind in _FEATURES:
                features.append(spec.name)
            elif spec.kind in _DIFFERENCES and sent.get(spec.name) == (spec.dtype, spec.shape):
                differences.setdefault(_DIFFERENCES[spec.kind], []).append(spec.name)
            else:
                sums.setdefault(CONTROL_NORM if spec.kind == "control" else _OTHER, []).append(spec.name)
        variances = tuple(name for name in differences.get(UPDATE_NORM, ()) if is_variance(name))
        return cls(_frozen(differences), _frozen(sums), tuple(features), variances, tuple(counters))

    @property
    def metrics(self) -> frozenset[str]:
        """The names of the norms that updates of this layout have."""
        names = {*self.differences, *self.sums} - {_OTHER}
        return frozenset(names | ({FEATURE_NORM} if self.features else set()))

    @property
    def weights(self) -> Sequence[str]:
        """The names of the weights that both the broadcast and the update hold."""
        return self.differences.get(UPDATE_NORM, ())


@dataclass(frozen=True, slots=True)
class Step:
    """The next broadcast, and how far its weights lie from the one before."""

    after: Tensors
    norm: float

    @classmethod
    def between(cls, before: Tensors, after: Tensors, layout: Layout) -> "Step":
        """Return the step from one broadcast to the next."""
        return cls(after, _distances([after], before, layout.weights, None)[0][0])


def measure_all(updates: Sequence[Update], broadcast: Tensors, layout: Layout, step: Step) -> list[Metrics]:
    """Return `measure` of each update, in their order.

    Those whose file can be opened again are read piece by piece, several together, in two threads. The others are
    measured one after the other, because each is in memory as a whole. Raises what opening an update raises.
    """
    found: dict[str, Metrics] = {}

    def measure_files(some: Sequence[Update]) -> None:
        with ExitStack() as files:
            opened = {each.client_id: files.enter_context(each.reopen()) for each in some if each.reopen is not None}
            known = {client_id: tensors for client_id, tensors in opened.items() if tensors is not None}
            found.update(zip(known, measure_together(list(known.values()), broadcast, layout, step), strict=True))

    files = [each for each in updates if each.reopen is not None]
    size = min(_MOST_TOGETHER, math.ceil(len(files) / _NUM_THREADS))
    # Each thread has its own number of MKL threads, and a scalar product by two threads has other bits than by one.
    with ThreadPoolExecutor(
        _NUM_THREADS, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    ) as threads:
        list(threads.map(measure_files, [files[at : at + size] for at in range(0, len(files), size or 1)]))
    return [
        found[each.client_id] if each.client_id in found else measure(each.load(), broadcast, layout, step)
        for each in updates
    ]


def measure(
    tensors: Mapping[str, torch.Tensor], broadcast: Tensors, layout: Layout, step: Step | None = None
) -> Metrics:
    """Return an update's norms, and its cosine to `step` if that is given and both have a length.

    A norm is infinite if one of the numbers is not finite. Each tensor is read once.
    """
    return measure_together([tensors], broadcast, layout, step)[0]


def measure_together(
    updates: Sequence[Mapping[str, torch.Tensor]], broadcast: Tensors, layout: Layout, step: Step | None
) -> list[Metrics]:
    """Return `measure` of each update. They share the work on the broadcast and the step, which is half of it.

    One piece of each `FileTensors` is in memory at a time.
    """
    if not updates:
        return []
    found: list[Metrics] = []
    for tensors in updates:
        own = {name: _length(tensors, names) for name, names in layout.sums.items()}
        if layout.features:
            own[FEATURE_NORM] = max(_longest_row(tensors[name]) for name in layout.features)
        if layout.variances:
            own[_LEAST_VARIANCE] = min(float(tensors[name].min()) for name in layout.variances)
        if layout.counters:
            own[_COUNTED] = max(_largest_step(tensors[name], broadcast[name]) for name in layout.counters)
        found.append(own)
    for metric, names in layout.differences.items():
        along = step if metric == UPDATE_NORM else None
        for own, (norm, product) in zip(found, _distances(updates, broadcast, names, along), strict=True):
            own[metric] = norm
            if along is not None and 0 < (lengths := norm * along.norm) < math.inf:
                own[COSINE] = max(-1.0, min(1.0, product / lengths))
    return found


def why_unusable(norms: Mapping[str, float]) -> str | None:
    """Return why an update with these norms cannot be used in any run, or None if it can.

    >>> why_unusable({"update_norm": 2.5}), why_unusable({"update_norm": 1e20})
    (None, 'its update_norm is 1e+20')
    """
    for name in sorted(norms.keys() - {COSINE, _LEAST_VARIANCE, _COUNTED}):
        if not norms[name] <= LARGEST:
            subject = "one of its tensors" if name == _OTHER else f"its {name}"
            return f"{subject} is {norms[name]:.6g}" if math.isfinite(norms[name]) else f"{subject} is not finite"
    if is_negative(least := norms.get(_LEAST_VARIANCE, 0.0)):
        return f"a variance of its BatchNorms is {least:.6g}"
    if (counted := norms.get(_COUNTED, 0.0)) > _MOST_COUNTED:
        return f"one of its counters has moved by {counted:.6g}"
    return None


def is_negative(variance: float) -> bool:
    """Return whether a variance of BatchNorm is further below 0 than rounding can explain.

    An encoder with such a variance embeds every image as NaN.
    """
    return variance < LEAST_VARIANCE


def recorded(measured: Mapping[str, float]) -> Metrics:
    """Return what is recorded of an update's measurements: the finite ones, as JSON requires."""
    return {name: value for name, value in measured.items() if name in MEASURES and math.isfinite(value)}


def row_norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the L2 norms of a tensor's rows, in float64; of a list of numbers, their absolute values."""
    exact = tensor.double()
    return exact.abs() if exact.ndim == 1 else exact.square().sum(dim=-1).sqrt()


def _frozen(names: Mapping[str, list[str]]) -> Mapping[str, tuple[str, ...]]:
    return {metric: tuple(own) for metric, own in names.items()}


def _distances(
    updates: Sequence[Mapping[str, torch.Tensor]], broadcast: Tensors, names: Sequence[str], step: Step | None
) -> list[tuple[float, float]]:
    """Return, for each update, the norm of its difference to the broadcast, and its scalar product with the step (0
    without one)."""
    size = min(CHUNK, max((broadcast[name].numel() for name in names), default=0))
    # Reused for each piece: with new buffers for each, the allocator would keep 30 MB and more per thread.
    origins, steps, differences = (torch.empty(size, dtype=torch.float64) for _ in range(3))
    squares: list[list[float]] = [[] for _ in updates]
    products: list[list[float]] = [[] for _ in updates]
    for name in names:
        after = [] if step is None else [step.after[name]]
        each_update = zip(*(_pieces(tensors, name) for tensors in updates), strict=True)
        for (old, *new), pieces in zip(chunks(broadcast[name], *after), each_update, strict=True):
            count = len(old)
            origin = origins[:count].copy_(old)
            along = [steps[:count].copy_(each).sub_(origin) for each in new]
            for index, piece in enumerate(pieces):
                difference = differences[:count].copy_(piece.view(count)).sub_(origin)
                squares[index].append(float(torch.dot(difference, difference)))
                products[index].extend(float(torch.dot(difference, each)) for each in along)
    return [(_root(own), sum(along)) for own, along in zip(squares, products, strict=True)]


def _pieces(tensors: Mapping[str, torch.Tensor], name: str) -> Iterator[torch.Tensor]:
    """Yield what `chunks` yields of a tensor."""
    if isinstance(tensors, FileTensors):
        return tensors.pieces(name, CHUNK)
    return (piece for (piece,) in chunks(tensors[name]))


def _length(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> float:
    return _root([float(piece.double().square().sum()) for name in names for piece in _pieces(tensors, name)])


def _largest_step(new: torch.Tensor, old: torch.Tensor) -> float:
    return float((new.double() - old.double()).abs().max()) if new.numel() else 0.0


def _longest_row(tensor: torch.Tensor) -> float:
    longest = [float(row_norms(rows).max()) for rows in torch.split(tensor, _ROWS) if rows.numel()]
    return max(longest, default=0.0) if all(map(math.isfinite, longest)) else math.inf


def _root(squares: Sequence[float]) -> float:
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.inf
