"""Reading specs: file formats, `--set`, and errors that name the key and give advice."""

import io
from pathlib import Path

import pytest

from fedssl.cli.specs import apply_change, read_spec, read_values
from fedssl.errors import SpecError

TOML = 'num_rounds = 3\n[method]\nname = "fedsimclr"\n[training]\nbatch_size = 32\n'
YAML = "num_rounds: 3\nmethod: {name: fedsimclr}\ntraining:\n  batch_size: 32\n"
JSON = '{"num_rounds": 3, "method": {"name": "fedsimclr"}, "training": {"batch_size": 32}}'


def write(folder: Path, text: str, name: str = "spec.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# ten times as many values per line
ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{line}: &a{line} [{', '.join([f'*a{line - 1}'] * 10)}]\n" for line in range(1, 9)
)


def refusal(folder: Path, text: str, *changes: str, name: str = "spec.toml") -> str:
    with pytest.raises(SpecError) as caught:
        read_spec(write(folder, text, name), changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "name"), [(TOML, "a.toml"), (YAML, "a.yaml"), (YAML, "a.yml"), (JSON, "a.json"), (TOML, "A.TOML")]
)
def test_every_format_gives_the_same_spec(tmp_path: Path, text: str, name: str) -> None:
    spec = read_spec(write(tmp_path, text, name))

    assert (spec.num_rounds, spec.method.name, spec.training.batch_size) == (3, "fedsimclr", 32)


@pytest.mark.parametrize("text", [TOML, YAML, JSON])
def test_standard_input_may_be_toml_yaml_or_json(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))

    assert read_spec("-").training.batch_size == 32


def test_an_empty_file_is_the_default_spec(tmp_path: Path) -> None:
    assert read_spec(write(tmp_path, "", "a.yaml")) == read_spec(write(tmp_path, "", "a.toml"))


@pytest.mark.parametrize(
    ("change", "keys", "value"),
    [
        ("num_rounds=7", ("num_rounds",), 7),
        ("training.optimizer.learning_rate=1e-2", ("training", "optimizer", "learning_rate"), 0.01),
        ("method.name=fedbyol", ("method", "name"), "fedbyol"),
        ('method.name="fedbyol"', ("method", "name"), "fedbyol"),
        ("model.encoder.widths=[8, 16]", ("model", "encoder", "widths"), [8, 16]),
        ("model.projector=null", ("model", "projector"), None),
        ("training.drop_last=false", ("training", "drop_last"), False),
        ("name=a=b", ("name",), "a=b"),
        ("name=", ("name",), ""),
        ("name=x\nnum_rounds = 9", ("name",), "x\nnum_rounds = 9"),
        ("partition={alpha = 0.5}", ("partition",), {"alpha": 0.5}),
    ],
)
def test_a_change_sets_one_key(change: str, keys: tuple[str, ...], value: object) -> None:
    values: dict[str, object] = {"num_rounds": 3, "training": {"batch_size": 32}}

    apply_change(values, change)

    found: object = values
    for key in keys:
        assert isinstance(found, dict)
        found = found[key]
    assert found == value
    assert values["training"] == {"batch_size": 32} | ({} if keys[0] != "training" else values["training"])  # type: ignore[operator]


@pytest.mark.parametrize("change", ["num_rounds", "=3", ".a=3", "a.=3", "a..b=3", ""])
def test_a_malformed_change_is_refused_with_the_correct_form(change: str) -> None:
    with pytest.raises(SpecError, match="KEY=VALUE"):
        apply_change({}, change)


def test_a_change_of_a_key_below_a_value_is_refused() -> None:
    with pytest.raises(SpecError, match=r"num_rounds is a value"):
        apply_change({"num_rounds": 3}, "num_rounds.more=1")


