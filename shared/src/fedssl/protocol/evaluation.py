"""How a run's encoder is judged while it trains. Labels serve this alone: no client is asked for any."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from fedssl.protocol.base import StrictModel

Settings = Literal["fast", "fedx", "fedu", "ssd", "fedrlc", "flesd", "orchestra"]
Measure = Literal["probe", "knn", "geometry"]
MapMethod = Literal["pca", "tsne"]
DatasetName = Annotated[str, Field(min_length=1, max_length=1000)]


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
        if len(set(value)) != len(value):
            raise ValueError("evaluation.measures names a measure twice")
        return value


class EvaluationConfig(JudgingConfig):
    """How a run's encoder is evaluated while the run trains, and how often. It changes no weight."""

    every: int = Field(
        default=10,
        ge=0,
        description="Evaluate after each `every` rounds and after the last round; 0 means only after the last.",
    )

    def is_due(self, round_number: int, num_rounds: int) -> bool:
        """Return whether the encoder is evaluated after this round; round 0 is before training."""
        return round_number == num_rounds or (self.every > 0 and round_number % self.every == 0)
