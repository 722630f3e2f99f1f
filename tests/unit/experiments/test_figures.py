"""The papers' figures as tables: their settings, and only those numbers that a paper writes out."""

from typing import Any

import pytest

from fedssl.experiments.papers import TableCell, cells, select, tables
from fedssl.experiments.report import render
from fedssl.experiments.reproduction import CellResult

TABLES = [cell for table in tables() if "-fig" not in table for cell in cells(table)]
FIGURES = [cell for table in tables() if "-fig" in table for cell in cells(table)]

IN_THE_TEXT = {
    ("fedx-fig5:without Lc@cifar10", "best"): 35.13,  # the caption
}
"""Published numbers of figures that no table has."""


def one(name: str) -> TableCell:
    (found,) = select(name)
    return found


def numbers(cell: TableCell) -> dict[str, float]:
    return {name: value for name, value in cell.published.items() if value is not None}


def test_the_figures_are_here() -> None:
    assert list(dict.fromkeys(cell.table for cell in FIGURES)) == ["fedx-fig5"]


def run_of(cell: TableCell) -> dict[str, Any]:
    """Return what is trained: a spec without its name and without what is measured on it."""
    return cell.spec.model_dump(exclude={"name": True, "evaluation": {"measures"}})


def test_a_figure_s_numbers_are_those_of_the_text_or_of_a_table_s_same_run() -> None:
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
def test_fedx_figure_5_leaves_out_one_part_per_row(row: str, weights: tuple[float, ...]) -> None:
    spec = one(f"fedx-fig5:{row}@cifar10").spec
    (fedx,) = spec.method.add_ons  # type: ignore[union-attr]

    assert weights == (
        fedx.local_contrastive, fedx.local_relational, fedx.global_contrastive, fedx.global_relational,
    )  # fmt: skip
    assert spec.training.batch_size == 64
    assert spec.evaluation is not None
    assert spec.evaluation.every == 1, "the figure shows every round"


def test_a_number_that_is_only_drawn_has_no_difference() -> None:
    cell = one("fedx-fig5:without Lc@cifar10")
    result = CellResult(
        table=cell.table, row=cell.row, column=cell.column, published=cell.published,
        measured={"last": (30.0,), "best": (36.13,)}, seeds=(0,), differences=(), notes=(), device="a GPU", seconds=60.0,
    )  # fmt: skip

    text = render([result])

    assert "| without Lc | cifar10 | last | drawn | 30.00 | - | 1 |" in text
    assert "| without Lc | cifar10 | best | 35.13 | 36.13 | +1.00 | 1 |" in text
