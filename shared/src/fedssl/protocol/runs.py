"""The run spec: everything that decides a run's result."""

from typing import Annotated

from pydantic import Field, model_validator

from fedssl.protocol.aggregation import AggregationConfig
from fedssl.protocol.base import StrictModel
from fedssl.protocol.data import DataConfig, PartitionConfig, PublicDataConfig
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.methods import AnyMethod
from fedssl.protocol.methods.add_ons import HSDConfig
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.site_labels import SiteLabelsConfig
from fedssl.protocol.model import ModelConfig
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.robustness import RobustnessConfig
from fedssl.protocol.secure_aggregation import SecureAggregationConfig
from fedssl.protocol.training import CohortConfig, Seed, TrainingConfig
from fedssl.protocol.upload import UploadConfig
from fedssl.protocol.validation import explained
from fedssl.protocol.watch import WatchConfig
from fedssl.wording import plural

RunName = Annotated[
    str,
    explained(
        r"^[A-Za-z0-9][A-Za-z0-9 ._+-]{0,99}$",
        "a run's name has at most 100 letters from A to Z, digits, spaces, and the characters . _ + -, and begins with "
        "a letter or a digit",
    ),
]


class RunSpec(StrictModel):
    """One training, from spec to encoder. Two runs of one spec on the same images give the same weights."""

    name: RunName = "unnamed"
    seed: Seed = 0
    num_rounds: int = Field(default=10, ge=1, le=100_000)
    method: AnyMethod = FedAlignUniformConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    cohort: CohortConfig = CohortConfig()
    partition: PartitionConfig | None = Field(
        default=None,
        description="Only `fedssl simulate` and `fedssl up` read it. For SCAFFOLD, its number of clients counts in "
        "every run without `cohort.clients`.",
    )
    public_data: PublicDataConfig | None = Field(
        default=None, description="Images that the coordinator and every client hold; only some methods use them."
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="How the encoder is evaluated while the run trains. Null: only on request."
    )
    watch: WatchConfig = WatchConfig()
    robustness: RobustnessConfig = RobustnessConfig()
    aggregation: AggregationConfig = Field(default=AggregationConfig(), exclude_if=lambda it: it == AggregationConfig())
    upload: UploadConfig = Field(default=UploadConfig(), exclude_if=lambda it: it == UploadConfig())
    secure_aggregation: SecureAggregationConfig | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="Whether the coordinator learns only the sum of the updates, and no single one. Null: it learns "
        "each update.",
    )

    def sent_apart(self, plan: ArtifactPlan) -> tuple[TensorSpec, ...]:
        """Return the tensors of an update that leave without masks, next to the masked vector of a secure round."""
        return tuple(tensor for tensor in plan.update if tensor.kind in self.method.sent_apart)

    @property
    def central_evaluation(self) -> EvaluationConfig | None:
        """The evaluation on the coordinator's labelled images, or None if there is none."""
        return None if self.evaluation is None or self.evaluation.at == "sites" else self.evaluation

    @property
    def site_evaluation(self) -> EvaluationConfig | None:
        """The evaluation at the sites, on their own labelled images, or None if there is none."""
        return None if self.evaluation is None or self.evaluation.sites is None else self.evaluation

    def continued(self, num_rounds: int) -> "RunSpec":
        """Return the spec of this run with more rounds in total.

        Raises ValueError if there are not more, or if the run's own rounds would have been different in a longer run.
        """
        if num_rounds <= self.num_rounds:
            raise ValueError(f"the run has {plural(self.num_rounds, 'round')} already: give more than that in total")
        optimizer = self.training.optimizer
        if optimizer.schedule != "constant":
            raise ValueError(
                f'training.optimizer.schedule = "{optimizer.schedule}" ends with the last of {self.num_rounds} rounds, '
                f"and would be different over {num_rounds}"
            )
        if optimizer.final_weight_decay is not None:
            raise ValueError(
                f"training.optimizer.final_weight_decay is reached with the last of {self.num_rounds} rounds, and the "
                f"weight decay of each round would be different over {num_rounds}"
            )
        self.method.check_continuation(self.num_rounds, num_rounds)
        return RunSpec.model_validate(self.model_dump() | {"num_rounds": num_rounds})

    @model_validator(mode="after")
    def _method_fits_model(self) -> "RunSpec":
        config = distillation_of(self.method)
        own = config.client_encoders if config is not None and config.client_encoders != "declared" else {}
        for encoder in (self.model.encoder, *own.values()):
            encoder.check_image_size(self.data.image_size)
        if (warmup := self.training.optimizer.warmup_rounds) > self.num_rounds:
            raise ValueError(
                f"training.optimizer.warmup_rounds is {warmup:g}, more than the {plural(self.num_rounds, 'round')} of "
                "the run: the learning rate would never reach learning_rate; lower warmup_rounds"
            )
        self.method.check(self.model)
        self.method.check_images(self.model, self.data)
        self.method.check_training(self.training)
        self.method.check_public_data(self.public_data)
        self.method.check_cohort(self.cohort)
        if self.site_evaluation is not None:
            labels = self.method if isinstance(self.method, SiteLabelsConfig) else None
            if (why := self.site_evaluation.site_config.why_not_with(labels)) is not None:
                raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _fits_networks_of_timm(self) -> "RunSpec":
        if self.model.encoder.name != "timm":
            return self
        for key, is_used, why in (
            ("training.optimizer.layer_decay", self.training.optimizer.layer_decay != 1, "an order of its layers"),
            ("training.gradient_checkpointing", self.training.gradient_checkpointing, "the names of its blocks"),
        ):
            if is_used:
                raise ValueError(f"{key} needs {why}, which {self.model.encoder} does not declare: leave it out")
        return self

    @model_validator(mode="after")
    def _own_norms_are_evaluated_at_the_sites(self) -> "RunSpec":
        if self.model.batch_norm == "local" and self.central_evaluation is not None:
            raise ValueError(
                'model.batch_norm = "local" leaves the coordinator an encoder without a trained BatchNorm, which it '
                'cannot evaluate: set evaluation.at = "sites", or leave evaluation out'
            )
        return self

    @model_validator(mode="after")
    def _sites_share_an_encoder(self) -> "RunSpec":
        config = self.site_evaluation
        if config is None or config.site_config.cross_site is None:
            return self
        why = None
        if self.model.batch_norm != "average":
            why = f'model.batch_norm = "{self.model.batch_norm}" gives each site'
        elif self.method.sends_nothing:
            why = f"{self.method.name} sends nothing, so each site has"
        if why is not None:
            raise ValueError(
                f"{why} an encoder of its own, on which a classifier of another site means nothing: leave "
                "evaluation.sites.cross_site out"
            )
        return self

    @model_validator(mode="after")
    def _views_fit_method(self) -> "RunSpec":
        data, method = self.data, self.method
        if data.second_view is not None and not (isinstance(method, ComposedConfig) and "views" in method.traits):
            raise ValueError(
                f"data.second_view applies to the second view of each image, and {method.name} takes only one: "
                "leave it out"
            )
        if (crops := data.local_crops) is None:
            return self
        if not (isinstance(method, ComposedConfig) and method.takes_local_crops):
            raise ValueError(
                f"data.local_crops: no paper defines the loss of {method.name} over local crops; leave them out, or "
                "choose a method with the objective of DINO, BYOL, MoCo or SimCLR"
            )
        if any(isinstance(part, HSDConfig) and part.variant == "mask" for part in method.add_ons):
            raise ValueError(
                "data.local_crops: hsd masks the embeddings of the two views, and not those of crops: leave the crops "
                'out, or set variant = "projection"'
            )
        encoder = self.model.encoder
        if encoder.has_patches and crops.image_size % encoder.patch_size:
            raise ValueError(
                f"data.local_crops.image_size is {crops.image_size}, which is not a multiple of the patches of "
                f"{encoder.name} ({encoder.patch_size} pixels): set it to a multiple"
            )
        return self

    @model_validator(mode="after")
    def _fixed_arithmetic_is_possible(self) -> "RunSpec":
        if self.aggregation.arithmetic == "fixed" and (why := self._why_not_a_sum()) is not None:
            raise ValueError(f'aggregation.arithmetic = "fixed" needs a coordinator that only adds up updates: {why}')
        if self.aggregation.arithmetic != "fixed" and self.aggregation.matrix_bits != 64:
            raise ValueError(
                'aggregation.matrix_bits applies to integers: set aggregation.arithmetic = "fixed", or leave it out'
            )
        return self

    @model_validator(mode="after")
    def _server_optimizer_has_a_direction(self) -> "RunSpec":
        if self.aggregation.server_optimizer is None:
            return self
        needs = "aggregation.server_optimizer needs a coordinator that computes weighted sums of the clients' weights: "
        if (why := self.method.why_not_summed) is not None:
            raise ValueError(f"{needs}{why}; choose another method or part, or leave the optimiser out")
        if isinstance(self.method, ComposedConfig) and not self.method.averages_weights:
            raise ValueError(f"{needs}{self.method.name} averages none; leave the optimiser out")
        if isinstance(self.method, ComposedConfig) and self.method.reducer.name == "none":
            raise ValueError(f"{needs}method.reducer none combines nothing; leave the optimiser out")
        return self

    @model_validator(mode="after")
    def _upload_has_weights(self) -> "RunSpec":
        if self.upload.rounds and self.method.sends_nothing:
            sends = f"{self.method.name} sends none"
            raise ValueError(f"upload.dtype applies to weights that are sent, and {sends}: leave it out")
        return self

    @model_validator(mode="after")
    def _encoder_average_changes(self) -> "RunSpec":
        if self.aggregation.encoder_average is not None and self.method.sends_nothing:
            raise ValueError(
                f"aggregation.encoder_average applies to the global encoder, and {self.method.name} sends nothing that "
                "changes it: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _secure_aggregation_is_possible(self) -> "RunSpec":
        if self.secure_aggregation is not None and (why := self._why_not_secure(self.secure_aggregation)) is not None:
            raise ValueError(f"secure_aggregation is impossible here: {why}")
        return self

    def _why_not_secure(self, config: SecureAggregationConfig) -> str | None:
        if (why := self.method.why_not_secure) is not None:
            return f"{why}; choose another method or part, or leave secure_aggregation out"
        if self.aggregation.arithmetic != "fixed":
            return 'masks are added to integers: set aggregation.arithmetic = "fixed"'
        if self.robustness.action == "reject" and self.robustness.has_norm_bound:
            return (
                "only its client sees an update, so that no one can reject it; with robustness.action = "
                '"clip", each client clips its own'
            )
        if self.upload.rounds:
            return "masks are added to exact differences: leave upload.dtype out"
        if self.aggregation.server_optimizer is not None:
            return "aggregation.server_optimizer cannot be combined with it yet; leave one of them out"
        if self.site_evaluation is not None:
            return 'the coordinator would receive the counts of each site: set evaluation.at = "coordinator"'
        clients = self.cohort.clients
        if clients is not None and (size := self.cohort.num_wanted(len(clients))) < config.min_cohort:
            return (
                f"a round wants {size} of the {len(clients)} clients, fewer than secure_aggregation.min_cohort = "
                f"{config.min_cohort}: lower it (to 3 at least), or name more clients"
            )
        return None

    def _why_not_a_sum(self) -> str | None:
        if (why := self.method.why_not_summed) is not None:
            return f'{why}; choose another method or part, or set aggregation.arithmetic = "float"'
        for bound in ("max_weight_share", "max_examples_ratio"):
            if getattr(self.robustness, bound) is not None:
                return f"robustness.{bound} changes each weight by those of all others: leave it out"
        return None
