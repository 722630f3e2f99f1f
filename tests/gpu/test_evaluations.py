"""On a GPU, evaluations give the CPU's results, and the coordinator's training gives the CPU's network."""

import dataclasses

import numpy as np
import pytest
import torch

from fedssl.data import ImageData, load_dataset
from fedssl.data.site_labels import SiteLabels
from fedssl.engine import DistillationProgress, run_aggregation
from fedssl.errors import Cancelled
from fedssl.evaluation import FINE_TUNINGS, PROBES, extract_features, fine_tune, probe_encoder
from fedssl.evaluation.site import evaluate_at_site, evaluate_head
from fedssl.evaluation.suite import Labelled, detailed_evaluation
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.models import build_encoder, initialised
from fedssl.precision import exact_float32
from fedssl.protocol.data import AugmentationConfig, DataConfig
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from support.methods import context, method_spec
from support.one_client import use_cpu_generators
from support.rounds import MemoryCheckpoint, local_round, start

DEVICE = "cuda"
DATA = DataConfig(channels=1, image_size=16)
CLASSES = tuple(str(number) for number in range(10))


def _encoder(device: str = "cpu") -> torch.nn.Module:
    return initialised(lambda: build_encoder(EncoderConfig(widths=(8, 16)), 1, 16), 0).to(device)


@pytest.fixture(scope="module")
def digits() -> Labelled:
    train, test = (load_dataset("digits", split, image_size=16, channels=1) for split in ("train", "test"))
    return Labelled(train.subset(np.arange(400)), test.subset(np.arange(300)))


def test_representations_equal_the_cpus_up_to_rounding(digits: Labelled) -> None:
    config = DATA.model_copy(update={"mean": (0.3,), "std": (0.2,)})
    augmentation = AugmentationConfig(blur=0.5, rotation_degrees=10)
    for view in (None, augmentation):
        on_cpu, on_gpu = (
            extract_features(_encoder(device), digits.test, config, device, augmentation=view)
            for device in ("cpu", DEVICE)
        )
        # Two layers of sums of at most 72 products each, and a mean.
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        EncoderConfig(name="resnet18"),
        EncoderConfig(name="resnet50", stem="imagenet"),
        EncoderConfig(name="resnet18", norm="group"),
        EncoderConfig(name="convnext-tiny"),
        EncoderConfig(name="vit-small", patch_size=8),
    ],
    ids=str,
)
def test_an_encoders_output_and_gradients_equal_the_cpus_up_to_rounding(config: EncoderConfig) -> None:
    x = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", DEVICE):
        encoder = initialised(lambda: build_encoder(config, 3, 64), 0).to(device).eval()
        with exact_float32(device):
            h = encoder(x.to(device).contiguous(memory_format=torch.channels_last))
            h.square().mean().backward()  # type: ignore[no-untyped-call]
        gradients = torch.cat([each.grad.flatten() for each in encoder.parameters() if each.grad is not None])
        found.append((h.detach().cpu(), gradients.cpu()))
    # BatchNorm uses its running statistics, because those of a small batch would amplify rounding.
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 0.01 * one.norm()


@pytest.mark.parametrize("settings", ["fast", "ssd", "flesd"])
def test_an_evaluation_gives_the_cpus_scores(settings: str, digits: Labelled) -> None:
    config = JudgingConfig(dataset="digits", measures=("probe", "knn", "geometry"), settings=settings)
    on_cpu, on_gpu = (detailed_evaluation(_encoder(), digits, config, DATA, device=each) for each in ("cpu", DEVICE))
    assert on_gpu.results.keys() == on_cpu.results.keys()
    for name, expected in on_cpu.results.items():
        # One image in a hundred may be so close to a border that rounding decides.
        tolerance = {"abs": 0.01} if name in ("probe", "knn") else {"rel": 1e-4, "abs": 1e-5}
        assert on_gpu.results[name] == pytest.approx(expected, **tolerance), name


def test_fine_tuning_gives_the_cpus_accuracy(digits: Labelled) -> None:
    settings = dataclasses.replace(FINE_TUNINGS["fast"], epochs=2, batch_size=64)
    on_cpu, on_gpu = (
        fine_tune(_encoder(), digits.train, digits.test, DATA, settings=settings, device=device).accuracy
        for device in ("cpu", DEVICE)
    )
    assert on_gpu == pytest.approx(on_cpu, abs=0.02)


