"""The papers' evaluation settings against the fast ones: accuracy, difference, seconds.

    python tests/bench/bench_evaluation.py                       a shortly trained encoder, and an untrained one
    python tests/bench/bench_evaluation.py MODEL.safetensors     your own encoders, with spec.yaml next to them
        --labels 0 --settings ssd,fedx --semi 1 --transfer digits --solver
    make bench ARGS="-k evaluation -s"                           a small part, asserted

Every setting sees the same labels. A difference within the noise of the test set, two standard deviations of an
accuracy on as many images, does not count. Times are those of one thread. They are only for information, because other
work on the machine affects them.
"""

import argparse
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from fedssl.artifacts.tensors import load_tensors, save_tensors
from fedssl.cli.datasets.fetching import data_folder
from fedssl.cli.specs import read_spec
from fedssl.data import find_fashion_mnist
from fedssl.evaluation import (
    FINE_TUNINGS,
    PROBES,
    TRANSFERS,
    FineTuneResult,
    ProbeResult,
    extract_features,
    labels_of,
    linear_probe,
    probe_encoder,
    semi_supervised,
    transfer,
)
from fedssl.evaluation.suite import Labelled, load_encoder, load_labelled
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import INITIAL, MODEL, SPEC, write_spec
from fedssl.simulation import simulate

EXAMPLES = Path(__file__).parents[2] / "examples"
PAPERS = ("fedx", "fedu", "ssd", "fedrlc", "flesd")


@dataclass(frozen=True)
class Line:
    """The result of one setting on one encoder."""

    encoder: str
    what: str
    name: str
    last: float
    best: float
    seconds: float

    def text(self, fast: "Line", num_test: int) -> str:
        """Return a row of the table with the difference between `fast` and this setting, both after the last epoch."""
        noise = 2 * math.sqrt(self.last * (1 - self.last) / num_test)
        difference = 100 * (fast.last - self.last)
        verdict = "agrees" if abs(difference) <= 100 * noise else ""
        return (
            f"{self.encoder:<12}{self.what:<22}{self.name:<16}{100 * self.last:>8.2f}{100 * self.best:>8.2f}"
            f"{difference:>+8.2f}{100 * noise:>8.2f}{self.seconds:>9.1f}  {verdict}"
        )


HEADER = f"{'encoder':<12}{'protocol':<22}{'settings':<16}{'last':>8}{'best':>8}{'fast -':>8}{'noise':>8}{'seconds':>9}"


def timed(encoder: str, what: str, name: str, take: Callable[[], "ProbeResult | FineTuneResult"]) -> Line:
    """Run a protocol, and return its result and how long it took."""
    started = time.perf_counter()
    found = take()
    return Line(encoder, what, name, found.accuracy, found.best_accuracy, time.perf_counter() - started)


def train_shortly(folder: Path, rounds: int) -> list[Path]:
    """Train the demo's spec for a few rounds, or that of digits if Fashion-MNIST cannot be found.

    Returns the paths of the trained model and of the initial one.
    """
    example = "demo.toml" if find_fashion_mnist(data_folder()) else "digits.toml"
    result = simulate(read_spec(str(EXAMPLES / example), [f"num_rounds={rounds}"]), data_root=data_folder())
    write_spec(result.spec, folder / SPEC)
    save_tensors(result.model, folder / MODEL)
    save_tensors(result.initial, folder / INITIAL)
    return [folder / MODEL, folder / INITIAL]


def opened(path: Path) -> tuple[torch.nn.Module, RunSpec]:
    """Return a model's encoder and its spec."""
    spec = read_spec(str(path.parent / SPEC))
    return load_encoder(load_tensors(path), spec), spec


def probes(path: Path, images: Labelled, settings: tuple[str, ...]) -> Iterator[Line]:
    """Yield the results of the linear probe; `fast` comes first."""
    encoder, spec = opened(path)
    sides = [s for x in (images.train, images.test) for s in (extract_features(encoder, x, spec.data), labels_of(x))]
    what = f"probe, {len(images.train):,} labels"
    for name in ("fast", *settings):
        if (chosen := PROBES[name]).augmentation is None:
            yield timed(path.stem, what, name, partial(linear_probe, *sides, settings=chosen))
        else:
            whole = partial(probe_encoder, encoder, images.train, images.test, spec.data, settings=chosen)
            yield timed(path.stem, what, name, whole)


