"""The papers' tables: every cell is a valid run with the paper's settings and numbers."""

from typing import Any

import pytest

from fedssl.data.catalogue import KNOWN
from fedssl.errors import SpecError
from fedssl.evaluation import FINE_TUNINGS
from fedssl.experiments import papers
from fedssl.experiments.papers import TableCell, published, select, tables
from fedssl.methods import METHODS

ALL = [cell for table in tables() for cell in select(table)]
PAPERS = sorted({table.partition("-")[0] for table in tables()})


def test_all_tables_of_the_five_papers_are_listed() -> None:
    assert [name for name in tables() if "-fig" not in name] == [
        "fedx-1", "fedx-2", "fedx-3a", "fedx-3b", "fedx-3c", "fedx-4",
        "ssd-1", "ssd-2", "ssd-3", "ssd-4", "ssd-5",
        "fedrlc-1", "fedrlc-2", "fedrlc-3", "fedrlc-4",
        "fedu-1", "fedu-2", "fedu-3", "fedu-4",
        "flesd-1",
    ]  # fmt: skip
    in_tables = [cell for cell in ALL if "-fig" not in cell.table]
    assert len(in_tables) == 395
    readings = [measure.published_as for cell in in_tables for measure in cell.measures.values()]
    assert (readings.count(None), len(readings)) == (578, 578 + 23)
    assert all(value is not None for cell in in_tables for value in cell.published.values())
    assert all(table["source"] and table["title"] for table in published().values())


def test_a_run_with_each_encoder_can_be_planned() -> None:
    """test_scaling.py plans the method of every cell, with a narrower encoder."""
    distinct = {(c.spec.model.encoder, c.spec.data.channels): c.spec for c in ALL}
    assert len(distinct) > 1
    for spec in distinct.values():
        assert METHODS[spec.method.name].bind(spec).plan.broadcast


@pytest.mark.full
def test_every_cell_is_a_run_that_its_method_can_plan() -> None:
    distinct = {(c.spec.method.model_dump_json(), c.spec.model, c.spec.data.channels): c.spec for c in ALL}
    for spec in distinct.values():
        assert METHODS[spec.method.name].bind(spec).plan.broadcast


def test_every_cell_has_known_measures_and_data_sets() -> None:
    for cell in ALL:
        assert cell.measures.keys() == cell.published.keys()
        for measure in cell.measures.values():
            assert measure.kind != "fine_tune" or measure.settings in FINE_TUNINGS
        for part in (cell.spec.partition, cell.spec.evaluation):
            assert part is not None
            assert part.dataset in KNOWN


def test_every_layer_of_settings_applies_to_a_cell() -> None:
    for paper in PAPERS:
        for number, layer in enumerate(papers.settings(paper).layers):
            used = [c for c in ALL if c.table.startswith(f"{paper}-") and layer.matches(c.table, c.row, c.column)]
            assert used, f"layer {number} of {paper} is for no cell"


def one(name: str) -> TableCell:
    found = select(name)
    assert len(found) == 1
    return found[0]


def values(name: str) -> dict[str, Any]:
    """Return the settings that methods.md describes as one flat table."""
    spec = one(name).spec
    assert spec.partition is not None
    optimizer = spec.training.optimizer
    return {
        "K": spec.partition.num_clients,
        "R": spec.num_rounds,
        "E": spec.training.local_epochs,
        "alpha": spec.partition.alpha,
        "scheme": spec.partition.scheme,
        "batch": spec.training.batch_size,
        "lr": optimizer.learning_rate,
        "wd": optimizer.weight_decay,
        "optimizer": optimizer.name,
        "schedule": optimizer.schedule,
        "encoder": spec.model.encoder.name,
        "fraction": spec.cohort.fraction,
    }


FEDX = {"K": 10, "R": 100, "E": 10, "alpha": 0.5, "scheme": "dirichlet", "lr": 0.01, "wd": 1e-5, "optimizer": "sgd",
        "schedule": "constant", "encoder": "resnet18", "fraction": 1.0}  # fmt: skip
SSD = {"K": 10, "R": 100, "E": 5, "alpha": 0.1, "scheme": "dirichlet", "batch": 128, "lr": 0.1, "wd": 1e-4,
       "optimizer": "sgd", "schedule": "constant", "encoder": "resnet18", "fraction": 1.0}  # fmt: skip
EASYFL = {"K": 5, "R": 100, "E": 5, "batch": 128, "lr": 0.032, "wd": 5e-4, "optimizer": "sgd", "schedule": "cosine",
          "fraction": 1.0}  # fmt: skip
