"""Registers and shows data sets, and pins the specs of runs to them. The images of a name never change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy.orm import Session

from fedssl.artifacts.images import map_labelled, map_public
from fedssl.protocol.data import KNOWN_DATASETS, DataConfig, PublicDataConfig, channels_in_words
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import (
    EvaluationDatasetCreate,
    EvaluationDatasetView,
    PublicDatasetCreate,
    PublicDatasetView,
)
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import EvaluationDataset, PublicDataset
from fedssl_coordinator.core.problems import ProblemError, invalid_spec
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.identity.projects import service as projects
from fedssl_coordinator.storage.artifacts.registration import path_of, rejections, require_uploaded
from fedssl_coordinator.storage.datasets import repository

Create = PublicDatasetCreate | EvaluationDatasetCreate
View = TypeVar("View", PublicDatasetView, EvaluationDatasetView)


def _about_public(digest: str) -> dict[str, int]:
    num_images, channels, size, _ = map_public(path_of(digest)).shape
    return {"num_images": num_images, "channels": channels, "image_size": size}


def _about_evaluation(digest: str) -> dict[str, int]:
    found = map_labelled(path_of(digest))
    num_train, channels, size, _ = found.train_images.shape
    return {
        "num_train": num_train,
        "num_test": len(found.test_images),
        "num_classes": found.num_classes,
        "channels": channels,
        "image_size": size,
    }


@dataclass(frozen=True, slots=True)
class Kind(Generic[repository.Row, View]):
    """A kind of data sets. `about`: returns the number and shape of the images in a file."""

    table: type[repository.Row]
    view: type[View]
    about: Callable[[str], dict[str, int]]
    describe: Callable[[repository.Row], str]

    def view_of(self, row: repository.Row) -> View:
        return self.view.model_validate(row, from_attributes=True)


PUBLIC = Kind(
    PublicDataset,
    PublicDatasetView,
    _about_public,
    lambda row: f"public data set {row.name}: {row.num_images} images of its {row.split} split",
)
EVALUATION = Kind(
    EvaluationDataset,
    EvaluationDatasetView,
    _about_evaluation,
    lambda row: (
        f"evaluation data set {row.name}: {row.num_train} and {row.num_test} images of {row.num_classes} classes"
    ),
)


def known(session: Session, kind: Kind[repository.Row, View], request: Create) -> View | None:
    """Return the data set if the same images have this name, or None if the name is free. Raises ProblemError."""
    if repository.is_taken(session, kind.table, request.name):
        return _same(session, kind, request)
    require_uploaded(session, request.digest)
    return None


def about(kind: Kind[repository.Row, View], digest: str) -> dict[str, int]:
    """Return the number and shape of the images in a file. Raises ProblemError.

    The file may have to be fetched, so do not call this in a transaction.
    """
    with rejections(digest):
        return kind.about(digest)


def register(
    session: Session, kind: Kind[repository.Row, View], request: Create, numbers: Mapping[str, int]
) -> tuple[View, bool]:
    """Register uploaded images, and return whether they are newly registered. Raises ProblemError."""
    require_uploaded(session, request.digest)
    project = projects.chosen(session, request.project)
    row = repository.add(session, kind.table, project=project, **request.model_dump(exclude={"project"}), **numbers)
    if row is None:
        return _same(session, kind, request), False
    record(session, "dataset.registered", kind.describe(row), data={"digest": row.digest})
    return kind.view_of(row), True


def show(session: Session, kind: Kind[repository.Row, View], name: str) -> View:
    """Return a data set. Raises ProblemError if the name is not registered."""
    if (row := repository.get(session, kind.table, name)) is None:
        path = kind.table.__tablename__.replace("_", "-")
        raise ProblemError("not-found", f"no data set {name}: `GET /v1/{path}` lists the registered ones")
    return kind.view_of(row)


def pinned(session: Session, project: str, spec: RunSpec) -> RunSpec:
    """Return the spec of a new run with the digest of the public images that it names.

    Raises ProblemError if its data sets are neither registered nor known by name, or differ from what the spec states.
    """
    _check_evaluation(session, project, spec)
    config = spec.public_data
    if config is None:
        return spec
    row = of_project(session, PublicDataset, project, config.dataset)
    if (why := why_unfit(config.dataset, spec.data)) is not None:
        raise invalid_spec("public_data.dataset", why)
    if row is None:
        _check_unregistered(config)
        return spec
    _check_registered(config, row)
    return spec.model_copy(update={"public_data": config.model_copy(update={"digest": row.digest})})


def of_project(session: Session, table: type[repository.Row], project: str, name: str) -> repository.Row | None:
    """Return a project's data set of this name, or None if the project has none."""
    row = repository.get(session, table, name)
    return row if row is not None and row.project == project else None


