"""Linear probe: the accuracy of a linear classifier on frozen representations.

Each paper trains it in its own way; :data:`PROBES` holds their settings by name. `fast` is not one of them: it solves
the regularised problem to convergence with L-BFGS, which takes about a second instead of minutes, needs no learning
rate, and depends neither on the order of the data nor on the scale of the representations. docs/evaluation.md shows
how it agrees with the papers' settings.

Every classifier starts from zero weights. Published code draws small random ones, but the problem is convex.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl import optimizers
from fedssl.data import ImageData, normalize, random_view, to_float
from fedssl.evaluation.features import extract_features, in_eval_mode, labels_of, require_finite
from fedssl.precision import exact_float32
from fedssl.protocol.data import AugmentationConfig, DataConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How the linear classifier is trained.

    Attributes:
        optimizer: `lbfgs` runs on the whole set; the others on batches.
        standardise: subtract the mean and divide by the standard deviation of each training feature first.
        l2: `lbfgs` only: the objective is the mean cross-entropy + (l2 / 2N) ||W||^2, biases left out: scikit-learn's
            `LogisticRegression(C=1 / l2)`. With two classes it is `C=2 / l2`, because scikit-learn then has one weight
            vector, the difference of the two.
        max_iterations: `lbfgs` only.
        learning_rate, momentum (SGD only), weight_decay, batch_size, epochs: for the other optimisers.
        schedule: `steps` multiplies the learning rate by 0.1 at `milestones` (epochs), `cosine` decreases it to 0.
        shuffle: with False the order of the data is kept, as in EasyFL's probe.
        augmentation: takes a new random view of every training image in every epoch; with None representations are
            computed once.
        seed: the seed of the order and of the views; `lbfgs` uses no random numbers.
    """

    optimizer: Literal["lbfgs", "adam", "adamw", "sgd"] = "lbfgs"
    standardise: bool = True
    l2: float = 30.0
    max_iterations: int = 100
    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 512
    epochs: int = 100
    schedule: Literal["constant", "steps", "cosine"] = "constant"
    milestones: tuple[int, ...] = ()
    shuffle: bool = True
    augmentation: AugmentationConfig | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The accuracies of a linear classifier, as shares of the test set, 0..1.

    Attributes:
        accuracy: after the last epoch.
        best_accuracy: the best of all epochs, chosen on the test set as in some papers. Report it only next to the
            last.
        best_epoch: the first epoch that reached it, counted from 1.
        train_accuracy: the accuracy of the final classifier on the training set.
        num_epochs: the number of epochs, or of iterations of L-BFGS, whose best is the last.
    """

    accuracy: float
    best_accuracy: float
    best_epoch: int
    train_accuracy: float
    num_epochs: int

    @property
    def chosen(self) -> str:
        """A sentence that describes how `best_accuracy` was chosen."""
        if self.best_epoch == self.num_epochs:
            return "the last is the best"
        return f"last: epoch {self.num_epochs}; best: epoch {self.best_epoch}, chosen on the test set"


_RESIZED_CROP_AND_FLIP = AugmentationConfig(min_scale=0.08, flip=0.5, jitter=0, greyscale=0)

PROBES: Final = MappingProxyType(
    {
        "fast": ProbeSettings(),
        "fedx": ProbeSettings(
            optimizer="adam", standardise=False, learning_rate=1e-3, weight_decay=1e-6, batch_size=64, epochs=100
        ),
        # As in the code; the paper says 100 epochs.
        "fedu": ProbeSettings(
            optimizer="adam", standardise=False, learning_rate=3e-3, batch_size=2048, epochs=200, shuffle=False
        ),
        "ssd": ProbeSettings(optimizer="adam", standardise=False, learning_rate=3e-3, batch_size=512, epochs=200),
        # AdamW's weight decay is not stated; this is torch's default.
        "fedrlc": ProbeSettings(
            optimizer="adamw", standardise=False, learning_rate=0.022, weight_decay=0.01, batch_size=512, epochs=200
        ),
        "flesd": ProbeSettings(
            optimizer="sgd", standardise=False, learning_rate=0.03, momentum=0.9, batch_size=256, epochs=60,
            schedule="steps", milestones=(30, 50), augmentation=_RESIZED_CROP_AND_FLIP,
        ),
        "orchestra": ProbeSettings(
            optimizer="sgd", standardise=False, learning_rate=30.0, momentum=0.9, batch_size=256, epochs=50,
            schedule="cosine",
        ),
    }
)  # fmt: skip
"""Settings by the paper or code that they come from."""


def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    settings: ProbeSettings = PROBES["fast"],
    on_progress: Callable[[float], None] = lambda share: None,
) -> ProbeResult:
    """Train a linear classifier on representations, and test it.

    Args:
        train_features, test_features: float (N, H), on one device, where everything is computed.
        train_labels, test_labels: int64 (N,).
        settings: one of :data:`PROBES`, or your own, without an augmentation: :func:`probe_encoder` accepts those.
        on_progress: called after every epoch with the share that is done.

    The result depends only on the arguments; no global random state is read or changed.

    Raises:
        ValueError: the features are not finite, or the settings have an augmentation.
    """
    if settings.augmentation is not None:
        raise ValueError("these settings augment the training images: call probe_encoder, which takes images")
    train_x, test_x = train_features.detach().float(), test_features.detach().float()
    require_finite(train_x, test_x)
    train_y, test_y = train_labels.to(train_x.device), test_labels.to(train_x.device)
    if settings.standardise:
        train_x, test_x = _standardised(train_x, test_x)
    num_classes = int(max(train_y.max(), test_y.max())) + 1
    classifier = _zero_linear(train_x.shape[1], num_classes, train_x.device)
    if settings.optimizer == "lbfgs":
        num_iterations = _solve(classifier, train_x, train_y, settings)
        accuracies = [_accuracy(classifier, test_x, test_y)]
        return ProbeResult(
            accuracies[0], accuracies[0], num_iterations, _accuracy(classifier, train_x, train_y), num_iterations
        )
    accuracies = []
    for epoch in _epochs(classifier, train_x.__getitem__, train_y, settings):
        accuracies.append(_accuracy(classifier, test_x, test_y))
        on_progress((epoch + 1) / settings.epochs)
    return _result(accuracies, _accuracy(classifier, train_x, train_y))


@dataclass(frozen=True, slots=True)
class FittedProbe:
    """A linear classifier of standardised features: `(x - mean) * scale`.

    Attributes:
        classifier: from standardised features (N, H) to logits (N, C).
        mean, scale: (H,) of the training features.
        is_multi_label: whether an image may have several labels.
    """

    classifier: nn.Linear
    mean: Tensor
    scale: Tensor
    is_multi_label: bool

    def scores(self, features: Tensor) -> Tensor:
        """Return the probabilities (N, C) for features (N, H). Raises ValueError if these are not finite."""
        x_NH = features.detach().float()
        require_finite(x_NH)
        with torch.no_grad():
            logits_NC: Tensor = self.classifier((x_NH - self.mean) * self.scale)
        return logits_NC.sigmoid() if self.is_multi_label else logits_NC.softmax(dim=1)

    def rows(self) -> Tensor:
        """Return the weights for features that are not standardised, then the bias: float32 (C, H + 1)."""
        weight = self.classifier.weight.detach().double() * self.scale.double()
        bias = self.classifier.bias.detach().double() - weight @ self.mean.double()
        return torch.cat([weight, bias[:, None]], dim=1).float()


def fit_probe(train_features: Tensor, targets: Tensor) -> FittedProbe:
    """Train the classifier of `PROBES["fast"]`.

    Args:
        train_features: float (N, H), on the device where everything is computed.
        targets: class numbers (N,), for probabilities that add up to 1; or the presence (N, C) of several labels, of 0
            and 1, each with a probability of its own, by the mean over images of the sum of binary cross-entropies.

    Raises:
        ValueError: the features are not finite.
    """
    train_x = train_features.detach().float()
    require_finite(train_x)
    settings, targets = PROBES["fast"], targets.to(train_x.device)
    mean, scale = _moments(train_x)
    train_x = (train_x - mean) * scale
    num_classes = targets.shape[1] if targets.ndim == 2 else int(targets.max()) + 1
    classifier = _zero_linear(train_x.shape[1], num_classes, train_x.device)
    if targets.ndim == 1:
        _solve(classifier, train_x, targets, settings)
    else:
        _solve(classifier, train_x, targets.float(), settings, _binary_cross_entropies, 4.0)
    return FittedProbe(classifier, mean, scale, targets.ndim == 2)


def _binary_cross_entropies(logits_NC: Tensor, targets_NC: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits_NC, targets_NC, reduction="none").sum(dim=1).mean()


def probe_encoder(
    encoder: nn.Module,
    train: ImageData,
    test: ImageData,
    config: DataConfig,
    *,
    settings: ProbeSettings = PROBES["fast"],
    device: torch.device | str = "cpu",
    on_progress: Callable[[float], None] = lambda share: None,
) -> ProbeResult:
    """Train a linear classifier on an encoder's representations of labelled images, and test it.

    If the settings have an augmentation, the frozen encoder, in eval mode, gets a new view of every training image in
    every epoch.

    Raises:
        DataError: a set has no labels, or not the shape of `config`.
        ValueError: the encoder's representations are not finite.
    """
    train_y, test_y = labels_of(train).to(device), labels_of(test).to(device)
    train_x, test_x = (extract_features(encoder, images, config, device) for images in (train, test))
    augmentation = settings.augmentation
    if augmentation is None:
        return linear_probe(train_x, train_y, test_x, test_y, settings=settings, on_progress=on_progress)
    require_finite(train_x, test_x)
    generator = torch.Generator().manual_seed(settings.seed)

    def views(rows: Tensor) -> Tensor:
        x_BCHW = to_float(torch.tensor(train.images[rows.cpu().numpy()]).to(device))
        with torch.no_grad():
            h_BH: Tensor = encoder(normalize(random_view(x_BCHW, augmentation, generator), config))
        return h_BH.float()

    num_classes = int(max(train_y.max(), test_y.max())) + 1
    classifier = _zero_linear(train_x.shape[1], num_classes, train_x.device)
    accuracies = []
    with in_eval_mode(encoder), exact_float32(device):
        for epoch in _epochs(classifier, views, train_y, settings):
            accuracies.append(_accuracy(classifier, test_x, test_y))
            on_progress((epoch + 1) / settings.epochs)
    return _result(accuracies, _accuracy(classifier, train_x, train_y))


def _result(accuracies: list[float], train_accuracy: float) -> ProbeResult:
    best = max(accuracies)
    return ProbeResult(accuracies[-1], best, accuracies.index(best) + 1, train_accuracy, len(accuracies))


def _standardised(train_NH: Tensor, test_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sets minus the training set's mean, divided by its standard deviation."""
    mean, scale = _moments(train_NH)
    return (train_NH - mean) * scale, (test_NH - mean) * scale


