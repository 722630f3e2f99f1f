"""Clocks that can be made to jump, separately for each process, with libfaketime, which is loaded first."""

import shutil
from pathlib import Path

import libfaketime

_LIBRARY = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"


class Clocks:
    """The wall clocks of the processes that run with `environment(name)`. Monotonic clocks are not changed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o755)
        self._folder = folder
        self._library = folder / "libfaketime.so.1"  # a place where Postgres's own user finds it too
        shutil.copyfile(_LIBRARY, self._library)

    def environment(self, name: str) -> dict[str, str]:
        if not self._file(name).exists():
            self.jump(name, "+0")
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(name)),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # otherwise waits for Python's lock end at once: a core is busy
        }

    def jump(self, name: str, offset: str) -> None:
        """Set a clock's offset from the true time, such as `+1d` or `-3h`."""
        part = self._file(name).with_suffix(".part")
        part.write_text(offset + "\n", encoding="ascii")
        part.replace(self._file(name))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.offset"
