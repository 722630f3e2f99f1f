"""Linear probe: how well a linear classifier does on frozen representations.

The papers train it in ways of their own; :data:`PROBES` holds their settings by name. The default is none of them: it
solves the regularised problem to the end with L-BFGS, which takes about a second instead of minutes, has no learning
rate to choose and does not depend on the order of the data.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How the linear classifier is trained.

    Attributes:
        optimizer: `lbfgs` runs on the whole set; the others on shuffled batches.
        standardise: subtract the mean and divide by the standard deviation of each training feature first.
        l2: `lbfgs` only: the objective has (l2/2)||W||^2, biases left out.
        max_iterations: `lbfgs` only.
        learning_rate, momentum (SGD only), weight_decay, batch_size, epochs: of the other optimisers.
        schedule: `steps` multiplies the learning rate by 0.1 at `milestones` (epochs), `cosine` takes it to 0.
        shuffle: False goes through the data in its order, as EasyFL's probe does.
        seed: of the order and of the first weights; `lbfgs` uses no random numbers.
    """

    optimizer: Literal["lbfgs", "adam", "adamw", "sgd"] = "lbfgs"
    standardise: bool = True
    l2: float = 3e-3
    max_iterations: int = 200
    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 512
    epochs: int = 100
    schedule: Literal["constant", "steps", "cosine"] = "constant"
    milestones: tuple[int, ...] = ()
    shuffle: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Accuracies are shares of the test set, 0..1.

    Attributes:
        accuracy: of the classifier as training left it.
        best_accuracy: the best of all epochs, chosen on the test set as some papers do: report it only beside the last.
        train_accuracy: of the final classifier on the training set.
        num_epochs: epochs, or iterations of L-BFGS; there `best_accuracy` is `accuracy`.
    """

    accuracy: float
    best_accuracy: float
    train_accuracy: float
    num_epochs: int


PROBES: Final = MappingProxyType(
    {
        "default": ProbeSettings(),
        "fedx": ProbeSettings(
            optimizer="adam", standardise=False, learning_rate=1e-3, weight_decay=1e-6, batch_size=64, epochs=100
        ),
        "fedu": ProbeSettings(
            optimizer="adam", standardise=False, learning_rate=3e-3, batch_size=2048, epochs=200, shuffle=False
        ),
        "ssd": ProbeSettings(optimizer="adam", standardise=False, learning_rate=3e-3, batch_size=512, epochs=200),
        # AdamW's weight decay is not stated; this is torch's default.
        "fedrlc": ProbeSettings(
            optimizer="adamw", standardise=False, learning_rate=0.022, weight_decay=0.01, batch_size=512, epochs=200
        ),
        # FLESD augments the images of the probe; on features taken once this is its optimiser without that.
        "flesd": ProbeSettings(
            optimizer="sgd", standardise=False, learning_rate=0.03, momentum=0.9, batch_size=256, epochs=60,
            schedule="steps", milestones=(30, 50),
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
    settings: ProbeSettings = PROBES["default"],
) -> ProbeResult:
    """Trains a linear classifier on representations and tests it.

    Args:
        train_features, test_features: float (N, H), on one device, which does the work.
        train_labels, test_labels: int64 (N,).
        settings: one of :data:`PROBES` or one's own.

    The result depends on the arguments alone; no global random state is read or changed.
    """
    train_x, test_x = train_features.detach().float(), test_features.detach().float()
    if settings.standardise:
        mean, std = train_x.mean(dim=0), train_x.std(dim=0, correction=0)
        # A dead feature carries nothing: dividing by its deviation would only enlarge rounding errors.
        scale = torch.where(std > 1e-6 * std.max(), 1 / std, torch.zeros_like(std))
        train_x, test_x = (train_x - mean) * scale, (test_x - mean) * scale
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    classifier = _zero_linear(train_x.shape[1], num_classes, train_x.device)
    if settings.optimizer == "lbfgs":
        num_epochs = _solve(classifier, train_x, train_labels, settings)
        best = _accuracy(classifier, test_x, test_labels)
    else:
        num_epochs, best = settings.epochs, 0.0
        for _ in _epochs(classifier, train_x, train_labels, settings):
            best = max(best, _accuracy(classifier, test_x, test_labels))
    return ProbeResult(
        accuracy=_accuracy(classifier, test_x, test_labels),
        best_accuracy=best,
        train_accuracy=_accuracy(classifier, train_x, train_labels),
        num_epochs=num_epochs,
    )


def _zero_linear(in_dim: int, out_dim: int, device: torch.device) -> nn.Linear:
    """Zeros: the problem is convex, and they need no random numbers."""
    # Made without values first, since torch would draw the usual first weights from the global generator.
    classifier = nn.Linear(in_dim, out_dim, device="meta").to_empty(device=device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return classifier


def _solve(classifier: nn.Linear, x_NH: Tensor, labels_N: Tensor, settings: ProbeSettings) -> int:
    """Minimises the mean cross-entropy + (l2/2)||W||^2; returns the number of iterations."""
    optimizer = torch.optim.LBFGS(
        classifier.parameters(),
        max_iter=settings.max_iterations,
        history_size=20,
        tolerance_grad=1e-5,
        tolerance_change=1e-7,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(classifier(x_NH), labels_N) + settings.l2 / 2 * classifier.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return int(optimizer.state[classifier.weight]["n_iter"])


def _epochs(classifier: nn.Linear, x_NH: Tensor, labels_N: Tensor, settings: ProbeSettings) -> Iterator[int]:
    """Trains an epoch each time it is asked for the next."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = _optimizer(classifier, settings)
    for epoch in range(settings.epochs):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _decay(epoch, settings)
        order = torch.randperm(len(x_NH), generator=generator) if settings.shuffle else torch.arange(len(x_NH))
        order = order.to(x_NH.device)
        for start in range(0, len(order), settings.batch_size):
            rows = order[start : start + settings.batch_size]
            optimizer.zero_grad()
            F.cross_entropy(classifier(x_NH[rows]), labels_N[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield epoch


def _optimizer(classifier: nn.Linear, settings: ProbeSettings) -> torch.optim.Optimizer:
    parameters, lr, decay = classifier.parameters(), settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=settings.momentum, weight_decay=decay)
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=decay)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)


def _decay(epoch: int, settings: ProbeSettings) -> float:
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / settings.epochs))
    if settings.schedule == "steps":
        return float(0.1 ** sum(epoch >= milestone for milestone in settings.milestones))
    return 1.0


def _accuracy(classifier: nn.Linear, x_NH: Tensor, labels_N: Tensor) -> float:
    with torch.no_grad():
        return int((classifier(x_NH).argmax(dim=1) == labels_N).sum()) / len(labels_N)
