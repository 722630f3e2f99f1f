"""BlazeFL's half of the comparison: its FedAvg in a pool of processes that exchange tensors in shared memory."""

import tempfile
from pathlib import Path

import task
import torch
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer
from blazefl.core import IPCMode
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


class Users:
    """The users' images, which each process maps from the file. Batches are sliced whole, not image by image."""

    def __init__(self, folder):
        self.folder = folder

    def get_dataset(self, type_, cid):
        return TensorDataset(*task.load(self.folder).user(cid))

    def set_dataset(self, type_, cid, dataset):
        pass

    def get_dataloader(self, type_, cid, batch_size, generator):
        users = self.get_dataset(type_, cid)
        batches = BatchSampler(RandomSampler(users, generator=generator), batch_size, drop_last=False)
        return DataLoader(users, sampler=batches, batch_size=None)


class Networks:
    def __init__(self, folder):
        self.folder = folder

    def select_model(self, model_name):
        torch.set_num_threads(1)
        return (
            task.load(self.folder).network().to(memory_format=torch.contiguous_format)
        )  # BlazeFL cannot send other layouts


class Trainer(FedAvgProcessPoolClientTrainer):
    def progress_fn(self, it):
        return it


def main():
    it = task.from_command_line()
    users, networks = Users(it.folder), Networks(it.folder)
    server = FedAvgBaseServerHandler(
        networks, "", users, it.rounds, task.NUM_USERS, task.COHORT / task.NUM_USERS, "cpu", task.BATCH, 0
    )
    times = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            networks, "", Path(folder), Path(folder), users, "cpu", task.NUM_USERS, 1, task.BATCH, task.LEARNING_RATE,
            0, it.jobs, IPCMode.SHARED_MEMORY,
        )  # fmt: skip
        while not server.if_stop():
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
            times.append(task.now())
    task.report(it, times, server.model.state_dict())


if __name__ == "__main__":
    main()
