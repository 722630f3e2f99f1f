"""Ladders: a setting, and methods that each add one change to the one before. `ladder_files/NAME.yaml` holds them."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from fedssl.errors import SpecError
from fedssl.experiments.overlays import Values, overlay
from fedssl.experiments.variants import Variant, baselines_of, build_spec, known
from fedssl.protocol.base import StrictModel

_FOLDER = files("fedssl.experiments") / "ladder_files"


class Rung(StrictModel):
    """One step of a ladder: a method that starts from the setting, or changes to the rung before."""

    name: str
    method: str | None = Field(default=None, description="Null: the rung before, with further changes.")
    changes: Values = Field(default={}, description="As in `fedssl compare --variant`, as nested tables.")
    one_epoch: bool = Field(
        default=False, description="Rounds of one local epoch, as many as the setting has epochs in all rounds."
    )
    rounds_per_epoch: int = Field(
        default=1, ge=1, description="Each round is this part of an epoch, and there are as many more rounds."
    )
    clients_per_round: int | None = Field(
        default=None,
        ge=1,
        description="Each round samples this many of the partition's clients, and there are as many more rounds.",
    )

    @model_validator(mode="after")
    def _rounds_are_the_settings(self) -> Self:
        if self.method is None and (self.one_epoch or self.rounds_per_epoch > 1 or self.clients_per_round is not None):
            raise ValueError(
                f"rung {self.name}: one_epoch, rounds_per_epoch and clients_per_round belong to a rung that names a "
                "method"
            )
        return self

    def same_work(self, base: Mapping[str, Any]) -> Values:
        """Return the changes of the setting that give the rung its rounds, with as many epochs of all clients together.

        Raises SpecError if no whole number of rounds has as many.
        """
        epochs, clients = base["training"]["local_epochs"] if self.one_epoch else 1, base["partition"]["num_clients"]
        asked = self.clients_per_round or clients
        epochs *= self.rounds_per_epoch
        rounds, rest = divmod(base["num_rounds"] * epochs * clients, asked)
        if rest or asked > clients:
            raise SpecError(
                f"rung {self.name}: {base['num_rounds']} rounds of {clients} clients cannot become rounds of {asked}: "
                "set num_rounds to a multiple"
            )
        changes: Values = {"training": {"local_epochs": 1}} if self.one_epoch else {}
        if self.rounds_per_epoch > 1:
            changes.setdefault("training", {})["epoch_fraction"] = 1 / self.rounds_per_epoch
        if asked != clients:
            changes["cohort"] = {"fraction": asked / clients}
        if rounds != base["num_rounds"]:
            changes["num_rounds"] = rounds
            changes["evaluation"] = {"every": base["evaluation"]["every"] * epochs * clients // asked}
        return changes


class Ladder(StrictModel):
    """Methods, each of which should improve on the one before, and the settings in which they can be compared."""

    title: str
    seeds: tuple[int, ...] = Field(description="The seeds of the comparison. No rung was chosen on them.")
    bounds: str = Field(description="The rung whose baselines without a federation are trained.")
    settings: dict[str, Values] = Field(description="Specs by name, without the method of a rung.")
    rungs: tuple[Rung, ...]

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        if self.bounds not in [rung.name for rung in self.rungs]:
            raise ValueError(f"no rung is called {self.bounds}, which bounds names")
        if self.rungs[0].method is None:
            raise ValueError("the first rung names no method")
        return self

    def setting(self, name: str | None) -> Values:
        """Return the spec of a setting, the first without a name. Raises SpecError with the known names."""
        chosen = next(iter(self.settings)) if name is None else name
        return overlay({}, known(chosen, self.settings, "setting"))

    def variants(self, base: Mapping[str, Any]) -> list[Variant]:
        """Return the rungs as variants of the setting `base`, and after them the baselines without a federation.

        Raises SpecError if the setting is not a valid spec.
        """
        complete = build_spec(base).model_dump(mode="json")
        found: list[Variant] = []
        for rung in self.rungs:
            method = rung.method or found[-1].method
            before = rung.same_work(complete) if rung.method is not None else found[-1].changes
            found.append(Variant(rung.name, method, changes=overlay(before, rung.changes)))
        return found + baselines_of(next(each for each in found if each.name == self.bounds))


def read_ladder(name: str) -> Ladder:
    """Return the ladder of this name. Raises SpecError if there is none."""
    ladders = {path.name.removesuffix(".yaml"): path for path in _FOLDER.iterdir() if path.name.endswith(".yaml")}
    return Ladder.model_validate(yaml.safe_load(known(name, ladders, "ladder").read_text(encoding="utf-8")))