def _moments(train_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (H,), and the factor that gives a feature a standard deviation of 1, or 0 if it is dead."""
    mean, std = train_NH.mean(dim=0), train_NH.std(dim=0, correction=0)
    # A dead feature has no information: dividing by its deviation would only enlarge rounding errors.
    return mean, torch.where(std > 1e-6 * std.max(), 1 / std, torch.zeros_like(std))


def _zero_linear(in_dim: int, out_dim: int, device: torch.device) -> nn.Linear:
    # Created without values first, because torch would draw the usual first weights from the global generator.
    classifier = nn.Linear(in_dim, out_dim, device="meta").to_empty(device=device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return classifier


def _solve(
    classifier: nn.Linear,
    x_NH: Tensor,
    labels_N: Tensor,
    settings: ProbeSettings,
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    flatness: float | None = None,
) -> int:
    """Minimise the mean cross-entropy + (l2 / 2N) ||W||^2, and return the number of iterations.

    It uses coordinates in which the Hessian at zero weights, X^T X / NK + l2 / N for every class, is the identity.
    Otherwise correlated features make L-BFGS slow. The minimum is the same. `flatness` takes the place of K for a
    cross-entropy other than that of K classes.
    """
    l2 = settings.l2 / len(x_NH)
    eigenvalues, vectors = torch.linalg.eigh((x_NH.T @ x_NH).double() / len(x_NH))
    curvature_H = eigenvalues.clamp_min(0) / (flatness or classifier.out_features) + max(l2, 1e-9)
    basis_HH = (vectors * curvature_H.rsqrt()).float()
    rotated_NH = x_NH @ basis_HH
    optimizer = optimizers.LBFGS(
        classifier.parameters(),
        max_iter=settings.max_iterations,
        history_size=20,
        tolerance_grad=1e-4,
        tolerance_change=1e-7,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = (classifier.weight @ basis_HH.T).square().sum()
        loss: Tensor = cross_entropy(classifier(rotated_NH), labels_N) + l2 / 2 * penalty
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        classifier.weight.copy_(classifier.weight @ basis_HH.T)
    return int(optimizer.state[classifier.weight]["n_iter"])


def _epochs(
    classifier: nn.Linear, inputs: Callable[[Tensor], Tensor], labels_N: Tensor, settings: ProbeSettings
) -> Iterator[int]:
    """Train one epoch per item, and yield its index. `inputs` maps row numbers (B,) to features (B, H)."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = _optimizer(classifier, settings)
    num_rows = len(labels_N)
    for epoch in range(settings.epochs):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _decay(epoch, settings)
        order = torch.randperm(num_rows, generator=generator) if settings.shuffle else torch.arange(num_rows)
        for rows in torch.split(order.to(labels_N.device), settings.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(classifier(inputs(rows)), labels_N[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield epoch


def _optimizer(classifier: nn.Linear, settings: ProbeSettings) -> torch.optim.Optimizer:
    parameters, lr, decay = classifier.parameters(), settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return optimizers.SGD(parameters, lr=lr, momentum=settings.momentum, weight_decay=decay)
    if settings.optimizer == "adam":
        return optimizers.Adam(parameters, lr=lr, weight_decay=decay)
    return optimizers.AdamW(parameters, lr=lr, weight_decay=decay)


def _decay(epoch: int, settings: ProbeSettings) -> float:
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / settings.epochs))
    if settings.schedule == "steps":
        return float(0.1 ** sum(epoch >= milestone for milestone in settings.milestones))
    return 1.0


def _accuracy(classifier: nn.Linear, x_NH: Tensor, labels_N: Tensor) -> float:
    with torch.no_grad():
        return int((classifier(x_NH).argmax(dim=1) == labels_N).sum()) / len(labels_N)
