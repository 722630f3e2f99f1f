"""The papers' figures as tables: their settings, and only the numbers that a paper prints."""

from pathlib import Path
from typing import Any

import pytest

from fedssl.experiments.papers import TableCell, select, tables
from fedssl.experiments.report import render
from fedssl.experiments.reproduction import CellResult, prepare
from fedssl.experiments.runs import HERE

TABLES = [cell for table in tables() if "-fig" not in table for cell in select(table)]
FIGURES = [cell for table in tables() if "-fig" in table for cell in select(table)]

IN_THE_TEXT = {
    ("fedx-fig5:without Lc@cifar10", "best"): 35.13,  # the caption
    ("fedx-fig6:FedSimCLR@cifar10", "inter-class angle"): 82.36,  # section 4.3
    ("fedx-fig6:FedSimCLR+FedX@cifar10", "inter-class angle"): 93.15,
    ("flesd-fig2:SimCLR@cifar10-a100", "probe"): 72.8,  # section 3
    ("flesd-fig2:SimCLR@cifar10-a0.01", "probe"): 66.7,
    ("flesd-fig2:Supervised@cifar10-a100", "classifier"): 73.0,
    ("flesd-fig2:Supervised@cifar10-a100", "probe"): 73.5,
    ("flesd-fig2:Supervised@cifar10-a0.01", "classifier"): 18.5,
    ("flesd-fig2:Supervised@cifar10-a0.01", "probe"): 38.6,
}
"""Published numbers of figures that no table has."""


def one(name: str) -> TableCell:
    (found,) = select(name)
    return found


def method_of(cell: TableCell) -> Any:
    return cell.spec.method


def numbers(cell: TableCell) -> dict[str, float]:
    return {name: value for name, value in cell.published.items() if value is not None}


def test_all_figures_are_listed() -> None:
    assert list(dict.fromkeys(cell.table for cell in FIGURES)) == [
        "fedx-fig5", "fedx-fig6", "ssd-fig4", "ssd-fig6a", "ssd-fig6b",
        "fedu-fig5a", "fedu-fig5b", "fedu-fig6a", "fedu-fig6b",
        "flesd-fig2", "flesd-fig4a", "flesd-fig4b", "flesd-fig4c", "flesd-fig5",
    ]  # fmt: skip


def run_of(cell: TableCell) -> dict[str, Any]:
    """Return what is trained: a spec without its name and without the measures of its evaluation."""
    return cell.spec.model_dump(exclude={"name": True, "evaluation": {"measures"}})


def test_a_figures_numbers_come_from_the_text_or_from_the_same_run_in_a_table() -> None:
    found = {}
    for cell in FIGURES:
        same = [table for table in TABLES if table.table[:4] == cell.table[:4] and run_of(table) == run_of(cell)]
        known = {item for table in same for item in numbers(table).items()}
        found.update({(cell.name, name): value for name, value in numbers(cell).items() if (name, value) not in known})

    assert found == IN_THE_TEXT


@pytest.mark.parametrize(
    ("row", "weights"),
    [("localKD+globalKD", (1, 1, 1, 1)), ("localKD", (1, 1, 0, 0)), ("globalKD", (0, 0, 1, 1)),
     ("without Lr", (1, 0, 1, 0)), ("without Lc", (0, 1, 0, 1))],
)  # fmt: skip
def test_each_row_of_fedx_figure_5_leaves_out_one_part(row: str, weights: tuple[float, ...]) -> None:
    spec = one(f"fedx-fig5:{row}@cifar10").spec
    (fedx,) = method_of(one(f"fedx-fig5:{row}@cifar10")).add_ons

    assert weights == (
        fedx.local_contrastive, fedx.local_relational, fedx.global_contrastive, fedx.global_relational,
    )  # fmt: skip
    assert spec.training.batch_size == 64
    assert spec.evaluation is not None
    assert spec.evaluation.every == 1, "the figure shows every round"


def test_ssd_figure_6a_changes_only_alpha() -> None:
    alphas = {cell.column: method_of(cell).add_ons[0].alpha for cell in select("ssd-fig6a:SSD")}

    assert alphas == {f"alpha{alpha}": alpha for alpha in (2, 5, 10, 20, 50, 100)}
    assert run_of(one("ssd-fig6a:SSD@alpha10")) == run_of(one("ssd-1:SSD@cifar10-k10"))


def test_ssd_figure_6b_compares_soft_separation_with_both_hard_variants() -> None:
    soft = one("ssd-fig6b:SSD")

    assert run_of(soft) == run_of(one("ssd-3:+DSR+PD"))
    for variant in ("mask", "projection"):
        cell = one(f"ssd-fig6b:HSD {variant}")
        hard, distilled = method_of(cell).add_ons
        assert (hard.name, hard.variant) == ("hsd", variant)
        assert distilled == method_of(soft).add_ons[1]
        assert run_of(cell) | {"method": None} == run_of(soft) | {"method": None}


