"""The memory limit of a container, a service or a machine."""

import os
from pathlib import Path

import pytest

from fedssl_worker.memory import total_memory_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/", {"memory.max": "max"}, MACHINE),
        ("0::/", {"memory.max": "1048576"}, 1048576),
        ("0::/system.slice/a b.service", {"system.slice/memory.max": "4096", "memory.max": "max"}, 4096),
        ("9:cpu,memory:/pod", {"memory/pod/memory.limit_in_bytes": "8192"}, 8192),
        ("9:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
        ("0::/../../elsewhere", {"memory.max": "4096"}, 4096),
        ("what?", {}, MACHINE),
    ],
)
def test_the_total_memory_is_the_lowest_limit(tmp_path: Path, own: str, files: dict[str, str], expected: int) -> None:
    (tmp_path / "own").write_text(f"1:name=systemd:/\n{own}\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert total_memory_bytes(tmp_path / "cgroup", tmp_path / "own") == expected


def test_the_total_memory_is_the_machines_without_cgroups(tmp_path: Path) -> None:
    assert total_memory_bytes(tmp_path / "none", tmp_path / "none") == MACHINE
