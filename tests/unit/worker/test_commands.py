"""The commands `fedssl-worker ledger`, `policy` and `identity`, with which a data owner reads the worker's state."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedssl_worker.disclosure.ledger.keys import make_key
from fedssl_worker.main import app

from .ledgers import FIELDS, FIRST, SHORT, filled


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def as_json(*arguments: object) -> Any:
    code, out, err = invoke(*arguments, "--format", "json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    ledger = filled(tmp_path / "ledger", 2)
    ledger.append("intent", **{**FIELDS, "round": 3, "run": "other", "numbers": ["loss=0.5"]})
    ledger.append("refused", run="other", round=4, reason="the policy does not permit this work")
    return tmp_path


def test_show_lists_sent_unconfirmed_and_refused_updates(state: Path) -> None:
    code, out, _ = invoke("ledger", "show", "--state", state)
    assert code == 0
    lines = [line for line in out.splitlines() if "weights" in line or "refused" in line]
    assert [next(word for word in ("sent", "unconfirmed", "refused") if word in line) for line in lines] == [
        "sent", "sent", "unconfirmed", "refused",
    ]  # fmt: skip
    assert "encoder; loss=0.5" in lines[2]
    assert all(re.match(r" 20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ ", line) for line in lines)
    assert "the policy does not permit" in lines[3]
    assert "opened" not in out


def test_show_as_json_can_be_limited_to_one_run_or_list_all_entries(state: Path) -> None:
    shown = as_json("ledger", "show", "--state", state)
    assert [(entry["round"], entry["outcome"]) for entry in shown] == [
        (1, "sent"), (2, "sent"), (3, "unconfirmed"), (4, "refused"),
    ]  # fmt: skip
    for name in ("time", "run", "round", "artifact", "tensors", "bytes", "digest", "policy"):
        assert shown[0][name], name
    assert [entry["round"] for entry in as_json("ledger", "show", "--state", state, "--run", "oth")] == [3, 4]
    every = as_json("ledger", "show", "--state", state, "--all")
    assert [entry["kind"] for entry in every] == [
        "opened", "intent", "sent", "intent", "sent", "intent", "refused",
    ]  # fmt: skip


def test_verify_reports_an_intact_ledger(state: Path) -> None:
    code, out, err = invoke("ledger", "verify", "--state", state)
    assert code == 0
    assert "The ledger is intact." in err
    assert "Unconfirmed" in err
    found = as_json("ledger", "verify", "--state", state)
    assert (found["entries"], found["last"], found["unconfirmed"]) == (7, 7, [6])
    assert found["key"] in out


def test_verify_finds_a_change(state: Path) -> None:
    path = state / "ledger" / FIRST
    path.write_bytes(path.read_bytes().replace(b'"bytes":12', b'"bytes":13', 1))
    code, _, err = invoke("ledger", "verify", "--state", state)
    assert code == 4
    assert "NOT INTACT" in err
    assert f"{FIRST}, line 2: entry 2 was changed" in err


def anchors(state: Path, *known: dict[str, Any], page: bool = False) -> Path:
    path = state / "anchors.json"
    path.write_text(json.dumps({"items": known, "next_cursor": None} if page else known))
    return path


def anchor(state: Path, **changes: Any) -> dict[str, Any]:
    found = as_json("ledger", "verify", "--state", state)
    about = {"key": found["key"], "seq": found["last"], "head": found["head"], "at": "2026-11-20", **changes}
    return {**about, "is_consistent": True}


@pytest.mark.parametrize("page", [False, True])
def test_only_an_anchor_reveals_that_the_end_was_cut_off(state: Path, page: bool) -> None:  # noqa: FBT001
    given = anchors(state, anchor(state), page=page)
    assert as_json("ledger", "verify", "--state", state, "--anchors", given)["anchors_compared"] == 1
    path = state / "ledger" / FIRST
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert invoke("ledger", "verify", "--state", state)[0] == 4
    (state / "ledger" / "head").unlink()
    assert invoke("ledger", "verify", "--state", state)[0] == 0  # the hash chain by itself cannot show it
    code, _, err = invoke("ledger", "verify", "--state", state, "--anchors", given)
    assert code == 4
    assert "its end was cut off" in err


def test_anchors_that_do_not_match_or_cannot_be_read_are_refused(state: Path) -> None:
    cases = {
        "differs from this ledger's entry": anchor(state, seq=3),
        "of another ledger of this client": anchor(state, key="0" * 64),
    }
    for words, known in cases.items():
        code, _, err = invoke("ledger", "verify", "--state", state, "--anchors", anchors(state, known))
        assert code == 4
        assert words in err
    (state / "anchors.json").write_text("[1]")
    code, _, err = invoke("ledger", "verify", "--state", state, "--anchors", state / "anchors.json")
    assert code == 2
    assert "fedssl client anchors" in err
    assert "NOT INTACT" not in err
    for option in ("--anchors", "--from"):
        code, _, err = invoke("ledger", "verify", "--state", state, option, state / "misspelt.json")
        assert (code, "NOT INTACT" in err, "misspelt.json" in err) == (2, False, True)


def test_verify_starts_from_a_checkpoint_if_the_first_segment_is_missing(tmp_path: Path) -> None:
    filled(tmp_path / "ledger", 4, SHORT)
    (tmp_path / "ledger" / FIRST).unlink()
    assert invoke("ledger", "verify", "--state", tmp_path)[0] == 4
    start = tmp_path / "ledger/checkpoint-000000000004.json"
    assert as_json("ledger", "verify", "--state", tmp_path, "--from", start)["first"] == 5
    assert len(as_json("ledger", "show", "--state", tmp_path)) == 2  # the remaining entries are still shown
    (tmp_path / "none").write_text("{}")
    assert "not a checkpoint" in invoke("ledger", "verify", "--state", tmp_path, "--from", tmp_path / "none")[2]


def test_verify_and_show_report_an_emptied_ledger(state: Path) -> None:
    (state / "ledger" / FIRST).write_bytes(b"")
    for command in ("verify", "show"):
        code, _, err = invoke("ledger", command, "--state", state)
        assert code == 4
        assert "no entries" in err


@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_missing_ledger_is_reported(tmp_path: Path, command: str) -> None:
    code, _, err = invoke("ledger", command, "--state", tmp_path)
    assert code == 4
    assert "there is no ledger" in err


def test_policy_check_shows_what_a_policy_allows(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    text = 'schema = 1\nclient = "hospital-a"\ncoordinator = "https://fed.example.org"\n[dp]\nrequire = "none"\n'
    path.write_text(text + '[[allow]]\nartifact = "weights"\nmethods = ["fedbyol"]\n[metrics]\nallow = ["loss"]\n')
    code, out, _ = invoke("policy", "check", path)
    assert code == 0
    assert "hospital-a" in out
    assert "fedbyol" in out
    rules = as_json("policy", "check", path)["allow"]
    assert [(rule["artifact"], rule["tensors"]) for rule in rules] == [("weights", ["*"]), ("metrics", ["loss"])]
    path.write_text(text + '[[allow]]\nartifact = "probe-sums"\nmethods = ["ridge-probe"]\nmin_images = 777\n')
    header, row = (
        line
        for line in invoke("policy", "check", path)[1].splitlines()
        if line.startswith((" artifact", " probe-sums"))
    )
    assert row.index("777") + 3 == header.index("min images") + len("min images")
    path.write_text(text.partition("[dp]")[0])
    assert invoke("policy", "check", path)[2] == "Nothing may leave: the policy has no rule.\n"
    path.write_text(text + "odd = 1\n")
    code, _, err = invoke("policy", "check", path)
    assert code == 2
    assert "dp.odd: there is no such key" in err
    path.write_text(text + 'epsilon_max = "8"\n')
    code, _, err = invoke("policy", "check", path)
    assert code == 2
    assert "dp.epsilon_max: this version has no differential privacy and does not enforce this limit" in err


def test_identity_shows_the_pin_that_other_policies_can_use(tmp_path: Path) -> None:
    code, _, err = invoke("identity", "--state", tmp_path)
    assert code == 2
    assert "A worker makes the key when it starts for the first time" in err
    key = make_key(tmp_path / "identity.pem")
    ledger = filled(tmp_path / "ledger", 1)
    ledger.append("receipt", client="hospital-a", anchored_seq=1, head="0" * 64, at="", coordinator="", signature="")
    found = as_json("identity", "--state", tmp_path)
    assert found == {
        "client": "hospital-a",
        "identity": f"ed25519:{key.public}",
        "pin": f'hospital-a = "ed25519:{key.public}"',
    }
    code, out, _ = invoke("identity", "--state", tmp_path)
    assert (code, found["pin"] in out) == (0, True)
