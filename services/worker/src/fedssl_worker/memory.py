"""The memory that this process may use, which limits what a coordinator may ask it to hold."""

from pathlib import Path

from fedssl.data.array_files import memory_bytes

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def total_memory_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the memory of the machine, or the limit of this process's cgroup (its container) if that is lower."""
    return min([memory_bytes(), *_limits(cgroups, own)])


def _limits(cgroups: Path, own: Path) -> list[int]:
    """Return the limits of the process's cgroup and of those above it, in both versions of cgroups."""
    found = []
    for line in _lines(own):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.strip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(root):
                # A cgroup without a limit has `max` here, or a number beyond any memory.
                found += [int(text) for text in _lines(each / name) if text.isdecimal()]
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # not Linux, or not mounted here
        return []
