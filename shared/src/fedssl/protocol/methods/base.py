"""The common part of all methods' configs."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from fedssl.protocol.base import StrictModel
from fedssl.protocol.data import DataConfig, PublicDataConfig
from fedssl.protocol.model import ModelConfig
from fedssl.protocol.plan import Kind
from fedssl.protocol.training import CohortConfig, TrainingConfig


class MethodInfo(BaseModel):
    """A description of a method, for the choice between methods."""

    model_config = ConfigDict(frozen=True)

    title: str
    paper: str
    equations: str
    leaves_the_client: str
    stays_on_the_client: str
    version: int = 1
    """Incremented when the method's mathematics or plan changes. A worker declines a version that it does not have."""


@dataclass(frozen=True, slots=True)
class DimensionsWanted:
    """The dimensions of the embedding that are divided among a run's clients: `width` of them, for `num_clients`
    clients. `num_clients` None stands for the clients that the run starts with."""

    width: int
    num_clients: int | None


class MethodConfig(StrictModel):
    """A method's parameters. Subclasses set `name` to a literal with a default, and `info`."""

    info: ClassVar[MethodInfo]

    name: str

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError, with what to change, if the method cannot train this model."""

    def check_images(self, model: ModelConfig, data: DataConfig) -> None:
        """Raise ValueError, with what to change, if the method cannot train this model on such images."""

    def check_training(self, training: TrainingConfig) -> None:
        """Raise ValueError, with what to change, if the method cannot train this way."""

    def check_public_data(self, public_data: PublicDataConfig | None) -> None:
        """Raise ValueError, with what to change, if the method lacks public images or these do not fit."""

    def check_cohort(self, cohort: CohortConfig) -> None:
        """Raise ValueError, with what to change, if the method cannot work with this cohort."""

    def check_continuation(self, num_rounds: int, total: int) -> None:
        """Raise ValueError, with what to do, if a run of `total` rounds differs in its first `num_rounds` rounds."""

    @property
    def why_not_summed(self) -> str | None:
        """Why the coordinator cannot compute the result from weighted sums over the clients, or None if it can."""
        return None

    @property
    def sent_apart(self) -> tuple[Kind, ...]:
        """The kinds that leave besides the tensors that are summed. The coordinator sees each client's own.

        They leave without masks in a secure round, if the data owner's policy permits that.
        """
        return ()

    @property
    def sends_nothing(self) -> bool:
        """True if no client sends a tensor."""
        return False

    @property
    def why_not_secure(self) -> str | None:
        """Why a secure aggregation cannot carry what leaves a client besides `sent_apart`, or None if it can."""
        if self.why_not_summed is not None:
            return self.why_not_summed
        if self.sends_nothing:
            return f"{self.name} sends no tensors here, so there is no sum"
        return None

    @property
    def restarts_states(self) -> bool:
        """True if every client must start cold after one of them has lost its state (SCAFFOLD)."""
        return False

    def dimensions_wanted(self, model: ModelConfig) -> DimensionsWanted | None:
        """Return the dimensions to divide among the clients, or None if the method assigns none."""
        return None

    def distillation_epochs(self, round_number: int) -> int:
        """Return for how many epochs the coordinator itself trains, to compute the weights at the end of this round.

        Round 0 is before the first. With 0 epochs, the coordinator only combines the updates.
        """
        return 0
