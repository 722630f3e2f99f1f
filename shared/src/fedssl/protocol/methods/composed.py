"""The base of the methods' configs: an objective's own fields, add-ons, a merge rule and a reducer."""

from collections import Counter
from typing import ClassVar

from pydantic import Field

from fedssl.protocol.data import PublicDataConfig
from fedssl.protocol.methods.add_ons import AnyAddOn
from fedssl.protocol.methods.base import DimensionsWanted, MethodConfig
from fedssl.protocol.methods.merges import AnyMerge, OverwriteConfig
from fedssl.protocol.methods.parts import DimensionedConfig, Trait
from fedssl.protocol.methods.reducers import AnyReducer, MeanConfig
from fedssl.protocol.model import BatchNormPolicy, ModelConfig
from fedssl.protocol.plan import Kind
from fedssl.protocol.training import CohortConfig, TrainingConfig


class ComposedConfig(MethodConfig):
    """An objective's parameters, and the parts that are combined with it."""

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector"})

    needs_others: ClassVar[bool] = False
    """True if the objective uses more from other clients than initial weights, and so cannot train without them."""

    takes_local_crops: ClassVar[bool] = False
    """True if a paper defines the objective for local crops besides the two views (multi-crop)."""

    averaged_apart: ClassVar[str | None] = None
    """The tensors of the objective that are averaged whatever the reducer is, in words, or None."""

    averages_weights: ClassVar[bool] = True
    """False if the coordinator has a reducer of the method's own, which averages no weights."""

    objective_not_summed: ClassVar[str | None] = None
    """`PartConfig.why_not_summed` of the objective."""

    objective_sends_apart: ClassVar[tuple[Kind, ...]] = ()
    """`MethodConfig.sent_apart` of the objective: kinds that may be sent next to a sum, as means of several images."""

    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(), description="Loss terms and corrections on top of the objective, each at most once."
    )
    merge: AnyMerge = Field(
        default=OverwriteConfig(), description="What a client does with the global model that it receives."
    )
    reducer: AnyReducer = Field(default=MeanConfig(), description="How the coordinator combines the clients' weights.")

    def check(self, model: ModelConfig) -> None:
        counts = Counter(add_on.name for add_on in self.add_ons)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"method.add_ons lists {twice[0]!r} twice: list each add-on once")
        for part in (*self.add_ons, self.merge, self.reducer):
            part.check(self, model)
        if model.batch_norm != "average" and (why := self._why_no_policy(model.batch_norm)) is not None:
            raise ValueError(f'model.batch_norm = "{model.batch_norm}" is impossible here: {why}; leave it out')
        if "predictor" in self.traits and model.projector is None:
            raise ValueError(f"{self.name} predicts embeddings: leave model.projector out, or describe one")

    def _why_no_policy(self, policy: BatchNormPolicy) -> str | None:
        """Return why BatchNorm cannot be treated differently from the other weights, or None if it can."""
        if self.sends_nothing:
            return f"{self.name} averages nothing here, and each client has a network of its own"
        if policy == "recalibrate":
            return None
        reasons = (part.why_not_own_norms for part in (*self.add_ons, self.merge, self.reducer))
        return next((reason for reason in reasons if reason is not None), None)

    def check_training(self, training: TrainingConfig) -> None:
        for part in (*self.add_ons, self.merge, self.reducer):
            part.check_training(training)

    def check_public_data(self, public_data: PublicDataConfig | None) -> None:
        for part in (*self.add_ons, self.merge, self.reducer):
            part.check_public_data(public_data)

    def check_cohort(self, cohort: CohortConfig) -> None:
        for part in (*self.add_ons, self.merge, self.reducer):
            part.check_cohort(cohort)

    def distillation_epochs(self, round_number: int) -> int:
        return sum(part.distillation_epochs(round_number) for part in (*self.add_ons, self.merge, self.reducer))

    @property
    def why_not_summed(self) -> str | None:
        reasons = (self.objective_not_summed, *(p.why_not_summed for p in (*self.add_ons, self.merge, self.reducer)))
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def sent_apart(self) -> tuple[Kind, ...]:
        return self.objective_sends_apart

    @property
    def sends_nothing(self) -> bool:
        return self.merge.sends_nothing

    @property
    def restarts_states(self) -> bool:
        return any(part.restarts_states for part in (*self.add_ons, self.merge, self.reducer))

    def embedding_width(self, model: ModelConfig) -> int:
        """Return D, the width of what the losses compare: of the representation if there is no projector."""
        if "projector" in self.traits and model.projector is not None:
            return model.projector.out_dim
        return model.encoder.feature_dim

    def dimensions_wanted(self, model: ModelConfig) -> DimensionsWanted | None:
        for add_on in self.add_ons:
            if isinstance(add_on, DimensionedConfig):
                return DimensionsWanted(self.embedding_width(model), add_on.num_clients)
        return None
