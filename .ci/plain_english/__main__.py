"""Check the project's English against a word list. Exit: 0 fine, 1 findings, 2 wrong usage.

It reads documents, help, messages, the web page, docstrings, comments and names of tests.
"""

import argparse
import fnmatch
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prose import read_prose

HERE = Path(__file__).parent
WORDS = HERE / "words.toml"


class Word(NamedTuple):
    name: str
    pattern: re.Pattern[str]
    unless: re.Pattern[str] | None
    advice: str

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches that do not touch a match of `unless`."""
        found = list(self.pattern.finditer(text))
        excused = [match.span() for match in self.unless.finditer(text)] if found and self.unless else []
        for match in found:
            if not any(start < match.end() and match.start() < end for start, end in excused):
                yield match


class Hit(NamedTuple):
    path: str
    line: int
    word: Word
    excerpt: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: {self.word.name}: "{self.excerpt}": {self.word.advice}'


class Rules(NamedTuple):
    words: list[Word]
    allowed: list[tuple[str, re.Pattern[str]]]

    @classmethod
    def read(cls, path: Path = WORDS) -> "Rules":
        data = tomllib.loads(path.read_text())
        words = [
            Word(
                name,
                _pattern(entry["pattern"]),
                _pattern(entry["unless"]) if "unless" in entry else None,
                entry["advice"],
            )
            for name, entry in data["words"].items()
        ]
        return cls(words, [(entry["path"], _pattern(re.escape(entry["phrase"]))) for entry in data.get("allow", [])])

    def find(self, path: str, source: str) -> Iterator[Hit]:
        prose = read_prose(path, source)
        if prose is None:
            return
        allowed = [
            match.span()
            for glob, phrase in self.allowed
            if fnmatch.fnmatch(path, glob)
            for match in phrase.finditer(prose.text)
        ]
        for word in self.words:
            for match in word.find(prose.text):
                if not any(start <= match.start() and match.end() <= end for start, end in allowed):
                    line = source.count("\n", 0, prose.locate(match.start())) + 1
                    yield Hit(path, line, word, _excerpt(prose.text, match))


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of the list: any case, and a space also matches the end of a line."""
    return re.compile(re.sub(r"\\? ", r"\\s+", text.replace("\n", "")), re.IGNORECASE)


def _excerpt(text: str, match: re.Match[str]) -> str:
    """Return what was found, with a few words before and after it from the same piece of text."""
    before = text[max(0, match.start() - 30) : match.start()].rpartition("\0")[2]
    after = text[match.end() : match.end() + 30].partition("\0")[0]
    return " ".join(f"{before}[{match[0]}]{after}".replace("\0", " ").split())


def tracked_files(root: Path, paths: list[str]) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted({path for path in listed.split("\0") if path and (root / path).is_file()})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="plain_english", description="Check the project's English against words.toml."
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders below the root; default: all")
    parser.add_argument("--root", type=Path, default=HERE.parent.parent, help="the repository to read")
    arguments = parser.parse_args()
    gc.disable()  # syntax trees are many small objects without cycles: collecting takes longer than parsing
    rules = Rules.read()
    files = tracked_files(arguments.root, arguments.paths)
    hits = [hit for path in files for hit in rules.find(path, (arguments.root / path).read_text(errors="ignore"))]
    for hit in sorted(hits, key=lambda hit: (hit.path, hit.line)):
        print(hit)
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main())
