"""Costs of runs, what a smaller run keeps and changes, and what fits into a time budget."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from fedssl.errors import SpecError
from fedssl.experiments import costs, papers
from fedssl.experiments.budget import Fit, Speeds, fit, kept_fit
from fedssl.experiments.papers import TableCell, select
from fedssl.experiments.scaling import NARROWER, Scale, scaled, steps
from fedssl.methods import METHODS
from fedssl.models import build_encoder, num_multiply_adds
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.methods.add_ons import FedXConfig
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec

ALL = [cell for table in papers.tables() for cell in papers.select(table)]


def one(name: str) -> TableCell:
    return select(name)[0]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fedalignuniform", (2, 0)),
        ("fedbarlow", (2, 0)),
        ("fedbyol", (2, 2)),
        ("fedca", (3, 1)),
        ("feddino", (2, 2)),
        ("fedmae", (1, 0)),
        ("fedmoco", (2, 2)),
        ("fedprotocl", (2, 3)),
        ("fedrlc", (2, 2)),
        ("fedsimsiam", (2, 0)),
        ("fedvicreg", (2, 0)),
        ("fedx", (3, 2)),
        ("flesd", (2, 0)),
        ("orchestra", (3, 1)),
        ("ssd", (2, 0)),
        ("single", (2, 2)),
        ("supervised", (1, 0)),
    ],
)
def test_the_passes_of_a_step_are_counted_for_each_method(method: str, expected: tuple[int, int]) -> None:
    config = METHOD_CONFIGS[method]()

    found = costs.passes(config)  # type: ignore[arg-type]

    assert (found.with_gradients, found.without) == expected


def test_fedxs_passes_count_only_its_active_terms() -> None:
    local = FedXConfig(global_contrastive=0, global_relational=0)
    contrast = FedXConfig(local_relational=0, global_relational=0)  # its teacher embeds only the second views
    host = METHOD_CONFIGS["fedmoco"]

    assert costs.passes(host(add_ons=(local,))).units == 3 * 3 + 2  # type: ignore[arg-type,call-arg]
    assert costs.passes(host(add_ons=(contrast,))).units == 3 * 2 + 3  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize(
    ("encoder", "channels", "size", "expected"),
    [
        ("resnet18", 3, 32, 0.555e9),
        ("resnet18", 1, 28, 0.456e9),
        ("resnet18", 3, 64, 2.22e9),
        ("resnet50", 3, 32, 1.30e9),
    ],
)
def test_the_multiply_adds_of_the_papers_encoders_are_known(
    encoder: str, channels: int, size: int, expected: float
) -> None:
    config = EncoderConfig(name=encoder, stem="cifar")  # type: ignore[arg-type]

    assert costs.multiply_adds(config, channels, size) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedx-1:FedSimCLR@fashion-mnist", 3.3e17),
        ("ssd-1:SSD@cifar10-k10", 1.7e17),
        ("ssd-1:SSD@cifar10-k50", 3.3e16),
        ("fedrlc-1:FedBYOL@cifar10-iid", 2.2e17),
        ("flesd-1:FLESD@cifar10-a1", 7.0e16),
        ("flesd-1:FedAvg@cifar10-a1", 6.7e16),
        # 6.7e16 with the teacher's third pass, which FedX's code makes but does not use
        ("fedx-3a:FedSimCLR+FedX@10%", 6.1e16),
    ],
)
def test_the_work_of_whole_runs_is_estimated(name: str, expected: float) -> None:
    cell = one(name)

    assert costs.flops(cell.spec, cell.public_client) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("encoder", ["convnet", "vit-tiny"])
def test_local_crops_count_as_passes_of_smaller_images(encoder: str) -> None:
    values = {
        "name": "crops",
        "num_rounds": 2,
        "method": {"name": "fedmoco"},
        "model": {"encoder": {"name": encoder}},
        "data": {"image_size": 32, "local_crops": {"num_crops": 4, "image_size": 16}},
        "partition": {"dataset": "cifar10", "num_clients": 5},
        "training": {"local_epochs": 3},
    }
    config = EncoderConfig(name=encoder)  # type: ignore[arg-type]
    with on_meta_device():
        network = build_encoder(config, 3, 32)

    view, crop = (num_multiply_adds(network, (3, size, size)) for size in (32, 16))

    each = (3 * 2 + 2) * view + 3 * 4 * crop  # a backward pass counts as two; the keys need none
    assert costs.flops(RunSpec.model_validate(values), None) == 2 * each * 50_000 * 2 * 3


SCALES = [Scale(encoder=encoder, rounds=0.2, epochs=0.1, images=0.05) for encoder in (None, *NARROWER)]


@pytest.mark.full(but=2)
@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: str(scale.encoder and scale.encoder.widths))
def test_every_cell_can_be_scaled_down_without_changing_its_subject(scale: Scale) -> None:
    planned = set()
    for cell in ALL:
        spec, paper = scaled(cell, scale), cell.spec
        if scale.encoder is not None and (key := (spec.method.model_dump_json(), spec.model)) not in planned:
            planned.add(key)
            assert METHODS[spec.method.name].bind(spec).plan.broadcast
        assert spec.partition is not None
        assert paper.partition is not None
        for key in ("num_clients", "scheme", "alpha", "variant", "share", "pooled"):
            assert getattr(spec.partition, key) == getattr(paper.partition, key)
        assert spec.cohort == paper.cohort
        assert spec.num_rounds >= min(20, paper.num_rounds)
        assert (spec.training.local_epochs == 0) == (paper.training.local_epochs == 0)
        assert spec.method.name == paper.method.name
        assert [part.name for part in spec.method.add_ons] == [part.name for part in paper.method.add_ons]


def test_heads_shrink_with_the_encoder_and_small_batches_leave_several_steps() -> None:
    spec = scaled(one("ssd-1:SSD@cifar10-k10"), Scale(encoder=NARROWER[1], rounds=0.2, images=0.1))

    assert spec.model.projector is not None
    assert spec.model.projector.out_dim == spec.model.encoder.feature_dim == 128  # as PD requires
    assert spec.model.projector.hidden_dims == (512,)
    # 5,000 images of 10 clients are 500 each: eight steps of 62, so 32.
    assert spec.training.batch_size == 32


def test_target_momentum_is_lowered_for_few_steps() -> None:
    cell = one("fedrlc-1:FedBYOL@cifar10-class")
    spec = scaled(cell, Scale(encoder=NARROWER[-1], rounds=0.2, epochs=0.2, images=0.05))

    # 20 rounds of one epoch of 500 images by 32 are about 312 steps; a tenth of them is the average's horizon.
    assert steps(spec) == pytest.approx(312.5)
    assert spec.method.target_momentum == pytest.approx(1 - 10 / 312.5, abs=1e-4)  # type: ignore[union-attr]
    assert spec.training.optimizer.learning_rate == 0.05
    assert scaled(cell, Scale()).method.target_momentum == 0.99  # type: ignore[union-attr]


def test_a_scaled_table_keeps_the_order_of_its_round_numbers() -> None:
    rounds = [scaled(cell, Scale(rounds=0.4)).num_rounds for cell in select("fedx-3c:FedSimCLR")]

    assert rounds == [20, 20, 40, 80]


@dataclass(slots=True)
class Steady(Speeds):
    """A machine of known speeds: images per second by the encoder's last width."""

    rates: tuple[tuple[int, float], ...] = ((64, 8000.0), (128, 2000.0), (256, 500.0), (512, 10.0), (2048, 4.0))

    def training(self, spec: RunSpec) -> float:
        return dict(self.rates)[spec.model.encoder.feature_dim]

    def judging(self, spec: RunSpec) -> float:
        return 1.0


