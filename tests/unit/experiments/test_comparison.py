"""Comparisons: the methods, their settings and data, and the results."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest

from fedssl.data.partitioning import partition_dataset
from fedssl.errors import ResultsError, SpecError
from fedssl.experiments import comparison, plots, summary
from fedssl.experiments.comparison import Failure, Watcher, plan, run_all, settings_apart
from fedssl.experiments.overlays import overlay
from fedssl.experiments.plots import curve_of, plot_comparison
from fedssl.experiments.runs import ComputeSettings, FinishedRun
from fedssl.experiments.spread import mean_and_deviation, spread
from fedssl.experiments.summary import summarise, to_csv, to_document
from fedssl.experiments.variants import Variant, baselines_of, build_spec, values_of
from support.methods import method_spec

BASE: dict[str, Any] = method_spec("fedsimclr", method={"name": "fedsimclr", "temperature": 0.3}).model_dump(
    mode="json"
)
JUDGED = overlay(
    BASE, {"evaluation": {"dataset": "digits", "every": 1, "max_train": 200, "measures": ["probe", "knn"]}}
)


def test_a_method_has_its_defaults_and_the_specs_own_method_keeps_its_parameters() -> None:
    own = values_of(BASE, Variant("a", "fedsimclr"), 0)
    other = values_of(BASE, Variant("b", "fedmoco"), 0)

    assert own["method"]["temperature"] == 0.3
    assert other["method"] == {"name": "fedmoco"}
    assert own["training"] == other["training"] == BASE["training"]


def test_changes_may_set_add_ons_sections_and_parameters() -> None:
    changes = {
        "dsr": {"alpha": 5.0},
        "uniformity_weight": 2.0,
        "merge": {"name": "ema"},
        "training": {"batch_size": 16},
    }

    spec = build_spec(values_of(BASE, Variant("v", "ssd", ("proximal",), changes), 3) | {"model": {}})

    method = spec.method.model_dump()
    assert [part["name"] for part in method["add_ons"]] == ["dsr", "pd", "proximal"]
    assert method["add_ons"][0]["alpha"] == 5.0
    assert method["uniformity_weight"] == 2.0
    assert method["merge"]["name"] == "ema"
    assert spec.training.batch_size == 16
    assert spec.training.local_epochs == BASE["training"]["local_epochs"]


def test_an_encoder_without_a_trained_batch_norm_cannot_be_compared() -> None:
    variant = Variant("local", "fedsimclr", changes={"model": {"batch_norm": "local", "encoder": {"norm": "batch"}}})

    with pytest.raises(SpecError, match=r"a comparison evaluates the coordinator's encoder.*batch_norm = \"local\""):
        build_spec(values_of(BASE, variant, 0))


def test_all_methods_share_the_clients_of_a_seed_and_seeds_differ(tmp_path: Path) -> None:
    entries = plan(BASE, [Variant("a", "fedsimclr"), Variant("b", "fedbyol")], [0, 1], tmp_path)

    assert [(entry.variant, entry.seed) for entry in entries] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    sizes = []
    for entry in entries:
        assert entry.spec is not None
        assert entry.spec.partition is not None
        assert entry.spec.seed == entry.spec.partition.seed == entry.seed
        sizes.append(
            [len(images) for images in partition_dataset(entry.spec.partition, entry.spec.data).by_client.values()]
        )
    assert sizes[0] == sizes[1] != sizes[2] == sizes[3]


def test_a_spec_without_evaluation_gets_a_default_one(tmp_path: Path) -> None:
    entry = plan(overlay(BASE, {"num_rounds": 40}), [Variant("a", "fedsimclr")], [0], tmp_path)[0]

    assert entry.spec is not None
    assert entry.spec.evaluation is not None
    assert (entry.spec.evaluation.dataset, entry.spec.evaluation.every) == ("digits", 4)


@pytest.mark.parametrize(
    ("variants", "seeds", "said"),
    [
        ([Variant("a", "fedsimclr"), Variant("a", "fedx")], [0], "variant a is listed twice"),
        ([Variant("a", "fedsimclr")], [0, 0], "seed 0 is listed twice"),
        ([Variant("a", "fedsimclr", changes={"partition": {"alpha": 9}})], [0], "a has its own partition"),
        ([Variant("a", "flesd")], [0], "no run is possible: a: distillation needs public images"),
        ([], [0], "at least one method"),
    ],
)
def test_impossible_comparisons_are_refused(
    variants: list[Variant], seeds: list[int], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=said):
        plan(BASE, variants, seeds, tmp_path)


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(SpecError, match="did you mean fedsimclr"):
        Variant("a", "fedsimcl")
    with pytest.raises(SpecError, match="no add-on 'fedxx'"):
        Variant("a", "fedsimclr", ("fedxx",))
    with pytest.raises(SpecError, match="cannot name a variant"):
        Variant("../a", "fedsimclr")


def test_settings_that_differ_from_the_base_are_reported(tmp_path: Path) -> None:
    variants = [Variant("a", "fedsimclr"), Variant("b", "fedx", changes={"training": {"batch_size": 16}})]

    assert settings_apart(plan(BASE, variants, [0, 1], tmp_path)) == {"b": {"training.batch_size": 16}}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Run two methods that work, one that is impossible, and one that diverges, at two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    hot = {"training": {"optimizer": {"learning_rate": 100.0, "weight_decay": 1.0}, "local_epochs": 20}}
    variants = [
        Variant("plain", "fedsimclr"),
        Variant("ssd", "ssd"),
        Variant("flesd", "flesd"),
        Variant("hot", "supervised", changes=hot),
    ]
    base = overlay(JUDGED, {"model": {"projector": {"out_dim": 16}}})
    entries = plan(base, variants, [0, 1], folder)
    return folder, entries, run_all(entries, machine=ComputeSettings())


def test_a_failed_method_is_shown_with_its_reason_and_does_not_stop_the_others(compared: tuple[Path, Any, Any]) -> None:
    _, entries, outcomes = compared
    plain, ssd, flesd, hot = summarise(entries, outcomes)

    assert plain.seeds == ssd.seeds == (0, 1)
    assert flesd.seeds == ()
    assert "distillation needs public images, which all clients and the coordinator hold" in flesd.failures[0]
    assert ["not a finite number" in reason for reason in hot.failures.values()] == [True, True]


def test_the_tables_numbers_are_those_of_the_runs(compared: tuple[Path, Any, Any]) -> None:
    _, entries, outcomes = compared
    line = summarise(entries, outcomes)[0]
    runs: list[FinishedRun] = [outcomes["plain", 0], outcomes["plain", 1]]

    last = [run.evaluations[2]["probe"] for run in runs]
    assert line.values["probe_last"] == tuple(last)
    assert line.values["probe_best"] == tuple(max(run.evaluations[at]["probe"] for at in (1, 2)) for run in runs)
    found = line.spread("probe_last")
    assert found is not None
    assert found.mean == pytest.approx(sum(last) / 2)
    # The sample standard deviation of two numbers is their distance over the root of two.
    assert found.deviation == pytest.approx(abs(last[0] - last[1]) / math.sqrt(2))
    assert line.values["probe_untrained"] == tuple(run.evaluations[0]["probe"] for run in runs)
    assert line.values["chance"] == (37 / 360, 37 / 360), "the share of the largest class of the digits' test images"
    # An accuracy does not grow with the traffic: 93 % after a tenth of a megabyte was shown as 930,341 % per GB.
    assert not [column for column in line.values if "gigabyte" in column]


def test_baselines_run_the_same_method_without_a_federation() -> None:
    alone, together = (build_spec(values_of(JUDGED, variant, 5)) for variant in baselines_of(Variant("a", "fedsimclr")))

    assert (alone.method.merge.name, alone.method.reducer.name) == ("local", "none")
    assert alone.partition == build_spec(values_of(JUDGED, Variant("a", "fedsimclr"), 5)).partition
    assert together.partition is not None
    assert (together.partition.pooled, together.partition.seed, together.cohort.min_clients) == (True, 5, 1)
    assert alone.method.temperature == together.method.temperature == 0.3


def test_json_and_csv_contain_every_run(compared: tuple[Path, Any, Any]) -> None:
    _, entries, outcomes = compared
    lines = summarise(entries, outcomes)

    document = to_document(lines, entries, {})
    rows = list(csv.DictReader(io.StringIO(to_csv(lines))))

    assert [variant["name"] for variant in document["variants"]] == ["plain", "ssd", "flesd", "hot"]
    assert len(document["variants"][0]["runs"]) == 2
    assert len(rows) == 8
    assert float(rows[0]["probe_last"]) == outcomes["plain", 0].last["probe"]
    assert int(rows[0]["num_images"]) == outcomes["plain", 0].num_images
    assert "finite" in rows[-1]["failure"]


def test_finished_runs_are_not_repeated_and_variants_can_be_added(compared: tuple[Path, Any, Any]) -> None:
    folder, _, outcomes = compared
    base = overlay(JUDGED, {"model": {"projector": {"out_dim": 16}}})
    entries = plan(base, [Variant("plain", "fedsimclr"), Variant("more", "fedbyol")], [0, 1], folder)
    trained: list[tuple[str, int]] = []

    comparison.require_own(entries)
    again = run_all(
        entries,
        machine=ComputeSettings(),
        watcher=Watcher(on_round=lambda entry, done: trained.append((entry.variant, done))),
    )

    assert again["plain", 0] == outcomes["plain", 0]
    assert trained == [("more", 1), ("more", 2), ("more", 1), ("more", 2)]
    other = plan(overlay(base, {"num_rounds": 3}), [Variant("plain", "fedsimclr")], [0], folder)
    with pytest.raises(ResultsError, match="holds another spec's run"):
        comparison.require_own(other)


@pytest.mark.full
def test_parallel_processes_give_the_same_bits(compared: tuple[Path, Any, Any], tmp_path: Path) -> None:
    _, _, outcomes = compared
    base = overlay(JUDGED, {"model": {"projector": {"out_dim": 16}}})
    entries = plan(base, [Variant("plain", "fedsimclr"), Variant("lost", "fedsimclr")], [0], tmp_path)
    broken = comparison.ComparisonEntry(
        "lost", 0, entries[1].folder, build_spec(overlay(base, {"partition": {"dataset": "none"}}))
    )
    told: list[tuple[str, int]] = []
    watcher = Watcher(on_round=lambda entry, done: told.append((entry.variant, done)))

    found = run_all([entries[0], broken], machine=ComputeSettings(), jobs=2, watcher=watcher)

    plain, expected = found["plain", 0], outcomes["plain", 0]
    assert not isinstance(plain, Failure)
    assert (plain.losses, plain.evaluations) == (expected.losses, expected.evaluations)
    assert told == [("plain", 1), ("plain", 2)]
    assert found["lost", 0] == Failure(
        "found no data set at none: give a folder, an .npz file or one of fashion-mnist, cifar10, cifar100, svhn, "
        "tiny-imagenet, mini-imagenet, imagenet-100, digits"
    )


def run_with(accuracies: dict[int, float]) -> FinishedRun:
    return FinishedRun(
        num_rounds=2, num_images=10, bytes_down=5_000_000, bytes_up=5_000_000, seconds=1.0, losses=[1.0, 0.5],
        evaluations={at: {"probe": value} for at, value in accuracies.items()},
        megabytes_by_round={0: 0.0, 1: 5.0, 2: 10.0},
    )  # fmt: skip


def test_a_curve_has_the_rounds_in_which_every_seed_was_evaluated() -> None:
    curve = curve_of([run_with({0: 0.1, 1: 0.2, 2: 0.4}), run_with({0: 0.3, 2: 0.6})], "probe")

    assert curve.rounds == [0, 2]
    assert curve.mean == pytest.approx([20.0, 50.0])
    assert curve.deviation == pytest.approx([math.sqrt(200), math.sqrt(200)])
    assert curve.megabytes == [0.0, 10.0]


def test_a_seed_that_diverged_is_left_out_of_a_curve(tmp_path: Path) -> None:
    diverged = run_with({0: 0.1, 1: math.nan, 2: math.nan})
    assert curve_of([run_with({0: 0.1, 1: 0.2, 2: 0.4}), diverged], "probe").rounds == [0]
    assert curve_of([run_with({1: 0.2}), run_with({1: math.nan})], "probe").rounds == []
    plot_comparison(tmp_path / "plot.png", {"a": [run_with({0: 0.1, 2: 0.4}), diverged], "b": [diverged]})
    assert (tmp_path / "plot.png").stat().st_size


def test_a_centralised_run_has_no_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for the table, CSV, JSON and the picture, which shows accuracy by traffic on its right."""
    variants = [Variant("plain", "fedsimclr"), *baselines_of(Variant("plain", "fedsimclr"))]
    entries = plan(JUDGED, variants, [0], tmp_path)
    finished = run_with({0: 0.1, 2: 0.4})
    lines = summarise(entries, {(entry.variant, 0): finished for entry in entries})
    assert [line.spread("megabytes_up") is None for line in lines] == [False, False, True]

    drawn: list[str] = []
    monkeypatch.setattr(plots, "_draw", lambda axes, places, curve, number, name, num_curves: drawn.append(name))
    plot_comparison(tmp_path / "plot.png", {line.variant: [finished] for line in lines})
    assert drawn == ["plain", "plain", "local-only", "local-only", "centralised"]


def test_the_picture_depends_only_on_its_data(tmp_path: Path) -> None:
    runs = {"a": [run_with({0: 0.1, 2: 0.4})], "b": [run_with({0: 0.1, 2: 0.5}), run_with({0: 0.2, 2: 0.3})]}
    for name in ("first", "again"):
        plot_comparison(tmp_path / f"{name}.png", runs)

    data = (tmp_path / "first.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data == (tmp_path / "again.png").read_bytes()


def test_an_encoder_that_diverged_has_no_best_round_and_no_mean() -> None:
    diverged = run_with({0: 0.1, 1: math.nan, 2: math.nan})

    assert diverged.best("probe") is None
    assert [mean_and_deviation(spread(values), str) for values in ([0.5, math.nan], [math.nan])] == ["nan ± nan", "nan"]


def test_the_best_round_is_the_earliest_best_round_after_training_began() -> None:
    assert run_with({0: 0.9, 1: 0.4, 2: 0.4}).best("probe") == (1, 0.4)
    assert run_with({0: 0.9}).best("probe") is None
    assert "probe_best" not in summary.figures(run_with({0: 0.9}))
