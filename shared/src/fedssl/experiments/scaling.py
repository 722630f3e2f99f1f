"""Scale a paper's run down without changing the subject of the comparison.

The clients, their share in a round, the concentration of the partition and at least 20 of the paper's rounds stay. The
number of images, the encoder's width, epochs and finally seeds are reduced. Other changes follow from these: heads
shrink in proportion to the encoder, batches leave a client some steps per epoch, and moving averages become faster, so
that they can follow in fewer steps.
"""

from dataclasses import dataclass

from fedssl.experiments.costs import num_images
from fedssl.experiments.overlays import Values, changed, overlay
from fedssl.experiments.papers import TableCell
from fedssl.models import build_encoder
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.methods.fedca import FedCAConfig
from fedssl.protocol.methods.reducers import EUAConfig
from fedssl.protocol.model import EncoderConfig, MLPConfig
from fedssl.protocol.runs import RunSpec

MIN_ROUNDS = 20
MAX_LABELLED = 10_000
SMALL_IMAGE = 32
MIN_HEAD = 64

NARROWER = tuple(EncoderConfig(widths=widths) for widths in ((32, 64, 128, 256), (32, 64, 128), (16, 32, 64)))
"""The replacements for a ResNet that is too slow, the largest first."""

_MIN_BATCH, _STEPS_AN_EPOCH = 16, 8
_HORIZON = 10  # a moving average looks back over at most a tenth of the steps
_FEW_STEPS, _LIVELY = 2000, 0.05  # with the papers' rates, BYOL's target hardly moves in few steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of a paper's run remains, as shares of the paper's numbers.

    Attributes:
        encoder: None keeps the paper's encoder.
        num_evaluations: how often the encoder is evaluated during training.
    """

    encoder: EncoderConfig | None = None
    rounds: float = 1.0
    epochs: float = 1.0
    images: float = 1.0
    num_evaluations: int = 5


def scaled(cell: TableCell, scale: Scale, device: str = "cpu") -> RunSpec:
    """Return the cell's spec at a scale. It is evaluated by the fast probe on at most 10,000 labels."""
    spec = cell.spec
    rounds = (
        spec.num_rounds if spec.num_rounds <= MIN_ROUNDS else max(MIN_ROUNDS, round(scale.rounds * spec.num_rounds))
    )
    epochs = spec.training.local_epochs and max(1, round(scale.epochs * spec.training.local_epochs))
    values: Values = {
        "num_rounds": rounds,
        "training": {"local_epochs": epochs},
        "partition": _images(spec, scale.images),
        "evaluation": {
            "settings": "fast",
            "max_train": MAX_LABELLED,
            "every": max(1, rounds // max(1, scale.num_evaluations)),
        },
    }
    if device == "cpu":
        values["training"]["precision"] = "fp32"
    if scale.encoder is not None:
        values = overlay(values, _narrower(spec, scale.encoder))
    smaller = changed(spec, values)
    return changed(smaller, _following(smaller, cell.public_client, scale))


def steps(spec: RunSpec, public_client: str | None = None) -> float:
    """Return the approximate number of local steps of one client in the whole run."""
    rounds = spec.num_rounds * spec.cohort.fraction
    return max(1.0, rounds * spec.training.num_epochs * _per_client(spec, public_client) / spec.training.batch_size)


def _images(spec: RunSpec, share: float) -> Values:
    held = num_images(spec)
    if held is None or spec.partition is None or share >= 1:
        return {}
    return {"max_images": max(1, round(share * held / spec.partition.share))}


def _per_client(spec: RunSpec, public_client: str | None) -> float:
    held = num_images(spec, public_client)
    if held is None or spec.partition is None:
        return float(spec.training.batch_size)
    clients = 1 if spec.partition.pooled else spec.partition.num_clients - (public_client is not None)
    return held / clients


def _narrower(spec: RunSpec, encoder: EncoderConfig) -> Values:
    """Return settings with another encoder, heads in proportion to its width, and images that are not too large."""
    ratio = encoder.feature_dim / spec.model.encoder.feature_dim

    def head(config: MLPConfig) -> Values:
        hidden = [_in_proportion(width, ratio) for width in config.hidden_dims]
        return {"hidden_dims": hidden, "out_dim": _in_proportion(config.out_dim, ratio)}

    model: Values = {"encoder": encoder.model_dump(mode="json")}
    if spec.model.projector is not None:
        model["projector"] = head(spec.model.projector)
    if "predictor" in spec.method.traits:
        model["predictor"] = head(spec.model.predictor)
    data = {"image_size": min(spec.data.image_size, SMALL_IMAGE), "cache_size": None}
    values: Values = {"model": model, "data": data}
    if isinstance(spec.method.reducer, EUAConfig):  # the length of its step does not depend on the model's size
        length = (_num_weights(encoder, spec) / _num_weights(spec.model.encoder, spec)) ** 0.5
        values["method"] = {"reducer": {"server_learning_rate": spec.method.reducer.server_learning_rate * length}}
    return values


def _following(spec: RunSpec, public_client: str | None, scale: Scale) -> Values:
    """Return the changes that follow from fewer images, rounds and epochs."""
    per_client = _per_client(spec, public_client)
    batch = min(spec.training.batch_size, max(_MIN_BATCH, _power_of_two(per_client / _STEPS_AN_EPOCH)))
    values: Values = {"training": {"batch_size": batch}, "method": {}}
    num_steps = steps(changed(spec, values), public_client)
    for name in ("target_momentum", "key_momentum"):
        if (momentum := getattr(spec.method, name, None)) is not None:
            values["method"][name] = _followed(momentum, num_steps)
    rate = spec.training.optimizer.learning_rate
    if "target" in spec.method.traits and num_steps < _FEW_STEPS and rate < _LIVELY:
        values["training"]["optimizer"] = {"learning_rate": _LIVELY}
    if spec.public_data is not None:
        values = overlay(values, _public(spec, public_client, scale))
    return values


def _public(spec: RunSpec, public_client: str | None, scale: Scale) -> Values:
    """Return settings with fewer public images, and with a queue and passes that fit."""
    assert spec.public_data is not None, "only called for methods with public images"
    given = spec.public_data.num_images
    per_client = round(_per_client(spec, public_client))
    size = min(given, per_client) if public_client is not None else max(500, round(scale.images * given))
    values: Values = {"public_data": {"num_images": size}}
    reducer = spec.method.reducer
    if isinstance(reducer, DistillationConfig):
        queue = fitting_queue(reducer, size)
        epochs = max(1, round(scale.epochs * reducer.num_epochs))
        momentum = _followed(reducer.momentum, epochs * size / queue["batch_size"])
        values["method"] = {"reducer": {**queue, "num_epochs": epochs, "momentum": momentum}}
    if isinstance(spec.method, FedCAConfig):
        share = spec.method.dictionary_size * scale.images
        values["method"] = {"dictionary_size": max(128, round(share)), "client_dictionary_size": 64}
    return values


def fitting_queue(reducer: DistillationConfig, num_images: int) -> dict[str, int]:
    """Return the sizes of a queue that the public images fill a few times per epoch and that holds a few batches."""
    anchors = min(reducer.num_anchors, _power_of_two(num_images / 4))
    return {"num_anchors": anchors, "batch_size": min(reducer.batch_size, max(2, anchors // 4))}


def _followed(momentum: float, num_steps: float) -> float:
    return round(min(momentum, max(0.5, 1 - _HORIZON / num_steps)), 4)


def _in_proportion(width: int, ratio: float) -> int:
    return max(min(width, MIN_HEAD), round(width * ratio))


def _power_of_two(limit: float) -> int:
    """Return the largest power of two that is at most `limit`, and at least 2."""
    power = 2
    while 2 * power <= limit:
        power *= 2
    return power


def _num_weights(encoder: EncoderConfig, spec: RunSpec) -> int:
    with on_meta_device():
        network = build_encoder(encoder, spec.data.channels, spec.data.image_size)
    return sum(parameter.numel() for parameter in network.parameters())
