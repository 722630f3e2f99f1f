"""The command `fedssl compare`, run in this process."""

import csv
import io
import json
from pathlib import Path

import pytest

from fedssl.cli.compare.arguments import read_variants
from fedssl.experiments.runs import locked_folder
from support.commands import fedssl

SPEC = """
name = "tiny"
num_rounds = 2
[method]
name = "fedsimclr"
temperature = 0.3
[model.encoder]
widths = [4, 8]
[model.projector]
hidden_dims = [8]
out_dim = 8
[data]
channels = 1
image_size = 16
[training]
batch_size = 32
[evaluation]
dataset = "digits"
every = 1
max_train = 200
max_test = 100
measures = ["probe", "geometry"]
[partition]
dataset = "digits"
num_clients = 2
scheme = "iid"
max_images = 160
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "tiny.toml"
    path.write_text(SPEC)
    return path


def test_the_table_lists_every_method_and_the_files_are_written(spec: Path, tmp_path: Path) -> None:
    result = fedssl(
        "compare", spec, "--methods", "fedsimclr,fedbyol,flesd", "--variant", "cold=fedsimclr:temperature=0.05",
        "--seeds", "0,1", "--set", "fedbyol:training.local_epochs=2", "--out", tmp_path,
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for name in ("fedsimclr", "fedbyol", "cold"):
        assert "±" in result.stdout.split(f" {name} ", 1)[1].splitlines()[0]
        assert "2 of 2" in result.stdout
    assert "0 of 2" in result.stdout
    assert "flesd failed (seed 0, 1): distillation needs public images" in result.stdout
    assert "fedbyol has settings of its own: training.local_epochs=2" in result.stdout
    assert "best rounds are chosen on the test set" in result.stdout
    assert "picture" in rows
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "cold-seed1" / "encoder.safetensors").exists()
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert [variant["name"] for variant in document["variants"]] == ["fedsimclr", "fedbyol", "flesd", "cold"]
    assert set(document["variants"][0]["mean"]) >= {
        "probe_last",
        "probe_best",
        "uniformity",
        "effective_rank",
        "seconds",
    }


def test_standard_output_has_only_the_json_or_csv(spec: Path, tmp_path: Path) -> None:
    asked = ("compare", spec, "--methods", "fedsimclr,fedsimclr+proximal", "--out", tmp_path)

    document = json.loads(fedssl(*asked, "--format", "json").stdout)
    again = fedssl(*asked, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(again.stdout)))

    assert [variant["runs"][0]["probe_last"] for variant in document["variants"]] == [
        float(row["probe_last"]) for row in rows
    ]
    assert [row["variant"] for row in rows] == ["fedsimclr", "fedsimclr+proximal"]


def test_without_methods_the_specs_own_method_is_used(spec: Path) -> None:
    base, variants = read_variants(str(spec), None, [], ["num_rounds=3"])

    assert base["num_rounds"] == 3
    assert [(variant.name, variant.method) for variant in variants] == [("fedsimclr", "fedsimclr")]


def test_variants_and_changes_are_parsed(spec: Path) -> None:
    _, variants = read_variants(
        str(spec),
        "fedmoco+fedx, ssd",
        ["soft=ssd:dsr.alpha=5,training.batch_size=16", 'two=fedbyol:add_ons=[{name="fedx"},{name="proximal"}]'],
        ["ssd:dsr.gamma=0.5", "soft:temperature=1"],
    )

    moco, ssd, soft, two = variants
    assert (moco.name, moco.method, moco.add_ons) == ("fedmoco+fedx", "fedmoco", ("fedx",))
    assert ssd.changes == {"dsr": {"gamma": 0.5}}
    assert soft.changes == {"dsr": {"alpha": 5}, "training": {"batch_size": 16}, "temperature": 1}
    assert two.changes == {"add_ons": [{"name": "fedx"}, {"name": "proximal"}]}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--methods", "fedsimcl"], 2, "did you mean fedsimclr"),
        (["--variant", "fedsimclr"], 2, "write it as NAME=METHOD"),
        (["--seeds", "a"], 2, "give whole numbers"),
        (["--seeds", ""], 2, "--seeds : give whole numbers"),
        (["--methods", " , "], 2, "--methods  , : give methods by name, for example fedbyol,fedsimclr"),
        (["--set", "fedx:training.batch_size=64"], 2, "is for a method that is not compared"),
        (["--methods", "flesd"], 2, "no run is possible: flesd: distillation needs public images"),
        (["--set", "partition=null"], 2, "add a [partition] section"),
        (
            ["--variant", "a=fedsimclr:temprature=1"],
            2,
            "temprature: there is no such key; did you mean temperature?",
        ),
        (["--set", "evaluation.dataset=nowhere"], 2, "(evaluation.dataset), but found no data set at nowhere"),
        (["--set", "evaluation.dataset=nowhere", "--dry-run"], 2, "found no data set at nowhere"),
        (["--on", "cifar10-class"], 2, "give a SPEC to compare methods on, or --ladder NAME"),
        (["--ladder", "best"], 2, "leave out SPEC, --methods and --baselines"),
        (["--device", "cuda:99"], 2, "--device cuda:99 cannot be used here"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(
    spec: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    result = fedssl("compare", spec, "--out", tmp_path, *arguments)

    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_another_comparisons_folder_is_refused_unless_restart_is_given(spec: Path, tmp_path: Path) -> None:
    assert fedssl("compare", spec, "--out", tmp_path, "--set", "num_rounds=1").exit_code == 0

    refused = fedssl("compare", spec, "--out", tmp_path)
    anew = fedssl("compare", spec, "--out", tmp_path, "--restart")

    assert refused.exit_code == 5
    assert "--restart" in refused.stderr
    assert anew.exit_code == 0, anew.output


def test_a_second_comparison_in_the_same_folder_is_refused(spec: Path, tmp_path: Path) -> None:
    """Its runs would fail because the first one trains them, and its table would replace the first one's."""
    with locked_folder(tmp_path):
        result = fedssl("compare", spec, "--out", tmp_path)
    assert result.exit_code == 5
    assert f"{tmp_path} is in use by process" in result.stderr
    assert not (tmp_path / "comparison.json").exists()