def why_unfit(name: str, data: DataConfig) -> str | None:
    """Return why images of 8 bits, grey or RGB, cannot be prepared for a run, or None if they can."""
    if data.channels not in (1, 3):
        return (
            f"the images of {name} are grey or RGB, and the run needs {channels_in_words(data.channels)}: only grey "
            "and RGB images are converted to each other"
        )
    if data.window is not None and (refusal := data.window.refusal_of_8_bits()) is not None:
        return f"the images of {name} have 8 bits per value: {refusal}"
    return None


def _check_evaluation(session: Session, project: str, spec: RunSpec) -> None:
    config = spec.central_evaluation
    if config is None:
        return
    row = of_project(session, EvaluationDataset, project, config.dataset)
    if row is None:
        raise invalid_spec(
            "evaluation.dataset",
            f"no evaluation data set {config.dataset} is registered: register it "
            "(`fedssl evaluation-dataset add NAME SOURCE`) and give its name, or leave evaluation out",
        )
    if (why := why_unfit(row.name, spec.data)) is not None:
        raise invalid_spec("evaluation.dataset", f'{why}; or evaluate at the sites (evaluation.at = "sites")')


def _check_registered(config: PublicDataConfig, row: PublicDataset) -> None:
    if config.digest not in (None, row.digest):
        raise invalid_spec(
            "public_data.digest", f"the images registered as {row.name} have digest {row.digest}: leave it out"
        )
    if config.split != row.split:
        raise invalid_spec(
            "public_data.split",
            f"what is registered as {row.name} is the {row.split} split: use that, or register the other one under "
            "another name",
        )
    if config.num_images > row.num_images:
        raise invalid_spec("public_data.num_images", f"{row.name} has {row.num_images} images: ask for no more")


def _check_unregistered(config: PublicDataConfig) -> None:
    """Check images that machines find by name: a known data set, or a file in the folder of public data."""
    if config.digest is not None:
        raise invalid_spec(
            "public_data.digest",
            f"no public data set {config.dataset} is registered: register it (`fedssl public-dataset add NAME SOURCE`),"
            " or leave the digest out",
        )
    if config.dataset not in KNOWN_DATASETS and settings().public_data is None:
        raise invalid_spec(
            "public_data.dataset",
            f"no public data set {config.dataset} is registered: register it (`fedssl public-dataset add NAME SOURCE`) "
            f"and give its name, or use one that every machine knows: {', '.join(KNOWN_DATASETS)}",
        )


def _same(session: Session, kind: Kind[repository.Row, View], request: Create) -> View:
    """Return the data set that has the name already. Raises ProblemError unless it is the one of the request."""
    row = repository.get(session, kind.table, request.name)
    if row is None:
        raise ProblemError("conflict", f"the name {request.name} is taken: choose another name")
    wanted = request.model_dump(exclude={"project"})
    if any(getattr(row, key) != value for key, value in wanted.items()) or request.project not in (None, row.project):
        detail = f"{row.name} already names other images, and the images of a name never change: choose another name"
        raise ProblemError("conflict", detail)
    return kind.view_of(row)
