"""Config of a linear classifier that the sites train together, with or without the encoder below it."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.merges import OverwriteConfig
from fedssl.protocol.methods.reducers import MeanConfig, RobustReducerConfig
from fedssl.protocol.methods.site_labels import SiteLabelsConfig
from fedssl.protocol.model import ModelConfig


class ClassifierConfig(SiteLabelsConfig):
    """FedAvg of a linear classifier on an encoder that exists, with the labels of the sites that have some."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="Federated classifier",
        paper="McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data",
        equations="Algorithm 1 with cross-entropy, over the sites' labelled images",
        leaves_the_client="weights of the classifier, and of the encoder if it is fine-tuned",
        stays_on_the_client="the personal classifier, if there is one; images and labels never leave",
    )

    name: Literal["classifier"] = "classifier"
    encoder_learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Fine-tune the encoder with this learning rate; `training.optimizer.learning_rate` is that of the "
        "classifier, and both follow its schedule. Null: the encoder stays as it is, and is not sent.",
    )
    start: Literal["given", "zero"] | None = Field(
        default=None,
        description="The classifier's first weights. `given`: those of the run or file in `model.initial`, for example "
        "of `ridge-probe`, which must have the same classes; `zero`: zeros. Null: the given ones if there are any, "
        "otherwise zeros.",
    )

    personal_pull: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        exclude_if=lambda it: it is None,
        description="Each site also trains a classifier of its own, which stays there (Ditto, Li et al. 2021, Eq. 1): "
        "its cross-entropy plus half of this number times its squared distance to the classifier of all sites. With 0 "
        "only the first weights are shared. Null: no site has one.",
    )

    @property
    def has_personal_heads(self) -> bool:
        return self.personal_pull is not None

    def check(self, model: ModelConfig) -> None:
        if self.start == "given" and model.initial is None:
            raise ValueError(
                'method.start = "given" needs a classifier: set model.initial to a run of ridge-probe, '
                "or leave start out"
            )
        if self.encoder_learning_rate is None and model.freezes:
            raise ValueError(
                "model.trainable and model.lora apply to an encoder that is trained, and this one is not: set "
                "method.encoder_learning_rate, or leave them out"
            )
        if other := next((part.name for part in self.add_ons if part.name != "proximal"), None):
            raise ValueError(f"classifier cannot be combined with the add-on {other}: only with proximal")
        if self.add_ons and self.has_personal_heads:
            raise ValueError(
                "method.personal_pull and the add-on proximal cannot be combined: both pull the site's own classifier; "
                "leave one of them out"
            )
        if self.merge != OverwriteConfig():
            raise ValueError("the sites train one classifier: leave method.merge out")
        if not isinstance(self.reducer, MeanConfig | RobustReducerConfig):
            raise ValueError(f"classifier has no reducer {self.reducer.name}: choose mean or a robust one")
        super().check(model)
