"""Registered digits to judge encoders on, and runs that are judged."""

from pathlib import Path
from typing import Any

from fedssl.client import Client
from fedssl.data import load_dataset
from fedssl.image_files import own_shape, write_labelled
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import EvaluationDatasetView
from support.methods import method_spec

# Registered under the name by which a simulation finds the same images.
DATASET = "digits"
FEW = {"dataset": DATASET, "max_train": 200, "max_test": 100}


def register_digits(client: Client, folder: Path) -> EvaluationDatasetView:
    """Both splits of the digits, all of them."""
    file = folder / "labelled.safetensors"
    train, test = load_dataset(DATASET, "train"), load_dataset(DATASET, "test")
    write_labelled(train, test, file, own_shape(train))
    return client.add_evaluation_dataset(DATASET, file)


def judged_spec(every: int = 1, name: str = "fedsimclr", **changes: Any) -> RunSpec:
    """A run that is judged on few of the digits; `changes` replace whole sections."""
    return method_spec(name, **{"evaluation": {**FEW, "every": every}, **changes})


def few(**changes: Any) -> JudgingConfig:
    """What may be asked for besides."""
    return JudgingConfig.model_validate({**FEW, **changes})