def _site(digits: Labelled, device: str) -> tuple[object, ...]:
    images, labels = digits.train.images, digits.train.labels
    assert labels is not None

    def take(positions: np.ndarray) -> ImageData:  # type: ignore[type-arg]
        return ImageData(images[positions])

    spec = method_spec(
        "fedsimclr",
        data={"channels": 1, "image_size": 16},
        evaluation={
            "at": "sites",
            "measures": ["probe", "knn"],
            "sites": {"classes": CLASSES, "min_count": 1, "cross_site": "probe"},
        },
    )
    return _encoder(device), take, SiteLabels(labels, CLASSES, CLASSES), spec, "client-0"


def test_a_sites_evaluation_gives_the_cpus_counts(digits: Labelled) -> None:
    on_cpu, on_gpu = (evaluate_at_site(*_site(digits, each), device=each) for each in ("cpu", DEVICE))  # type: ignore[arg-type]
    assert on_gpu.head is not None
    for measure, expected in on_cpu.counts.measures.items():
        moved = np.subtract(on_gpu.counts.measures[measure].confusion, expected.confusion)
        assert np.abs(moved).sum() / 2 <= max(1, 0.02 * on_cpu.counts.num_test)
    crossed = [evaluate_head(*_site(digits, each), on_gpu.head, device=each) for each in ("cpu", DEVICE)]  # type: ignore[arg-type]
    assert crossed[0].num_test == crossed[1].num_test


def _distilling(optimizer: str) -> tuple[RunSpec, Update]:
    """Return FLESD's spec, and the update that the coordinator distils."""
    values = method_spec("flesd").model_dump(mode="json")
    values["method"]["reducer"]["optimizer"] = {"name": optimizer, "learning_rate": 0.01}
    spec = RunSpec.model_validate(values)
    result = local_round(spec, start(spec).broadcast)
    return spec, Update("client-0", result.num_examples, lambda: result.update)


def _there(spec: RunSpec, device: str) -> Context:
    ctx = context(spec, 1)
    assert ctx.public is not None
    return dataclasses.replace(ctx, device=torch.device(device), public=ctx.public.to(device))


def test_flesds_distillation_gives_the_cpus_network(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu_generators(monkeypatch)
    spec, update = _distilling("sgd")
    first = start(spec)
    on_cpu, on_gpu = (
        run_aggregation(METHODS["flesd"], first.state, [update], _there(spec, device)).broadcast
        for device in ("cpu", DEVICE)
    )
    assert on_gpu.keys() == on_cpu.keys()
    weights = [name for name, tensor in on_cpu.items() if tensor.is_floating_point() and "running_" not in name]
    apart = sum(float((on_gpu[name] - on_cpu[name]).square().sum()) for name in weights) ** 0.5
    moved = sum(float((on_cpu[name] - first.broadcast[name]).square().sum()) for name in weights) ** 0.5
    assert apart < 0.01 * moved


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lars"])
def test_a_distillation_on_the_gpu_continues_from_its_checkpoint(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    spec, update = _distilling(optimizer)
    state, checkpoint = start(spec).state, MemoryCheckpoint()

    def kill(progress: DistillationProgress) -> None:
        if progress.epoch == 3:
            raise Cancelled("killed")

    whole = run_aggregation(METHODS["flesd"], state, [update], _there(spec, DEVICE))
    with pytest.raises(Cancelled):
        run_aggregation(METHODS["flesd"], state, [update], _there(spec, DEVICE), on_epoch=kill, checkpoint=checkpoint)
    resumed = run_aggregation(METHODS["flesd"], state, [update], _there(spec, DEVICE), checkpoint=checkpoint)
    for name, tensor in whole.broadcast.items():
        assert torch.equal(resumed.broadcast[name], tensor), name


def test_a_probe_on_augmented_images_gives_the_cpus_accuracy(digits: Labelled) -> None:
    settings = dataclasses.replace(PROBES["flesd"], epochs=2)
    on_cpu, on_gpu = (
        probe_encoder(_encoder(device), digits.train, digits.test, DATA, settings=settings, device=device).accuracy
        for device in ("cpu", DEVICE)
    )
    assert on_gpu == pytest.approx(on_cpu, abs=0.02)
