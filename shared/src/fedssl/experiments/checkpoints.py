"""A simulation's checkpoint after every round: safetensors files, and a manifest that lists a round's files.

A round writes only what it changed, into new files. The new round becomes the state at the moment when the manifest is
replaced; files that it no longer lists are removed afterwards. Therefore a process may be killed at any time.
"""

import dataclasses
import functools
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError

import fedssl
from fedssl.artifacts.tensors import Tensors, load_tensors, save_tensors
from fedssl.errors import ResultsError
from fedssl.files import replaced_file, write_atomically
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts
from fedssl.simulation import Result, RoundRecord

MANIFEST = "manifest.json"
_FORMAT = 1
_SUFFIX = ".safetensors"
_HINT = "take another folder, or start again with --restart"

SITES = TypeAdapter(dict[int, dict[str, SiteCounts | str]])
"""The JSON of `Result.site_evaluations`."""

CROSS_SITE = TypeAdapter(dict[int, dict[str, dict[str, SiteCounts | str]]])
"""The JSON of `Result.cross_site`."""


def code_version(spec: RunSpec) -> dict[str, str]:
    """Return the versions of fedssl, of the run's method and of torch, which must not change within a run."""
    method = spec.method.name
    return {
        "fedssl": version("fedssl"),
        "method": f"{method} {METHOD_CONFIGS[method].info.version}",
        "torch": torch.__version__,
    }


@functools.cache
def sources_digest() -> str:
    """Return a digest of the sources of fedssl without those of the command line, in hexadecimal.

    They change between two releases, while the version of fedssl stays the same.
    """
    root, digest = Path(fedssl.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] != "cli":
            digest.update(f"{name.as_posix()}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def run_key(spec: RunSpec) -> str:
    """Return the sha256 of the spec and the code that runs it, in hexadecimal.

    It leaves out `watch`, which does not change any weight: a run that it paused may continue with other thresholds.
    """
    text = json.dumps([_FORMAT, spec.model_dump(mode="json", exclude={"watch"}), code_version(spec)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class FolderCheckpoint:
    """A simulation's checkpoint in its own folder, kept until `discard`.

    `sources`: the `sources_digest` of each version of fedssl that has computed a part of the simulation, or will.
    """

    def __init__(self, folder: Path) -> None:
        self.sources = (sources_digest(),)
        self._folder = folder
        self._files: dict[str, str | None] = {}

    def load(self, spec: RunSpec) -> Result | None:
        """Load the simulation after its last saved round; None if no round was saved.

        Raises ResultsError if the folder holds another run's checkpoint, or a damaged one.
        """
        try:
            manifest = json.loads((self._folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise self._damaged(error) from error
        if not isinstance(manifest, dict):
            raise self._damaged(ValueError("its manifest is not an object"))
        if manifest.get("key") != run_key(spec):
            raise ResultsError(f"{self._folder} holds the checkpoint of {_difference(manifest, spec)}: {_HINT}")
        try:
            self._files = dict(manifest["files"])
            before = manifest.get("sources", ["unknown"])  # until 28 November 2026, a checkpoint did not name them
            self.sources = tuple(dict.fromkeys([*before, sources_digest()]))
            return self._result(manifest, spec)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(error) from error

    def save(self, result: Result) -> None:
        """Save the round that was just finished, so that the run continues after it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        number = result.rounds_done
        trained = {f"client.{name}": result.client_states[name] for name in _cohort(result)}
        changed = {"model": result.model, **trained}
        if not self._files:
            changed["initial"] = result.initial
            changed |= {f"client.{name}": state for name, state in result.client_states.items()}
        # Without the states that a round took from all clients, because one of them had lost its own (SCAFFOLD).
        known = {f"client.{name}" for name in result.client_states}
        files = {what: name for what, name in self._files.items() if what in known or not what.startswith("client.")}
        if _same(result.server_state, result.model):  # true for most methods, whose state is what they broadcast
            files.pop("server", None)
        else:
            changed["server"] = result.server_state
        for what, tensors in changed.items():
            files[what] = name = f"{what}.{number}{_SUFFIX}" if tensors else None
            if name is not None:
                write_durably(self._folder / name, tensors)
        manifest = {
            "key": run_key(result.spec),
            "spec": result.spec.model_dump(mode="json", exclude={"watch"}),
            "code": code_version(result.spec),
            "sources": self.sources,
            "images": result.images,
            "files": files,
            "history": [dataclasses.asdict(record) for record in result.history],
            "evaluations": {str(at): measures for at, measures in result.evaluations_by_round.items()},
            "site_evaluations": SITES.dump_python(result.site_evaluations, mode="json"),
            "cross_site": CROSS_SITE.dump_python(result.cross_site, mode="json"),
        }
        write_atomically(self._folder / MANIFEST, json.dumps(manifest))
        self._files = files
        self._remove_others()

    def discard(self) -> None:
        """Remove the folder, the manifest first, because the run is finished or starts again."""
        self._files = {}
        if self._folder.is_dir():
            (self._folder / MANIFEST).unlink(missing_ok=True)
            self._remove_others()
            self._folder.rmdir()

    def _result(self, manifest: dict[str, Any], spec: RunSpec) -> Result:
        tensors = {what: load_tensors(self._folder / name) if name else {} for what, name in self._files.items()}
        evaluations = {int(at): dict(measures) for at, measures in manifest["evaluations"].items()}
        return Result(
            spec=spec,
            initial=tensors["initial"],
            model=tensors["model"],
            history=[RoundRecord(**record) for record in manifest["history"]],
            client_states={
                what.removeprefix("client."): state for what, state in tensors.items() if what.startswith("client.")
            },
            evaluations=evaluations[max(evaluations)] if evaluations else {},
            evaluations_by_round=evaluations,
            server_state=tensors.get("server", tensors["model"]),
            site_evaluations=SITES.validate_python(manifest.get("site_evaluations", {})),
            cross_site=CROSS_SITE.validate_python(manifest.get("cross_site", {})),
            images=manifest.get("images", ""),
        )

    def _remove_others(self) -> None:
        """Remove this class's files that the manifest does not list."""
        for path in self._folder.iterdir():
            ours = path.name.endswith((_SUFFIX, f"{_SUFFIX}.incoming")) or path.name == f".{MANIFEST}.incoming"
            if ours and path.name not in self._files.values():
                path.unlink()

    def _damaged(self, error: Exception) -> ResultsError:
        return ResultsError(f"the checkpoint in {self._folder} cannot be read ({error}): {_HINT}")


def _cohort(result: Result) -> list[str]:
    """Return the clients whose state the last round may have changed."""
    return sorted(result.history[-1].clients.keys() & result.client_states.keys())


def _same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _difference(manifest: dict[str, Any], spec: RunSpec) -> str:
    """Return, in a few words, how the run on disk differs."""
    ours, theirs = code_version(spec), manifest.get("code")
    if isinstance(theirs, dict) and manifest.get("spec") == spec.model_dump(mode="json", exclude={"watch"}):
        changed = [f"{name} {theirs.get(name)}, now {ours[name]}" for name in ours if theirs.get(name) != ours[name]]
        return f"other code ({'; '.join(changed)})"
    return "another spec"


def write_durably(path: Path, tensors: Tensors) -> None:
    """Replace a file of tensors, which is on the disk when this returns."""
    with replaced_file(path, durable=True) as incoming:
        save_tensors(tensors, incoming)
