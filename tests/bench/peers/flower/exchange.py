"""Flower's half of the comparison: FedAvg over clients that add their number to the weights."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    weights = message.content["arrays"]["weights"].numpy()
    update = weights + np.float32(context.node_config["number"])
    content = RecordDict(
        {"arrays": ArrayRecord({"weights": Array(update)}), "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content=content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    config, times = context.run_config, []
    num_clients, num_rounds = int(config["num-clients"]), int(config["num-rounds"])

    def note(round_number: int, arrays: ArrayRecord) -> MetricRecord:
        times.append(time.time())
        return MetricRecord({"round": round_number})

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=num_clients,
        min_available_nodes=num_clients,
    )
    zeros = np.zeros(int(float(config["megabytes"]) * 1e6 / 4), dtype=np.float32)
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord({"weights": Array(zeros)}), num_rounds=num_rounds, evaluate_fn=note
    )
    final = result.arrays["weights"].numpy()
    Path(str(config["out"])).write_text(json.dumps({"times": times, "final": [float(final.min()), float(final.max())]}))
