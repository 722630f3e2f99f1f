"""Flower's half of the comparison: FedAvg in its simulation engine, whose clients Ray's actors run."""

import os
from pathlib import Path

import task
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client, server = ClientApp(), ServerApp()
FOLDER = "SIMULATED_TASK"
"""The environment variable with the task's folder, for Ray's actors."""


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    it = task.load(Path(os.environ[FOLDER]))
    network = it.network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    task.train(network, *it.user(int(context.node_config["partition-id"])))
    content = RecordDict(
        {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": task.IMAGES})}
    )
    return Message(content=content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    it = task.load(Path(os.environ[FOLDER]))
    times = []

    def note(round_number: int, arrays: ArrayRecord) -> MetricRecord:
        times.append(task.now())
        return MetricRecord({"round": round_number})

    strategy = FedAvg(
        fraction_train=task.COHORT / task.NUM_USERS, fraction_evaluate=0.0, min_available_nodes=task.NUM_USERS
    )
    arrays = ArrayRecord(it.weights)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=it.rounds, evaluate_fn=note)
    task.report(it, times[1:], result.arrays.to_torch_state_dict())  # the first time is before the first round


if __name__ == "__main__":
    import flower_rounds  # the actors import it by its name, so that its code is not sent with each message

    it = task.from_command_line()
    os.environ |= {FOLDER: str(it.folder), "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    resources = {"init_args": {"num_cpus": it.jobs}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(flower_rounds.server, flower_rounds.client, task.NUM_USERS, backend_config=resources)