def test_each_of_fedus_figures_changes_one_setting() -> None:
    figures = [cell for cell in FIGURES if cell.table.startswith("fedu-")]
    merges = {cell.name: method_of(cell).merge for cell in figures}
    lengths = {cell.name: (cell.spec.num_rounds, cell.spec.training.local_epochs) for cell in figures}

    assert all(cell.spec.partition is not None and cell.spec.partition.scheme == "classes" for cell in figures)
    assert [merges[f"fedu-fig5a:{row}@cifar10-class"].predictor for row in ("DAPU", "local predictor")] == [
        "dapu", "local",
    ]  # fmt: skip
    assert merges["fedu-fig5a:global predictor@cifar100-class"].predictor == "global"
    assert (merges["fedu-fig5a:DAPU@cifar10-class"].mu, merges["fedu-fig5a:DAPU@cifar100-class"].mu) == (0.4, 0.6)
    assert {cell.column: merges[cell.name].mu for cell in select("fedu-fig5b")} == {
        f"mu{mu}": mu for mu in (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
    }
    for name, length in lengths.items():
        table, column = name.partition(":")[0], name.partition("@")[2]
        if table == "fedu-fig6a":
            assert length == (500 / int(column[1:]), int(column[1:]))
        else:
            assert length == (int(column[1:]) if table == "fedu-fig6b" else 800, 1)
    local = one("fedu-fig5a:local predictor@cifar10-class").spec, one("fedu-4:online to online@local").spec
    in_figure, in_table = (spec.model_dump(exclude={"name": True, "method": {"merge": {"mu"}}}) for spec in local)
    assert in_figure == in_table, "they differ only in the threshold, which a local predictor does not use"


def test_flesd_figure_4_is_a_grid_of_rounds_and_epochs() -> None:
    for cell in (*select("flesd-fig4a"), *select("flesd-fig4b"), *select("flesd-fig4c")):
        spec, (setting, alpha) = cell.spec, cell.column.split("-")
        number = int(setting[1:])
        expected = {"a": (number, 200 / number), "b": (number, 100), "c": (2, number)}[cell.table[-1]]
        assert (spec.num_rounds, spec.training.local_epochs) == expected
        assert spec.partition is not None
        assert (spec.partition.dataset, spec.partition.alpha) == ("cifar100", float(alpha[1:]))
        assert (cell.public_client is None) == (cell.row == "FedAvg")


def test_fedx_figure_6_uses_the_runs_of_table_1_but_keeps_their_clients(tmp_path: Path) -> None:
    for row in ("FedSimCLR", "FedSimCLR+FedX"):
        figure, table = one(f"fedx-fig6:{row}"), one(f"fedx-1:{row}@cifar10")
        assert figure.spec == table.spec
        assert (figure.keeps_clients, table.keeps_clients) == (True, False)
        places = [prepare(cell, cell.spec, tmp_path, HERE).folder.name for cell in (figure, table)]
        assert places[0] == f"{places[1]}-clients", "a run of the table did not keep the clients' models"


def test_ssd_figure_4_uses_the_runs_of_table_3() -> None:
    for cell in select("ssd-fig4"):
        assert cell.spec == one(f"ssd-3:{cell.row}").spec
        assert ("DSR loss" in cell.measures) == ("DSR" in cell.row)


def test_flesd_figure_2_trains_every_client_by_itself() -> None:
    lengths = {"SimCLR": ("flesd", 200, 1024), "Supervised": ("supervised", 100, 128)}
    for cell in select("flesd-fig2"):
        spec, method = cell.spec, method_of(cell)
        assert (method.name, spec.training.local_epochs, spec.training.batch_size) == lengths[cell.row]
        assert method.sends_nothing
        assert spec.num_rounds == 1
        assert spec.cohort.clients is None, "all six clients, also the first"
        assert cell.keeps_clients == (cell.row == "Supervised")
    assert one("flesd-fig2:SimCLR@cifar10-a1").spec.training == one("flesd-1:Min-Local@cifar10-a1").spec.training


def test_flesd_figure_5_trains_for_2000_epochs() -> None:
    lengths = {cell.row: (cell.spec.num_rounds, cell.spec.training.local_epochs) for cell in select("flesd-fig5")}

    assert lengths == {"FedAvg": (20, 100), "FLESD": (5, 400)}


def test_a_number_that_is_only_drawn_has_no_difference() -> None:
    cell = one("fedx-fig5:without Lc@cifar10")
    result = CellResult(
        table=cell.table, row=cell.row, column=cell.column, published=cell.published,
        measured={"last": (30.0,), "best": (36.13,)}, seeds=(0,), differences=(), notes=(), device="a GPU",
        seconds=60.0,
    )  # fmt: skip

    text = render([result])

    assert "| without Lc | cifar10 | last | drawn | 30.00 | - | 1 |" in text
    assert "| without Lc | cifar10 | best | 35.13 | 36.13 | +1.00 | 1 |" in text