FLESD = {"K": 6, "batch": 1024, "lr": 1e-3, "wd": 1e-6, "optimizer": "adam", "scheme": "dirichlet"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedx-1:FedSimCLR@cifar10", {**FEDX, "batch": 128}),
        ("fedx-1:FedMoCo+FedX@svhn", {**FEDX, "batch": 64}),
        ("fedx-2:localKD+SCAFFOLD@fashion-mnist", {**FEDX, "batch": 64}),
        ("fedx-3b:FedSimCLR@K20", {**FEDX, "batch": 128, "K": 20}),
        ("fedx-3c:FedSimCLR@R20", {**FEDX, "batch": 128, "R": 20, "E": 50}),
        ("fedx-3c:FedSimCLR@R200", {**FEDX, "batch": 128, "R": 200, "E": 5}),
        ("fedx-4:FedU+FedX@cifar10", {**FEDX, "batch": 64}),
        ("ssd-1:SSD@cifar10-k10", SSD),
        ("ssd-1:FedU2@cifar100-k50", {**SSD, "K": 50, "fraction": 0.2}),
        ("ssd-2:L-DAWA@tiny-imagenet-to-cifar10", SSD),
        ("ssd-1:FedX@cifar10-k10", {**SSD, "lr": 0.01, "wd": 1e-5}),
        ("ssd-2:FedX@cifar100-to-cifar10", {**SSD, "lr": 0.01, "wd": 1e-5}),
        ("ssd-3:+PD@cifar10-k10", SSD),
        ("ssd-4:noproj +DSR@cifar10-k10", SSD),
        ("ssd-5:SSD MSE@cifar10-k10", SSD),
        ("fedrlc-1:FedRLC@cifar10-iid", {**EASYFL, "scheme": "iid", "encoder": "resnet18"}),
        ("fedrlc-1:FedEMA@cifar100-class", {**EASYFL, "scheme": "classes", "encoder": "resnet18"}),
        ("fedrlc-2:FedBYOL@cifar10-dir0.1", {**EASYFL, "scheme": "dirichlet", "alpha": 0.1}),
        ("fedrlc-3:FedU@cifar100-iid", {**EASYFL, "scheme": "iid"}),
        ("fedrlc-4:Single@cifar100-dir0.5", {**EASYFL, "scheme": "dirichlet", "alpha": 0.5}),
        ("fedu-1:FedU R18@cifar10-class", {**EASYFL, "scheme": "classes", "encoder": "resnet18"}),
        ("fedu-1:FedSimSiam R50@cifar100-iid", {**EASYFL, "scheme": "iid", "encoder": "resnet50"}),
        ("fedu-2:FedU R50@cifar10-iid-1%", {**EASYFL, "encoder": "resnet50"}),
        ("fedu-3:FedU@cifar100-class", {**EASYFL, "scheme": "classes", "encoder": "resnet50"}),
        ("fedu-4:target to both@local", {**EASYFL, "R": 800, "E": 1, "scheme": "classes", "encoder": "resnet50"}),
        ("flesd-1:FLESD@cifar10-a1", {**FLESD, "R": 2, "E": 100, "alpha": 1.0, "encoder": "resnet18"}),
        ("flesd-1:FLESD-cc@cifar100-a0.01", {**FLESD, "R": 1, "E": 200, "alpha": 0.01}),
        ("flesd-1:FedAvg@tiny-imagenet-a100", {**FLESD, "R": 10, "E": 20, "alpha": 100.0, "encoder": "resnet18"}),
        ("flesd-1:FedProx@imagenet-100-a1", {**FLESD, "R": 10, "E": 20, "batch": 256, "encoder": "resnet50"}),
        ("flesd-1:Min-Local@cifar10-a0.01", {**FLESD, "R": 1, "E": 200, "alpha": 0.01}),
    ],
)
def test_settings_are_those_of_the_paper(name: str, expected: dict[str, Any]) -> None:
    found = values(name)

    assert {key: found[key] for key in expected} == expected