def tunings(path: Path, images: Labelled, settings: tuple[str, ...], share: float, seed: int) -> Iterator[Line]:
    """Yield the results of semi-supervised fine-tuning; `fast` comes first."""
    encoder, spec = opened(path)
    tune = partial(semi_supervised, encoder, images.train, images.test, spec.data, share)
    what = f"{100 * share:g} % labels, seed {seed}"
    for name in ("fast", *(name for name in settings if name in FINE_TUNINGS)):
        yield timed(path.stem, what, name, partial(tune, settings=dataclasses.replace(FINE_TUNINGS[name], seed=seed)))


def transfers(path: Path, target: str) -> Iterator[Line]:
    """Yield the results of fine-tuning the whole network on another data set; `fast` comes first."""
    encoder, spec = opened(path)
    images = load_labelled(target, spec.data, max_train=10_000, max_test=None, seed=0, root=data_folder())
    for name, tuning in TRANSFERS.items():
        tune = partial(transfer, encoder, images.train, images.test, spec.data, tuning=tuning)
        yield timed(path.stem, f"tuned on {target}", name, lambda tune=tune: tune().fine_tuned)  # type: ignore[misc]


def solver() -> None:
    """Print how long `fast` takes by size, on random clusters, which it can learn."""
    for num, width in ((10_000, 256), (10_000, 512), (50_000, 512)):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(num) % 10
        mixing = torch.randn(width, width, generator=generator) / math.sqrt(width)
        centers = 0.15 * torch.randn(10, width, generator=generator)
        features = (centers[labels] + torch.randn(num, width, generator=generator)) @ mixing
        line = timed("-", f"{num:,} x {width}", "fast", partial(linear_probe, features, labels, features, labels))
        print(f"fast, {line.what}: {line.seconds:.2f} s on one thread")  # noqa: T201


def show(lines: Iterator[Line], num_test: int) -> None:
    """Print each row of the table as soon as it is measured."""
    fast = None
    for line in lines:
        fast = fast or line
        print(line.text(fast, num_test), flush=True)  # noqa: T201


def test_the_fast_probe_is_as_accurate_as_the_papers_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The encoder is trained, because on an untrained one the papers' own settings differ by ten points."""
    torch.set_num_threads(1)
    model = train_shortly(tmp_path, 3)[0]
    spec = read_spec(str(tmp_path / SPEC))
    assert spec.partition is not None
    images = load_labelled(
        spec.partition.dataset, spec.data, max_train=10_000, max_test=None, seed=0, root=data_folder()
    )
    fast, *papers = probes(model, images, ("fedu", "ssd", "fedrlc"))
    with capsys.disabled():
        print("\n" + HEADER)  # noqa: T201
        show(iter([fast, *papers]), len(images.test))
    noise = 2 * math.sqrt(fast.last * (1 - fast.last) / len(images.test))
    assert min(line.last for line in papers) - noise <= fast.last <= max(line.best for line in papers) + noise


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--labels", type=int, default=10_000, help="0: all")
    parser.add_argument("--settings", default=",".join(PAPERS), help="separated by commas; empty: only fast")
    parser.add_argument("--semi", type=float, help="percentage of labels to fine-tune with, in place of the probe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transfer", help="a data set to fine-tune on, in place of the probe")
    parser.add_argument("--solver", action="store_true", help="only how long `fast` takes by size")
    parser.add_argument("--rounds", type=int, default=6, help="of the short training")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    if wanted.solver:
        solver()
        return
    with tempfile.TemporaryDirectory() as folder:
        models = wanted.models or train_shortly(Path(folder), wanted.rounds)
        spec = read_spec(str(models[0].parent / SPEC))
        assert spec.partition is not None, "the spec names the data set by its partition"
        limit, place = wanted.labels or None, data_folder()
        images = load_labelled(spec.partition.dataset, spec.data, max_train=limit, max_test=None, seed=0, root=place)
        print(HEADER)  # noqa: T201
        for model in models:
            settings = tuple(filter(None, wanted.settings.split(",")))
            if wanted.semi:
                lines = tunings(model, images, settings, wanted.semi / 100, wanted.seed)
            elif wanted.transfer:
                lines = transfers(model, wanted.transfer)
            else:
                lines = probes(model, images, settings)
            show(lines, len(images.test))


if __name__ == "__main__":
    main()
