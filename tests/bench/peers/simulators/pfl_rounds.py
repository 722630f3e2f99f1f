"""pfl-research's half of the comparison: `SimulatedBackend` and `FederatedAveraging` as in its image benchmark."""

import os
import types

import numpy as np
import task
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


def loss(self, images, labels, eval=False):  # noqa: A002, FBT002
    self.train(not eval)
    return torch.nn.functional.cross_entropy(self(images), labels)


def metrics(self, images, labels, eval=True):  # noqa: A002, FBT002
    with torch.no_grad():
        return {"loss": Weighted(loss(self, images, labels, eval).item() * len(images), len(images))}


class Times(TrainingProcessCallback):
    def __init__(self):
        self.times = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(task.now())
        return False, Metrics()  # whether to stop, and its measurements


def main():
    it = task.from_command_line()
    np.random.seed(0)
    network = it.network()
    network.loss, network.metrics = types.MethodType(loss, network), types.MethodType(metrics, network)
    users = FederatedDataset.from_slices(
        [it.user(number) for number in range(task.NUM_USERS)], get_user_sampler("random", range(task.NUM_USERS))
    )
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    times = Times()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=it.rounds,
            evaluation_frequency=10 * it.rounds,
            train_cohort_size=task.COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=task.LEARNING_RATE, local_num_epochs=1, local_batch_size=task.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[times],
    )
    if int(os.environ.get("RANK", 0)) == 0:
        task.report(it, times.times, network.state_dict())


if __name__ == "__main__":
    main()
