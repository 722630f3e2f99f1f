"""A file that cannot be written is refused before anything is read or computed for it."""

import os
from pathlib import Path

import pytest

from fedssl.cli.destinations import require_folder, require_place
from fedssl.cli.errors import UsageError
from support.commands import fedssl


@pytest.mark.parametrize(
    "command",
    [
        "data check nothing",
        "partition {spec}",
        "reproduce fedx-1:SimCLR@cifar10 --dry-run",
        "embed nothing --model nothing",
        "classify nothing --model nothing --labels nothing",
        "search {file} --index {file}",
        "duplicates --index {file}",
        "outliers --index {file}",
    ],
)
def test_a_file_below_another_file_is_refused_first(command: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    spec = Path(__file__).parents[3] / "examples" / "demo.toml"
    result = fedssl(*command.format(file=file, spec=spec).split(), "--out", file / "result")
    assert result.exit_code == 2, result.output
    assert f"--out {file}/result: {file} is not a folder" in result.stderr


def test_missing_folders_are_allowed_and_not_created(tmp_path: Path) -> None:
    require_place("--out", tmp_path / "a" / "b" / "file.png")
    require_folder("--out", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_devices_folders_and_folders_without_permission_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (tmp_path, Path(os.devnull)):
        with pytest.raises(UsageError, match=r"it is a folder, a device or a pipe, not a file"):
            require_place("--map", place)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match=f"--out {tmp_path}/new/run: the folder {tmp_path} cannot be written"):
        require_folder("--out", tmp_path / "new" / "run")
