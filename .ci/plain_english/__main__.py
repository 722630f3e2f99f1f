"""Check the project's English against a word list. Exit: 0 fine, 1 findings, 2 wrong usage.

There are two kinds of text: what users read (documents, help, messages, the web page), and internal text (other
docstrings, comments, names of tests). In either, no word of words.toml may occur more often than counts.json records.
The record may only fall (--write); it is to be zero for users' text, and stays there once it is.
"""

import argparse
import fnmatch
import gc
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prose import INTERNAL, USERS, read_prose

HERE = Path(__file__).parent
WORDS, COUNTS = HERE / "words.toml", HERE / "counts.json"

Counts = dict[str, dict[str, int]]


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
    audience: str
    word: Word
    excerpt: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: [{self.audience}] {self.word.name}: "{self.excerpt}": {self.word.advice}'


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
                    position, audience = prose.locate(match.start())
                    line = source.count("\n", 0, position) + 1
                    yield Hit(path, line, audience, word, _excerpt(prose.text, match))


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of the list: any case, and a space also matches the end of a line."""
    return re.compile(re.sub(r"\\? ", r"\\s+", text.replace("\n", "")), re.IGNORECASE)


def _excerpt(text: str, match: re.Match[str]) -> str:
    """Return what was found, with a few words before and after it from the same piece of text."""
    before = text[max(0, match.start() - 30) : match.start()].rpartition("\0")[2]
    after = text[match.end() : match.end() + 30].partition("\0")[0]
    return " ".join(f"{before}[{match[0]}]{after}".replace("\0", " ").split())


def count(hits: list[Hit], rules: Rules) -> Counts:
    found = Counter((hit.audience, hit.word.name) for hit in hits)
    return {kind: {word.name: found[kind, word.name] for word in rules.words} for kind in (USERS, INTERNAL)}


def lowered(old: Counts, new: Counts) -> Counts:
    """Return the ratchet after the counts `new`: no entry rises, and a word without an entry gets one."""
    return {kind: {word: min(num, old.get(kind, {}).get(word, num)) for word, num in new[kind].items()} for kind in new}


def tracked_files(root: Path, paths: list[str]) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted({path for path in listed.split("\0") if path and (root / path).is_file()})


def table(counts: Counts) -> str:
    rows = [(word, counts[USERS][word], counts[INTERNAL][word]) for word in counts[USERS]]
    rows.append(("total", sum(counts[USERS].values()), sum(counts[INTERNAL].values())))
    lines = [f"{'word':24} {'users':>6} {'internal':>9}"]
    return "\n".join(lines + [f"{word:24} {users:6} {internal:9}" for word, users, internal in rows])


def check(hits: list[Hit], counts: Counts, recorded: Counts) -> int:
    """Report the words that occur more often than recorded, and those that occur less often."""
    failed = False
    for kind, words in counts.items():
        for word, num in words.items():
            limit = recorded.get(kind, {}).get(word, 0)
            if num > limit:
                failed = True
                print(*(hit for hit in hits if hit.audience == kind and hit.word.name == word), sep="\n")
                print(f"{word}: {num} times in {kind} text, and at most {limit} are allowed (.ci/plain_english)")
    if not failed and lowered(recorded, counts) != recorded:
        print("Fewer words of the list than recorded: lower the record with python .ci/plain_english --write")
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="plain_english", description="Check the project's English against words.toml."
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders below the root; default: all")
    parser.add_argument("--root", type=Path, default=HERE.parent.parent, help="the repository to read")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="list every hit; exit 1 if there are any")
    action.add_argument("--counts", action="store_true", help="print a table of words and how often each occurs")
    action.add_argument("--write", action="store_true", help="lower the recorded counts to the present ones")
    parser.add_argument("--users", action="store_true", help="with --list: users' text only")
    arguments = parser.parse_args()
    if arguments.paths and not (arguments.list or arguments.counts):
        parser.error("PATH needs --list or --counts: the recorded counts are of the whole tree")
    gc.disable()  # syntax trees are many small objects without cycles: collecting takes longer than parsing
    rules = Rules.read()
    files = tracked_files(arguments.root, arguments.paths)
    hits = [hit for path in files for hit in rules.find(path, _text(arguments.root / path))]
    counts = count(hits, rules)
    if arguments.list:
        listed = [hit for hit in hits if hit.audience == USERS or not arguments.users]
        print(*sorted(listed, key=lambda hit: (hit.path, hit.line)), f"{len(listed)} hits", sep="\n")
        return int(bool(listed))
    if arguments.counts:
        print(table(counts))
        return 0
    recorded: Counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if arguments.write:
        COUNTS.write_text(json.dumps(lowered(recorded, counts), indent=2) + "\n")
        return 0
    return check(hits, counts, recorded)


def _text(path: Path) -> str:
    return path.read_text(errors="ignore")


if __name__ == "__main__":
    sys.exit(main())
