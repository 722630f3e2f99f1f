"""How a run's encoder is evaluated while it trains: on the coordinator's labelled images, at the sites, or both.

Labels serve only this purpose, and those of a site never leave it.
"""

from typing import Annotated, Literal, Protocol, TypeVar, get_args

from pydantic import Field, field_validator, model_validator

from fedssl.protocol.base import StrictModel

Settings = Literal["fast", "fedx", "fedu", "ssd", "fedrlc", "flesd", "orchestra"]
Measure = Literal["probe", "knn", "geometry"]
OwnHead = Literal["probe", "personal"]
SiteMeasure = Literal["probe", "knn", "classifier", "personal"]
MapMethod = Literal["pca", "tsne"]
DatasetName = Annotated[str, Field(min_length=1, max_length=1000)]
ClassName = Annotated[str, Field(min_length=1, max_length=100)]

MOST_CLASSES = 100
MOST_SCORE_BINS = 50
DEFAULT_MIN_COUNT = 10

T = TypeVar("T", bound=str)


class SiteLabels(Protocol):
    """The labels of the sites that a method trains on."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def multi_label(self) -> bool: ...
    @property
    def test_share(self) -> float: ...
    @property
    def has_personal_heads(self) -> bool: ...


def each_once(key: str, noun: str, value: tuple[T, ...]) -> tuple[T, ...]:
    """Return the names if all are different. Raises ValueError, which names the key."""
    if len(set(value)) != len(value):
        raise ValueError(f"{key} names a {noun} twice")
    return value


class JudgingConfig(StrictModel):
    """A labelled data set, and what is measured on it."""

    dataset: DatasetName = Field(
        description="A labelled data set with a training and a test split: its name, or a folder or .npz file. For a "
        "deployed run the name under which it was registered with the coordinator."
    )
    measures: tuple[Measure, ...] = Field(
        default=("probe", "knn", "geometry"),
        min_length=1,
        description="`probe`: a linear classifier on frozen representations; `knn`: weighted nearest neighbours; "
        "`geometry`: uniformity, effective rank and feature standard deviation.",
    )
    settings: Settings = Field(
        default="fast", description="The linear probe's settings: a paper's own, or a quick one that agrees with them."
    )
    max_train: int | None = Field(
        default=10_000, ge=2, description="Labelled training images that classifiers may see, drawn by the run's seed."
    )
    max_test: int | None = Field(default=None, ge=2, description="Number of test images. Null means all.")
    embedding_map: MapMethod | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="A map of the test images' representations, which the coordinator keeps with the results: `pca`, "
        "the two directions of the largest variance; `tsne`, which keeps neighbourhoods. Null means no map. A "
        "simulation draws none.",
    )

    @field_validator("measures")
    @classmethod
    def _each_once(cls, value: tuple[Measure, ...]) -> tuple[Measure, ...]:
        return each_once("evaluation.measures", "measure", value)


class SitesConfig(StrictModel):
    """The meaning of the labels of the sites, and the counts that each site makes on its own labelled images."""

    classes: tuple[ClassName, ...] = Field(
        min_length=2,
        max_length=MOST_CLASSES,
        description="The names of the classes that the federation agrees on. A site need not have all of them.",
    )
    multi_label: bool = Field(default=False, description="Whether an image may have several labels, or none of them.")
    test_share: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Share of a site's labelled images that evaluate its classifiers, drawn by the seed and by group. "
        "A site's own split takes precedence.",
    )
    min_count: int = Field(
        default=DEFAULT_MIN_COUNT,
        ge=1,
        le=10**9,
        description="A site leaves out each class with fewer training or test images. Its policy may demand more.",
    )
    score_bins: int = Field(
        default=20, ge=2, le=MOST_SCORE_BINS, description="Number of bins of the scores from which AUROC is computed."
    )
    heads: tuple[Literal["classifier", "personal"], ...] = Field(
        default=(),
        exclude_if=lambda it: not it,
        description="Classifiers of the run that each site evaluates too: `classifier`, the one that all sites train; "
        "`personal`, the site's own (`method.personal_pull`). Only for ridge-probe and classifier.",
    )
    cross_site: OwnHead | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="Each site sends a classifier of its own, which every other site evaluates on its own images: "
        "`probe`, trained on the site's labels for the evaluation, or `personal`. The policies of both sites must "
        "allow it. Null: no classifier of a site leaves it.",
    )

    @field_validator("classes")
    @classmethod
    def _each_class_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return each_once("evaluation.sites.classes", "class", value)

    @field_validator("heads")
    @classmethod
    def _each_head_once(cls, value: tuple[Literal["classifier", "personal"], ...]) -> tuple[str, ...]:
        return each_once("evaluation.sites.heads", "classifier", value)

    @property
    def run_heads(self) -> set[Literal["classifier", "personal"]]:
        """The classifiers of the run that each site evaluates or sends."""
        return {*self.heads, *(("personal",) if self.cross_site == "personal" else ())}

    def why_not_with(self, method: "SiteLabels | None") -> str | None:
        """Return why sites cannot evaluate these classifiers in a run of a method, or None if they can.

        `method`: the labels that it trains on, or None if it trains no classifier.
        """
        if not self.run_heads:
            return None
        if method is None:
            return "evaluation.sites.heads needs a method that trains a classifier: ridge-probe or classifier"
        for key in ("classes", "multi_label", "test_share"):
            if getattr(self, key) != getattr(method, key):
                return (
                    f"evaluation.sites.{key} differs from method.{key}, so the classifier would be evaluated on other "
                    "classes, or on images that it was trained on: give both the same value"
                )
        if "personal" in self.run_heads and not method.has_personal_heads:
            return "evaluation.sites names personal classifiers, and the method trains none: set method.personal_pull"
        return None


class EvaluationConfig(JudgingConfig):
    """How a run's encoder is evaluated while the run trains, and how often. It changes no weight."""

    dataset: str = Field(
        default="",
        max_length=1000,
        exclude_if=lambda it: not it,
        description="A labelled data set with a training and a test split: its name, or a folder or .npz file. For a "
        "deployed run the name under which it was registered with the coordinator. Only the sites' evaluation needs "
        "none.",
    )
    at: Literal["coordinator", "sites", "both"] = Field(
        default="coordinator",
        exclude_if=lambda it: it == "coordinator",
        description="Where the encoder is evaluated: on `dataset`, on the sites' own labelled images, or on both.",
    )
    sites: SitesConfig | None = Field(
        default=None, exclude_if=lambda it: it is None, description="The evaluation at the sites."
    )
    every: int = Field(
        default=10,
        ge=0,
        description="Evaluate after each `every` rounds and after the last round; 0 means only after the last.",
    )

    def is_due(self, round_number: int, num_rounds: int) -> bool:
        """Return whether the encoder is evaluated after this round; round 0 is before training."""
        return round_number == num_rounds or (self.every > 0 and round_number % self.every == 0)

    @model_validator(mode="after")
    def _is_complete(self) -> "EvaluationConfig":
        if self.at != "sites" and not self.dataset:
            raise ValueError('evaluation.dataset is missing: name a labelled data set, or set evaluation.at to "sites"')
        if self.at == "sites" and self.dataset:
            raise ValueError('evaluation.dataset is not used by the sites: set evaluation.at to "both", or remove it')
        if (self.at == "coordinator") != (self.sites is None):
            raise ValueError('evaluation.sites and evaluation.at = "sites" or "both" belong together: give both')
        if self.sites is not None and not self.site_measures:
            raise ValueError("evaluation.measures needs probe or knn, because sites measure nothing else")
        if self.sites is not None and self.sites.cross_site == "probe" and "probe" not in self.measures:
            raise ValueError('evaluation.sites.cross_site = "probe" needs probe in evaluation.measures')
        if self.at == "sites" and self.settings != "fast":
            raise ValueError('evaluation.settings must be "fast": sites train no other linear probe')
        return self

    @property
    def site_config(self) -> SitesConfig:
        """The settings of the sites, which every `RunSpec.site_evaluation` has."""
        assert self.sites is not None, "validated by the spec"
        return self.sites

    @property
    def site_measures(self) -> tuple[SiteMeasure, ...]:
        """The measures that sites take, in a fixed order."""
        wanted = (*self.measures, *(() if self.sites is None else self.sites.heads))
        return tuple(measure for measure in get_args(SiteMeasure) if measure in wanted)
