"""Compare several methods on identical partitions and budgets: plan the runs, and run those that are not finished."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedssl.errors import SpecError
from fedssl.experiments import runs
from fedssl.experiments.jobs import FAILURES, run_in_processes
from fedssl.experiments.overlays import differences
from fedssl.experiments.runs import Calls, ComputeSettings, FinishedRun
from fedssl.experiments.variants import Variant, build_spec, values_of
from fedssl.protocol.runs import RunSpec
from fedssl.wording import reason_of

SHARED = ("seed", "partition")
"""Sections of the spec that no variant may change, so that clients hold the same images in all runs."""


@dataclass(frozen=True, slots=True)
class ComparisonEntry:
    """One run of a comparison. A run without a `spec` is not possible, for the reason `problem`."""

    variant: str
    seed: int
    folder: Path
    spec: RunSpec | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a run did not finish."""

    reason: str


Outcome = FinishedRun | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Callbacks of a comparison.

    `on_round` receives the number of a run's finished rounds, also when the run resumes.
    """

    on_start: Callable[[ComparisonEntry], None] = lambda entry: None
    on_round: Callable[[ComparisonEntry, int], None] = lambda entry, rounds_done: None
    on_end: Callable[[ComparisonEntry, Outcome], None] = lambda entry, outcome: None


QUIET = Watcher()


def plan(
    base: Mapping[str, Any], variants: Sequence[Variant], seeds: Sequence[int], folder: Path
) -> list[ComparisonEntry]:
    """Return every variant at every seed, ordered by seed, so that all methods have results early.

    Raises SpecError if names repeat, a variant changes a shared section, or no variant can be run at all.
    """
    if not variants or not seeds:
        raise SpecError("a comparison needs at least one method and one seed")
    for what, names in (("variant", [variant.name for variant in variants]), ("seed", list(map(str, seeds)))):
        if twice := [name for name in names if names.count(name) > 1]:
            raise SpecError(f"the {what} {twice[0]} is listed twice: list it once")
    for variant in variants:
        if wrong := [key for key in SHARED if key in variant.changes]:
            raise SpecError(f"{variant.name} has its own {wrong[0]}: change the spec's, which all methods share")
    entries = [_entry(base, variant, seed, folder) for seed in seeds for variant in variants]
    if all(entry.spec is None for entry in entries):
        raise SpecError(f"no run is possible: {entries[0].variant}: {entries[0].problem}")
    return entries


def _entry(base: Mapping[str, Any], variant: Variant, seed: int, folder: Path) -> ComparisonEntry:
    place = folder / f"{variant.name}-seed{seed}"
    try:
        return ComparisonEntry(variant.name, seed, place, build_spec(values_of(base, variant, seed)))
    except SpecError as error:
        return ComparisonEntry(variant.name, seed, place, None, str(error))


def require_own(entries: Sequence[ComparisonEntry]) -> None:
    """Raise ResultsError if a run's folder holds another run, before any run starts."""
    for entry in entries:
        if entry.spec is not None:
            runs.require_own(entry.spec, entry.folder)


def settings_apart(entries: Sequence[ComparisonEntry]) -> dict[str, dict[str, Any]]:
    """Return the settings outside of the method in which each variant's spec differs from that of the first variant."""
    first = next(entry for entry in entries if entry.spec is not None)
    base = first.spec.model_dump(mode="json") if first.spec is not None else {}
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry.spec is None or entry.seed != first.seed:
            continue
        apart = differences(base, entry.spec.model_dump(mode="json"))
        found[entry.variant] = {
            key: after for key, _, after in apart if key != "name" and key.partition(".")[0] != "method"
        }
    return {variant: changed for variant, changed in found.items() if changed}


def run_all(
    entries: Sequence[ComparisonEntry], *, machine: ComputeSettings, jobs: int = 1, watcher: Watcher = QUIET
) -> dict[tuple[str, int], Outcome]:
    """Run all entries that are not finished. A run that fails does not end the others; the next call retries it.

    If `jobs` is above 1, that many processes are started, each with one CPU thread. A run in whose folder another
    process works fails.
    """
    outcomes: dict[tuple[str, int], Outcome] = {}

    def end(entry: ComparisonEntry, outcome: Outcome) -> None:
        outcomes[entry.variant, entry.seed] = outcome
        watcher.on_end(entry, outcome)

    for entry in entries:
        if entry.spec is None:
            end(entry, Failure(entry.problem))
    possible = [entry for entry in entries if entry.spec is not None]
    if jobs == 1:
        for entry in possible:
            end(entry, _run_here(entry, machine, watcher))
        return outcomes
    tasks = [(entry, entry.spec, entry.folder) for entry in possible if entry.spec is not None]
    for entry, reason in run_in_processes(tasks, machine, jobs, watcher.on_start, watcher.on_round):
        end(entry, _outcome(entry, reason))
    return outcomes


def _run_here(entry: ComparisonEntry, machine: ComputeSettings, watcher: Watcher) -> Outcome:
    assert entry.spec is not None, "only possible runs are run"
    watcher.on_start(entry)
    calls = Calls(
        on_resume=lambda done: watcher.on_round(entry, done),
        on_round=lambda record: watcher.on_round(entry, record.round_number),
    )
    try:
        return runs.run_in_folder(entry.spec, entry.folder, machine=machine, calls=calls)
    except FAILURES as error:
        return Failure(reason_of(error))


def _outcome(entry: ComparisonEntry, reason: str | None) -> Outcome:
    if reason is not None:
        return Failure(reason)
    assert entry.spec is not None, "only possible runs are run"
    finished = runs.find_finished(entry.spec, entry.folder)
    return Failure("the process ended without a result") if finished is None else finished