def test_if_every_run_fails_the_command_fails(spec: Path, tmp_path: Path) -> None:
    result = fedssl("compare", spec, "--out", tmp_path, "--set", "partition.dataset=nowhere")

    assert result.exit_code == 1
    reason = "found no data set at nowhere"
    assert f"fedsimclr failed (seed 0): {reason}" in result.stdout
    assert (result.stdout + result.stderr).count(reason) == 1, "an error is printed once"
    assert "seeds" not in result.stdout, "there is nothing to tabulate"
    assert "comparison.png" not in result.stdout, "there is no picture"


def test_the_table_includes_the_baselines(spec: Path, tmp_path: Path) -> None:
    result = fedssl("compare", spec, "--baselines", "--out", tmp_path, "--set", 'evaluation.measures=["knn"]')

    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    kept = {name: json.loads((tmp_path / f"{name}-seed0" / "result.json").read_text()) for name in (
        "fedsimclr", "local-only", "centralised")}  # fmt: skip
    assert rows["untrained"][3] == f"{100 * kept['fedsimclr']['evaluations']['0']['knn']:.2f}"
    assert rows["chance"][3] == f"{100 * kept['fedsimclr']['chance']['accuracy']:.2f}"
    for name in ("local-only", "centralised"):
        assert f"{100 * kept[name]['evaluations']['2']['knn']:.2f}" in result.stdout
    low, own, high = (kept[name]["evaluations"]["2"]["knn"] for name in ("local-only", "fedsimclr", "centralised"))
    assert f"{100 * (own - low) / (high - low):.2f}" in result.stdout.split("share of the gap closed", 1)[1]
    (gap,) = json.loads((tmp_path / "comparison.json").read_text())["gaps"]
    assert (gap["variant"], gap["measure"], gap["step"]) == ("fedsimclr", "knn", None)
    assert gap["share"] == {"mean": pytest.approx((own - low) / (high - low)), "half_width": None}
    assert "per GB" not in result.stdout
    assert kept["local-only"]["bytes_up"] < 1000 < kept["fedsimclr"]["bytes_up"]


def test_a_dry_run_reports_a_folder_that_holds_another_run(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "fedsimclr-seed0").mkdir()
    (tmp_path / "fedsimclr-seed0" / "result.json").write_text('{"key": "another"}')
    asked = ("compare", spec, "--methods", "fedsimclr", "--out", tmp_path, "--dry-run")

    refused = fedssl(*asked)

    assert refused.exit_code == fedssl(*asked[:-1]).exit_code == 5
    assert "holds another spec's run" in refused.stderr
    assert fedssl(*asked, "--restart").exit_code == 0


def test_a_dry_run_as_csv_has_a_line_per_run(spec: Path) -> None:
    result = fedssl("compare", spec, "--methods", "fedsimclr,fedbyol", "--dry-run", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["variant"], row["problem"]) for row in rows] == [("fedsimclr", ""), ("fedbyol", "")]


def test_a_ladder_sets_its_setting_rungs_baselines_and_seeds(tmp_path: Path) -> None:
    changes = [f"--set={section}.dataset=digits" for section in ("partition", "evaluation")]

    result = fedssl(
        "compare", "--ladder", "best", "--on", "cifar10-dir0.1", "--variant", "own=fedmoco", *changes,
        "--set", "fedsimclr:temperature=0.5", "--out", tmp_path, "--dry-run", "--format", "json",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)["runs"]
    names = list(dict.fromkeys(run["variant"] for run in runs))
    assert names[-3:] == ["local-only", "centralised", "own"]
    assert {"fedbyol", "fedsimclr"} < set(names)
    assert {run["seed"] for run in runs} == {0, 1, 2}
    assert {run["clients"] for run in runs if run["variant"] != "centralised"} == {5}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ladder", "bset"], "did you mean best?"),
        (["--ladder", "best", "--on", "cifar"], "there is no setting 'cifar'"),
        (["--ladder", "best", "--set", "partition.dataset=cifar100"], "CIFAR-100: run `fedssl data fetch cifar100`"),
    ],
)
def test_an_unknown_ladder_or_setting_is_refused(tmp_path: Path, arguments: list[str], reason: str) -> None:
    result = fedssl("compare", *arguments, "--data-folder", tmp_path, "--out", tmp_path / "out")

    assert result.exit_code != 0
    assert reason in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--set", "method=fedbyol"), "method: must be a table of keys and values (it is 'fedbyol')"),
        (("--methods", "fedx", "--set", "method=fedbyol"), "method: must be a table"),
        (("--methods", "fedx", "--set", "partition=digits"), "partition: must be a table"),
        (("--methods", "fedx", "--baselines", "--set", "cohort=5"), "cohort: must be a table"),
        (("--variant", "x=fedbyol:dsr=5"), "write dsr.PARAMETER=5"),
        (
            ("--methods", "fedsimclr+dsr", "--set", 'method.add_ons=["fedx"]'),
            "method.add_ons: must be a list of tables",
        ),
    ],
)
def test_a_value_in_place_of_a_table_is_refused(spec: Path, arguments: tuple[str, ...], reason: str) -> None:
    result = fedssl("compare", spec, *arguments, "--dry-run")

    assert result.exit_code == 2
    assert reason in result.stderr.replace("\n", " ")