def at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config[int(key)] if key.isdigit() else getattr(config, key)
    return config


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedx-1:SimCLR+FedX@cifar10", {"name": "fedsimclr", "temperature": 0.1, "add_ons.0.temperature": 0.1}),
        ("fedx-1:MoCo@cifar10", {"temperature": 0.1, "queue_size": 4096}),
        ("fedx-2:localKD@cifar10", {"add_ons.0.global_contrastive": 0, "add_ons.0.local_relational": 1}),
        ("fedx-2:localKD+FedProx@cifar10", {"add_ons.1.mu": 0.01}),
        ("ssd-1:SSD@cifar10-k10", {"add_ons.0.gamma": 1, "add_ons.0.alpha": 10, "add_ons.1.delta": 0.1}),
        ("ssd-1:SSD@cifar10-k10", {"reducer.weighting": "batches"}),
        ("ssd-1:FedX@cifar10-k10", {"name": "fedsimclr", "temperature": 0.1, "add_ons.0.name": "fedx"}),
        ("ssd-3:+DSR@cifar10-k10", {"add_ons.0.name": "dsr", "add_ons.__len__": 1}),
        ("ssd-5:SSD MSE@cifar10-k10", {"add_ons.1.variant": "mse"}),
        ("fedrlc-1:FedRLC@cifar100-iid", {"add_ons.0.num_centers": 100, "merge.tau": 0.7}),
        ("fedrlc-1:FedRLC@cifar10-iid", {"add_ons.0.num_centers": 10, "add_ons.0.exponent": -0.5}),
        ("fedrlc-1:FedU@cifar100-iid", {"merge.mu": 0.6}),
        ("fedrlc-1:Single@cifar10-iid", {"name": "single", "merge.name": "local"}),
        ("fedu-1:FedU R50@cifar10-iid", {"merge.mu": 0.4, "target_momentum": 0.99}),
        ("fedu-1:FedSimCLR R50@cifar10-iid", {"temperature": 0.07}),
        ("fedu-1:FedAvg supervised R50@cifar100-iid", {"name": "supervised", "num_classes": 100}),
        ("fedu-4:target to both@local", {"merge.aggregate": "target", "merge.update": "both"}),
        ("fedu-4:target to both@local", {"merge.predictor": "local"}),
        ("flesd-1:FLESD@cifar10-a1", {"temperature": 0.4, "reducer.num_anchors": 2048, "reducer.momentum": 0.999}),
        (
            "flesd-1:FLESD@cifar10-a1",
            {"reducer.num_epochs": 200, "reducer.batch_size": 128, "reducer.temperature": 0.1},
        ),
        ("flesd-1:FedAvg@cifar10-a1", {"reducer.name": "mean", "reducer.weighting": "uniform"}),
        ("flesd-1:Min-Local@cifar10-a1", {"merge.name": "local", "reducer.name": "none"}),
    ],
)
def test_methods_have_the_parameters_of_the_paper(name: str, expected: dict[str, Any]) -> None:
    method = one(name).spec.method

    found = {path: len(at(method, path[:-8])) if path.endswith(".__len__") else at(method, path) for path in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("name", "hidden", "width", "batch_norm"),
    [
        ("fedx-1:FedU@cifar10", 4096, 2048, True),
        ("fedx-4:FedU+FedX@cifar10", 4096, 2048, True),
        ("fedx-1:FedBYOL@cifar10", 256, 256, True),
        ("ssd-1:FedX@cifar10-k10", 2048, 512, False),
        ("ssd-1:SSD@cifar10-k10", 2048, 512, True),
        ("flesd-1:FLESD@cifar10-a1", 512, 128, False),
        ("flesd-1:FLESD@imagenet-100-a1", 2048, 128, False),
    ],
)
def test_projectors_are_those_of_the_paper(name: str, hidden: int, width: int, *, batch_norm: bool) -> None:
    projector = one(name).spec.model.projector

    assert projector is not None
    assert (projector.hidden_dims, projector.out_dim, projector.batch_norm) == ((hidden,), width, batch_norm)


def test_data_settings_are_those_of_the_paper() -> None:
    strong, weak = one("ssd-1:SSD@cifar10-k10").spec.data, one("fedx-1:SimCLR@cifar10").spec.data
    fashion, tiny = one("fedx-1:SimCLR@fashion-mnist").spec.data, one("flesd-1:FLESD@tiny-imagenet-a1").spec.data

    assert (strong.augmentation.crop, strong.augmentation.min_scale, strong.mean) == ("resized", 0.08, None)
    assert (weak.augmentation.crop, weak.augmentation.padding_mode, weak.augmentation.jitter) == (
        "padded",
        "reflect",
        0,
    )
    assert (fashion.channels, fashion.image_size, fashion.mean) == (1, 28, (0.2860,))
    assert (tiny.image_size, tiny.augmentation.greyscale, tiny.augmentation.blur) == (64, 0.5, 0.5)
    assert {cell.spec.data.cache_size for cell in select("flesd-1") if "imagenet-100" in cell.column} == {375}
    assert {cell.spec.data.cache_size for cell in select("flesd-1") if "imagenet-100" not in cell.column} == {None}