def test_images_shrink_first_then_the_encoder_then_epochs_then_seeds() -> None:
    cells = [one("fedx-1:FedSimCLR@cifar10")]
    seeds = (0, 1, 2)

    # 20 rounds of 10 epochs of 50,000 images at 10 a second: 10^6 seconds, and a tenth of that for 5,000 images.
    plenty = fit(cells, 3 * 400_000, seeds, Steady())
    less = fit(cells, 3 * 3_000, seeds, Steady())
    little = fit(cells, 3 * 60, seeds, Steady())
    least = fit(cells, 60, seeds, Steady())

    assert plenty.scale.encoder is None
    assert plenty.scale.images == pytest.approx(0.85 * 0.4, rel=0.03)
    assert less.scale.encoder is not None
    assert less.scale.encoder.widths == (32, 64, 128, 256)
    assert less.scale.epochs == 1.0
    assert little.scale.encoder is not None
    assert little.scale.encoder.widths[-1] == 64
    assert little.scale.epochs < 1.0
    assert little.seeds == seeds
    assert len(least.seeds) <= len(little.seeds)
    for found, budget in ((plenty, 1_200_000), (less, 9_000), (little, 180), (least, 60)):
        assert found.seconds <= budget


def test_the_papers_own_run_is_unchanged_if_everything_fits() -> None:
    cell = one("fedx-1:FedSimCLR@cifar10")
    found = fit([cell], 1e9, (0,), Steady())

    spec = scaled(cell, found.scale, "cuda")

    assert (spec.num_rounds, spec.training, spec.partition, spec.model) == (
        cell.spec.num_rounds, cell.spec.training, cell.spec.partition, cell.spec.model,
    )  # fmt: skip


def test_cells_of_a_table_share_one_scale_and_fit_together() -> None:
    cells = select("fedx-1@cifar10")
    found = fit(cells, 3600, (0,), Steady())

    specs = [scaled(cell, found.scale) for cell in cells]

    assert len({(spec.num_rounds, spec.training.local_epochs, spec.model.encoder) for spec in specs}) == 1
    assert len({spec.partition for spec in specs}) == 1
    assert found.seconds <= 3600


def test_a_budget_that_nothing_fits_into_is_refused() -> None:
    with pytest.raises(SpecError, match="too small: at least"):
        fit(select("fedx-1"), 5, (0,), Steady())


def test_a_stored_plan_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "plans" / "a.json"
    made = Fit(Scale(encoder=NARROWER[0], images=0.25), (0, 1), 12.5)

    assert kept_fit(path, lambda: made) == made
    assert kept_fit(path, lambda: pytest.fail("it was kept")) == made