def test_changes_are_applied_after_the_file_and_in_order(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, TOML), ["num_rounds=5", "num_rounds=6", "training.batch_size=64"])

    assert (spec.num_rounds, spec.training.batch_size) == (6, 64)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[training]\nbatch_size = 1", "training.batch_size: should be greater than or equal to 2 (it is 1)"),
        ("[training]\nbatchsize = 64", "training.batchsize: there is no such key; did you mean batch_size?"),
        ("[trainings]\nx = 1", "trainings: there is no such key; did you mean training?"),
        ('[method]\nname = "fedsimlcr"', "method.name: there is no 'fedsimlcr' here; did you mean fedsimclr?"),
        ("[method]\ntemperature = 1", "method.name: must be given"),
        ('[method]\nname = "fedsimclr"\ntemprature = 1', "method.temprature: there is no such key; did you mean temp"),
        ('[method]\nname = "fedsimclr"\ntemperature = -1', "method.temperature: should be greater than 0 (it is -1)"),
        ('[method]\nname = "fedsimclr"\n[method.merge]\nname = "no"', "method.merge.name: there is no 'no' here"),
        ('[method]\nname = "fedsimclr"\n[method.merge]\nname = "overwrite"\nx = 1', "method.merge.x: there is no such"),
        ("[training.optimizer]\nlr = 1", "training.optimizer.lr: there is no such key; known: name, learning_rate"),
        ("[model.encoder]\nwidths = [8, 0]", "model.encoder.widths.1: should be greater than or equal to 1 (it is 0)"),
        ("training = 3", "training: must be a table of keys and values (it is 3)"),
        ("[data]\nchannels = 1\nmean = [1, 2]", "data.mean needs 1 value, one per channel; got 2"),
        ("[cohort]\nclients = []", "cohort.clients is empty"),
        ('name = "-x"', "name: a run's name has at most 100 letters"),
        ('num_rounds = "many"', "num_rounds: should be a valid integer"),
        ("num_rounds = nan", "num_rounds: "),
    ],
)
def test_a_wrong_key_is_named_as_it_was_written(tmp_path: Path, text: str, line: str) -> None:
    message = refusal(tmp_path, text)

    assert message.startswith(f"{tmp_path}/spec.toml is not a run spec:\n")
    assert line in message
    assert len(message.splitlines()) == 2


def test_all_wrong_keys_are_named_at_once(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, "num_rounds = 0\nseeds = 1\n[training]\nbatch_size = 0").splitlines()) == 4


def test_very_many_wrong_keys_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, "\n".join(f"x{number} = 1" for number in range(30)))

    assert message.endswith("and 10 more")


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("num_rounds = ", "a.toml", "not valid TOML"),
        ("a: [1", "a.yaml", "not valid YAML"),
        ("- 1\n- 2", "a.yaml", "must be a table of keys and values"),
        ("just text", "a.yaml", "must be a table of keys and values"),
        ("num_rounds: 1\nnum_rounds: 2", "a.yaml", "num_rounds is given twice, again in line 2"),
        ("training:\n  batch_size: 4\n  batch_size: 8", "a.yaml", "batch_size is given twice, again in line 3"),
        ("!!python/object/apply:os.system [ls]", "a.yaml", "not valid YAML"),
        ("1: 2", "a.yaml", "1: Keys should be strings"),
        ("num_rounds = 1", "a.txt", "must end in .toml, .yaml or .json"),
        ("seed = " + "9" * 5000, "a.toml", "not valid TOML: a number has too many digits"),
        ("a = " + "[" * 5000, "a.toml", "not valid TOML: it is nested too deeply"),
        ("seed: " + "9" * 5000, "a.yaml", "a number has too many digits"),
        ("name: 2026-13-45", "a.yaml", "a date does not exist"),
        ("? [a, b]\n: 1", "a.yaml", "found unhashable key"),
        ("a: &a [*a]", "a.yaml", "nested too deeply"),
        (ALIASES, "a.yaml", "has more than 100,000 values"),
    ],
)
def test_unreadable_files_are_explained(tmp_path: Path, text: str, name: str, said: str) -> None:
    assert said in refusal(tmp_path, text, name=name)


def test_a_byte_order_mark_at_the_start_is_ignored(tmp_path: Path) -> None:
    assert read_spec(write(tmp_path, "\ufeff" + TOML, "a.toml")) == read_spec(write(tmp_path, TOML, "b.toml"))


@pytest.mark.parametrize("stdin", [None, io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")])
def test_unreadable_standard_input_is_reported(monkeypatch: pytest.MonkeyPatch, stdin: io.TextIOWrapper | None) -> None:
    monkeypatch.setattr("sys.stdin", stdin)

    with pytest.raises(SpecError, match="cannot read the spec on standard input: it is"):
        read_values("-")


def test_a_changed_value_that_toml_cannot_read_is_text() -> None:
    values: dict[str, object] = {}

    apply_change(values, "name=" + "[" * 5000)
    apply_change(values, "seed=" + "9" * 5000)

    assert values == {"name": "[" * 5000, "seed": "9" * 5000}


def test_files_that_cannot_be_opened_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        read_values(str(tmp_path / "missing.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="UTF-8"):
        read_values(str(tmp_path / "binary.toml"))


def test_invalid_standard_input_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[training\nbatch"))

    with pytest.raises(SpecError, match="the spec on standard input is not valid TOML"):
        read_spec("-")


@pytest.mark.parametrize("path", sorted(Path("examples").glob("*")), ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    spec = read_spec(str(path))

    assert spec.name == path.stem
    assert spec.partition is not None
    assert spec.cohort.min_clients == spec.partition.num_clients
