"""Every cell of a paper's tables has the settings that the paper states, and a note for each difference."""

from collections.abc import Iterator
from typing import Any

import pytest

from fedssl.data.presets import NORMALIZATIONS
from fedssl.evaluation import FINE_TUNINGS, PROBES, TRANSFERS
from fedssl.experiments import papers
from fedssl.experiments.overlays import Values
from fedssl.experiments.papers import TableCell, select, tables

ALL = [cell for table in tables() for cell in select(table)]
PAPERS = sorted({table.partition("-")[0] for table in tables()})


def of_paper(paper: str) -> list[TableCell]:
    return [cell for cell in ALL if cell.table.startswith(f"{paper}-")]


def one(name: str) -> TableCell:
    (found,) = select(name)
    return found


def leaves(values: Values, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        elif not (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield (*path, key), value


def stated(cell: TableCell) -> dict[tuple[str, ...], Any]:
    """Return the last value that the layers of a cell give to each setting."""
    paper = papers.settings(cell.table.partition("-")[0])
    matching = [layer for layer in paper.layers if layer.matches(cell.table, cell.row, cell.column)]
    return {path: value for layer in matching for path, value in leaves(papers._values(layer))}


LEFT_OUT = {
    ("model", "projector", "hidden_dims"),  # ssd-4's rows without a projector
    ("model", "projector", "out_dim"),
    ("method", "views"),  # flesd-fig2's supervised rows
    ("method", "temperature"),
}
"""Settings of a table that a later layer replaces by something else, which has no such setting."""


@pytest.mark.parametrize("paper", PAPERS)
def test_no_setting_of_a_layer_is_lost_because_a_later_layer_names_a_method(paper: str) -> None:
    lost = []
    for cell in of_paper(paper):
        for path, value in stated(cell).items():
            found: Any = cell.spec
            for key in path:
                found = getattr(found, key, "nothing")
            found = list(found) if isinstance(found, tuple) else found
            if found != value and not (found == "nothing" and path in LEFT_OUT):
                lost.append((cell.name, path, value, found))

    assert lost == []


def test_views_are_embedded_separately_in_ssds_rows_and_jointly_in_fedxs_rows() -> None:
    for cell in of_paper("ssd"):
        assert getattr(cell.spec.method, "views", "joint") == ("joint" if cell.row == "FedX" else "separate"), cell.name


def method_of(cell: TableCell) -> Any:
    return cell.spec.method


def training(cell: TableCell) -> tuple[Any, ...]:
    optimizer = cell.spec.training.optimizer
    return (
        cell.spec.training.batch_size, optimizer.name, optimizer.learning_rate, optimizer.momentum,
        optimizer.weight_decay, optimizer.schedule,
    )  # fmt: skip


def rounds(cell: TableCell) -> tuple[int, int]:
    return cell.spec.num_rounds, cell.spec.training.local_epochs


def with_fedx(cell: TableCell) -> bool:
    return cell.row.endswith("+FedX") or cell.row.startswith(("localKD", "globalKD", "without"))


def test_fedx_section_4_1_holds_for_every_cell() -> None:
    """100 rounds of 10 epochs; ResNet18; SGD 0.01, momentum 0.9, decay 1e-5; batch 128; tau 0.1; Dir(0.5), N = 10."""
    lengths = {"R20": (20, 50), "R50": (50, 20), "R200": (200, 5)}  # Table 3 (c): R x E = 1000
    clients = {"K5": 5, "K15": 15, "K20": 20}
    for cell in of_paper("fedx"):
        partition, method = cell.spec.partition, cell.spec.method
        assert training(cell) == (64 if with_fedx(cell) else 128, "sgd", 0.01, 0.9, 1e-5, "constant"), cell.name
        assert rounds(cell) == lengths.get(cell.column, (100, 10)), cell.name
        assert cell.spec.model.encoder.name == "resnet18"
        assert partition is not None
        assert (partition.scheme, partition.alpha) == ("dirichlet", 0.5)
        assert partition.num_clients == clients.get(cell.column, 10)
        assert partition.share == {"10%": 0.1, "25%": 0.25, "50%": 0.5}.get(cell.column, 1)
        assert cell.spec.cohort.fraction == 1
        temperatures = [getattr(each, "temperature", 0.1) for each in (method, *method.add_ons)]
        assert temperatures == [0.1] * len(temperatures)
    assert (PROBES["fedx"].epochs, FINE_TUNINGS["fedx"].epochs) == (100, 100)
    tuning = FINE_TUNINGS["fedx"]  # section 4.4: "an SGD optimizer with a learning rate of 1e-3"
    assert (tuning.optimizer, tuning.encoder_learning_rate, tuning.head_learning_rate) == ("sgd", 1e-3, 1e-3)


def test_ssd_section_4_and_appendix_a_hold_for_every_cell() -> None:
    """100 rounds of 5 epochs, batch 128, 512 dimensions, SGD 0.1; beta 1, gamma 1, delta 0.1, alpha 10; Dir(0.1), K =
    10, and K = 50 with a participation of 0.2."""
    for cell in of_paper("ssd"):
        spec, partition = cell.spec, cell.spec.partition
        assert partition is not None
        many = cell.column.endswith("k50")
        rate, decay = (0.01, 1e-5) if cell.row == "FedX" else (0.1, 1e-4)  # as in a note
        assert training(cell) == (128, "sgd", rate, 0.9, decay, "constant"), cell.name
        assert rounds(cell) == (100, 5)
        assert spec.model.encoder.name == "resnet18"
        assert spec.model.encoder.feature_dim == 512
        assert spec.model.projector is None or spec.model.projector.out_dim == 512
        assert (partition.scheme, partition.alpha) == ("dirichlet", 0.1)
        assert (partition.num_clients, spec.cohort.fraction) == ((50, 0.2) if many else (10, 1))
        assert getattr(spec.method, "uniformity_weight", 1) == 1
        for add_on in spec.method.add_ons:
            weight = {"dsr": ("gamma", 1), "pd": ("delta", 0.1)}.get(add_on.name)
            assert weight is None or getattr(add_on, weight[0]) == weight[1]
            alpha = float(cell.column.removeprefix("alpha")) if cell.column.startswith("alpha") else 10
            assert getattr(add_on, "alpha", alpha) == alpha


def test_fedrlc_appendix_c_2_holds_for_every_cell() -> None:
    """SGD 0.032 with a cosine, batch 128, 32 x 32, ResNet18, a predictor of 2048, sigma 0.99, tau 0.7, K = E = 5 and
    R = 100; AdamW 0.022, batch 512, 200 epochs; Adam 0.001, 100 epochs with 10 % of the labels."""
    for cell in of_paper("fedrlc"):
        spec = cell.spec
        assert training(cell) == (128, "sgd", 0.032, 0.9, 5e-4, "cosine"), cell.name
        assert rounds(cell) == (100, 5)
        assert (spec.data.image_size, spec.model.encoder.name, spec.model.predictor.out_dim) == (32, "resnet18", 2048)
        assert method_of(cell).target_momentum == 0.99
        assert getattr(spec.method.merge, "tau", 0.7) == 0.7
        assert spec.partition is not None
        assert spec.partition.pooled == (cell.row == "BYOL centralized")
        assert spec.partition.pooled or spec.partition.num_clients == 5
    probe, tuning = PROBES["fedrlc"], FINE_TUNINGS["fedrlc"]
    assert (probe.optimizer, probe.learning_rate, probe.batch_size, probe.epochs) == ("adamw", 0.022, 512, 200)
    assert (tuning.optimizer, tuning.epochs) == ("adam", 100)
    assert (tuning.encoder_learning_rate, tuning.head_learning_rate) == (1e-3, 1e-3)


def test_fedu_section_4_1_holds_for_every_cell() -> None:
    """K = 5, R = 100, E = 5, mu 0.4 and 0.6, ablations E = 1 and R = 800; m 0.99, B = 128, SGD 0.032."""
    for cell in of_paper("fedu"):
        spec = cell.spec
        if cell.row.startswith("FedCA"):  # as in a note
            assert training(cell)[:3] == (128, "adam", 1e-3)
        else:
            assert training(cell) == (128, "sgd", 0.032, 0.9, 5e-4, "cosine"), cell.name
        if cell.table in ("fedu-1", "fedu-2", "fedu-3") and cell.row != "Random init":
            assert rounds(cell) == (100, 5), cell.name
        elif cell.table in ("fedu-4", "fedu-fig5a", "fedu-fig5b"):
            assert rounds(cell) == (800, 1), cell.name
        assert getattr(spec.method, "target_momentum", 0.99) == 0.99
        assert spec.model.encoder.name == ("resnet18" if cell.row.endswith("R18") else "resnet50")
        assert spec.partition is not None
        assert spec.partition.pooled or spec.partition.num_clients == 5
        if cell.table in ("fedu-1", "fedu-2") and cell.row.startswith("FedU"):
            assert method_of(cell).merge.mu == (0.6 if cell.column.startswith("cifar100") else 0.4)
    assert (FINE_TUNINGS["fedu"].epochs, TRANSFERS["fedu"].epochs) == (100, 100)  # sections 4.3 and 4.4


def test_flesd_sections_3_and_5_1_hold_for_every_cell() -> None:
    """Adam 1e-3, tau 0.4, B = 1024, K = 6, E_total 200; distillation: Adam 1e-3, B' 128, 200 epochs, tau 0.1, zeta
    0.999, m 2048, client 0's images; ResNet50 only on ImageNet-100."""
    for cell in of_paper("flesd"):
        spec, large = cell.spec, cell.column.startswith("imagenet-100")
        batch = 128 if cell.row == "Supervised" else 256 if large else 1024
        assert training(cell) == (batch, "adam", 1e-3, 0.9, 1e-6, "constant"), cell.name
        assert spec.model.encoder.name == ("resnet50" if large else "resnet18")
        assert getattr(spec.method, "temperature", 0.4) == 0.4
        assert spec.partition is not None
        assert spec.partition.pooled or (spec.partition.num_clients, spec.partition.scheme) == (6, "dirichlet")
        if cell.table in ("flesd-1", "flesd-fig4a"):
            assert spec.num_rounds * spec.training.local_epochs == 200, cell.name
        reducer = method_of(cell).reducer
        distils = cell.row.startswith("FLESD")
        assert (cell.public_client == "client-0") == (reducer.name == "distillation") == distils
        assert spec.cohort.clients == (tuple(f"client-{number}" for number in range(1, 6)) if distils else None)
        if distils:
            optimizer = reducer.optimizer
            assert (optimizer.name, optimizer.learning_rate) == ("adam", 1e-3)
            assert (reducer.batch_size, reducer.num_epochs, reducer.num_anchors) == (128, 200, 2048)
            assert (reducer.temperature, reducer.momentum, reducer.student_temperature) == (0.1, 0.999, None)


def test_images_have_the_sizes_and_normalisations_of_the_papers() -> None:
    sizes = {"fashion-mnist": 28, "tiny-imagenet": 64, "imagenet-100": 224}
    for cell in ALL:
        assert cell.spec.partition is not None
        expected = sizes.get(cell.spec.partition.dataset, 32)
        if cell.table.startswith(("ssd-", "fedu-")):
            expected = 32  # as in notes, for Tiny-ImageNet and Mini-ImageNet too
            assert (cell.spec.data.mean, cell.spec.data.std) == (None, None)
        assert cell.spec.data.image_size == expected, cell.name
    mean, std = NORMALIZATIONS["fedx-cifar10"]
    assert (one("fedx-1:FedSimCLR@cifar10").spec.data.mean, one("fedx-1:FedSimCLR@cifar10").spec.data.std) == (
        mean,
        std,
    )


STATED = {
    "fedx-1:FedSimCLR@cifar10": ["no colour jitter on CIFAR-10", "no more of a class"],
    "fedx-1:FedSimCLR@svhn": ["SVHN is not flipped, but rotated"],
    "fedx-3a:FedSimCLR@10%": ["no colour jitter on CIFAR-10"],
    "fedx-1:FedSimCLR+FedX@cifar10": [
        "64 anchors and 64 random images",
        "Eq. 7 and 11",
        "Eq. 9 as in",
        "third teacher",
    ],
    "fedx-2:localKD@cifar10": ["64 anchors and 64 random images", "Eq. 7 and 11"],
    "fedx-2:localKD+SCAFFOLD@cifar10": ["learning rate / (1 - momentum)"],
    "fedx-fig6:FedSimCLR@cifar10": ["the angle between classes is the global model's [chosen here]"],
    "ssd-1:SSD@cifar10-k10": ["the paper calls it linear", "DSR as in SSD's code", "PD as in SSD's code", "by batches"],
    "ssd-1:L-DAWA@cifar10-k10": ["BatchNorm's statistics are plain means"],
    "fedrlc-1:FedRLC@cifar10-class": ["as many centers as classes [chosen here]"],
    "fedrlc-2:FedBYOL@cifar10-dir0.5": ["no more of a class"],
    "fedrlc-1:FedU@cifar10-class": ["FedU's thresholds"],
    "fedu-1:FedU R18@cifar10-iid": ["200 epochs; the paper says 100", "Eq. 3 prints a square"],
    "fedu-2:FedAvg supervised R50@cifar10-iid-1%": ["its clients hold the labelled images and no others"],
    "fedu-3:FedU@cifar10-iid": ["mu on Mini-ImageNet [chosen here]: 0.6", "500 of the 600"],
    "fedu-3:FedCA@cifar100-iid": ["5,000 of CIFAR-100 instead of STL-10's"],
    "flesd-fig5:FLESD@cifar100-a1": ["cross-entropy of FLESD's code"],
}
"""Where a cell differs from its paper's text or has what no paper states, and words of the note that reports it."""

UNTRUE = {
    "fedx-1:FedSimCLR@cifar10": ["teacher", "SVHN"],
    "fedx-2:localKD@cifar10": ["teacher", "Eq. 9"],
    "fedx-fig5:without Lr@cifar10": ["Eq. 7"],
    "fedx-fig5:without Lc@cifar10": ["Eq. 9 as"],
    "fedx-1:FedMoCo@cifar10": ["temperature"],  # section 4.1 states 0.1 for all objectives
    "ssd-1:FedX@cifar10-k10": ["calls it linear", "DSR", "PD as"],
    "ssd-3:+PD@cifar10-k10": ["DSR as"],
    "ssd-5:SSD MSE@cifar10-k10": ["PD as"],
    "ssd-4:noproj +DSR@cifar10-k10": ["calls it linear"],
    "fedu-1:FedAvg supervised R50@cifar10-iid": ["probe"],
    "fedu-2:FedAvg supervised R50@cifar10-iid-1%": ["fine-tuning", "which no client has"],
    "fedu-3:FedCA@cifar100-iid": ["the other CIFAR data set"],
    "fedu-fig5a:local predictor@cifar10-class": ["Eq. 3"],
}
"""Words that no note of a cell may have, because they would be untrue of it."""


@pytest.mark.parametrize("name", STATED)
def test_each_difference_from_the_paper_has_a_note(name: str) -> None:
    notes = one(name).notes

    for words in STATED[name]:
        assert any(words in note for note in notes), (words, notes)


@pytest.mark.parametrize("name", UNTRUE)
def test_no_note_is_untrue_of_its_cell(name: str) -> None:
    for words in UNTRUE[name]:
        assert not any(words in note for note in one(name).notes), words
