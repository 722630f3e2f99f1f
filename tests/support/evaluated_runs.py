"""Registered digits for the evaluation of encoders, and runs that are evaluated."""

from pathlib import Path
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from fedssl.client import Client
from fedssl.data import load_dataset
from fedssl.data.dataset_files import own_shape, write_labelled
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import EvaluationDatasetView
from support.methods import method_spec
from support.tables import Tables

# They are registered under the name by which a simulation finds the same images.
DATASET = "digits"
FEW = {"dataset": DATASET, "max_train": 200, "max_test": 100}
POINTS = [[1.0, 0.5], [-0.5, -1.0], [-0.5, 0.5]]


def add_embedding_map(tables: Tables, run_id: UUID, evaluation_id: UUID) -> None:
    """Insert the row of a completed evaluation of round 1 that has a map. Writes nothing to the store."""
    digest, config = "9" * 64, {"dataset": "held-out", "embedding_map": "pca"}
    drawn = {"method": "pca", "labels": [0, 1, 1], "class_names": ["cat", "dog"], "points": POINTS}
    tables.execute("SET session_replication_role = replica")  # its artifacts and its data set do not exist
    tables.execute(
        "INSERT INTO evaluations (id, run_id, round_number, model, dataset, dataset_digest, config, state, results, "
        "embedding_map, finished_at) VALUES (%s, %s, 1, %s, 'held-out', %s, %s, 'completed', %s, %s, now())",
        evaluation_id, run_id, digest, digest, Jsonb(config), Jsonb({"knn": 0.5}), Jsonb(drawn),
    )  # fmt: skip
    tables.execute("SET session_replication_role = origin")


def register_digits(client: Client, folder: Path) -> EvaluationDatasetView:
    """Register both splits of the digits with all their images."""
    file = folder / "labelled.safetensors"
    train, test = load_dataset(DATASET, "train"), load_dataset(DATASET, "test")
    write_labelled(train, test, file, own_shape(train))
    return client.add_evaluation_dataset(DATASET, file)


def evaluated_spec(every: int = 1, name: str = "fedsimclr", **changes: Any) -> RunSpec:
    """Return the spec of a run that is evaluated on few of the digits; `changes` replace whole sections."""
    return method_spec(name, **{"evaluation": {**FEW, "every": every}, **changes})


def small_evaluation(**changes: Any) -> JudgingConfig:
    """Return the config of an evaluation on few of the digits; `changes` replace its fields."""
    return JudgingConfig.model_validate({**FEW, **changes})