def test_partitions_evaluation_and_public_images_are_those_of_the_paper() -> None:
    share, ood, k50 = one("fedx-3a:SimCLR@10%"), one("ssd-2:SSD@cifar100-to-cifar10"), one("ssd-1:SSD@cifar10-k50")
    flesd, central, fedx = (
        one("flesd-1:FLESD@cifar10-a1"),
        one("fedrlc-1:BYOL centralized@cifar100"),
        one("fedx-1:FedU@svhn"),
    )

    assert share.spec.partition.share == 0.1  # type: ignore[union-attr]
    assert (ood.spec.partition.dataset, ood.spec.evaluation.dataset) == ("cifar100", "cifar10")  # type: ignore[union-attr]
    assert (k50.spec.partition.variant, k50.spec.training.drop_last) == ("ssd", False)  # type: ignore[union-attr]
    assert flesd.public_client == "client-0"
    assert flesd.spec.cohort.clients == ("client-1", "client-2", "client-3", "client-4", "client-5")
    assert central.spec.partition.pooled  # type: ignore[union-attr]
    assert (fedx.spec.evaluation.every, fedx.spec.evaluation.settings) == (1, "fedx")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedx-1:FedSimCLR+FedX@cifar10", {"last": 56.88, "best": 57.95}),
        ("fedx-3a:FedSimCLR@10%", {"last": 46.8, "best": 47.37}),
        ("fedx-4:FedSimCLR+FedX@cifar10", {"1%": 23.33, "5%": 35.86, "10%": 39.4}),
        ("ssd-1:SSD@cifar100-k50", {"probe": 45.21, "1%": 17.7, "10%": 36.82}),
        ("ssd-2:SSD@cifar100-to-cifar10", {"probe": 78.48, "uniformity": 3.73, "effective rank": 86.95}),
        ("fedrlc-1:FedRLC@cifar10-class", {"probe": 84.08}),
        ("fedrlc-1:FedRLC@cifar100-class", {"probe": 63.4}),
        ("fedrlc-2:FedRLC@cifar10-dir0.1", {"probe": 86.69}),
        ("fedrlc-2:FedRLC@cifar100-dir0.1", {"probe": 63.21}),
        ("fedu-2:FedAvg supervised R50@cifar10-iid-1%", {"accuracy": 26.68}),
        ("fedu-4:online to online@global", {"probe": 84.07}),
        ("flesd-1:FLESD@cifar10-a1", {"probe": 76.2}),
    ],
)
def test_published_numbers_are_those_of_the_paper(name: str, expected: dict[str, float]) -> None:
    found = one(name)
    assert {
        key: found.published[key] for key, measure in found.measures.items() if not measure.published_as
    } == expected


def test_a_number_that_has_two_readings_is_compared_with_both() -> None:
    found = one("ssd-2:SSD@cifar100-to-cifar10")
    kinds = {name: measure.kind for name, measure in found.measures.items()}

    assert (found.published["uniformity"], found.published["uniformity of z"]) == (3.73, 3.73)
    assert (kinds["uniformity"], kinds["uniformity of z"]) == ("uniformity", "embedding_uniformity")


def test_a_selection_ignores_case_and_may_be_partial() -> None:
    assert one("FedX-1:simclr + fedx@CIFAR10").name == "fedx-1:FedSimCLR+FedX@cifar10"
    assert len(select("fedx-1")) == 30
    assert {cell.row for cell in select("fedx-1@svhn")} == set(published()["fedx-1"]["rows"])
    assert len(select("fedrlc-1:fedrlc")) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fedx-9", "no table called 'fedx-9'; did you mean fedx-"),
        ("fedx-1:SimCRL@svhn", "no row in fedx-1 called 'SimCRL'; did you mean FedSimCLR"),
        ("fedx-1:SimCLR@cifar", "no column in these rows of fedx-1 called 'cifar'; did you mean cifar10"),
        ("", "no table called ''"),
    ],
)
def test_an_unknown_selection_is_refused_with_a_suggestion(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        select(text)


def test_the_labelled_images_of_a_semi_supervised_table_belong_to_no_client() -> None:
    """FedU, 4.3: "We first obtain the representations using FedU and other methods without the labeled data"."""
    for cell in (*select("fedu-2"), *select("fedrlc-3"), *select("fedrlc-4")):
        partition, (name,) = cell.spec.partition, cell.published
        assert partition is not None
        if name == "accuracy":  # supervised: its clients train only on the labelled images
            assert (partition.hold_out, partition.max_images) == (0, 500 if cell.column.endswith("-1%") else 5000)
            continue
        assert partition.hold_out == cell.measures[name].share == {"1%": 0.01, "10%": 0.1}[name]
        assert cell.spec.central_evaluation is not None
        assert cell.spec.central_evaluation.dataset == partition.dataset
        assert cell.table != "fedu-2" or cell.column.endswith(f"-{name}")
    others = [cell for cell in ALL if cell.table not in ("fedu-2", "fedrlc-3", "fedrlc-4")]
    assert all(cell.spec.partition is not None and cell.spec.partition.hold_out == 0 for cell in others)


def test_cells_start_from_the_initialisation_of_their_papers_code() -> None:
    for cell in ALL:
        paper = cell.table.partition("-")[0]
        assert cell.spec.model.encoder.first_weights == (
            "torch" if paper in ("fedu", "fedrlc", "ssd") else "torchvision"
        )
