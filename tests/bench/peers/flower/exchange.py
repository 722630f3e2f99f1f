"""Flower's half of the comparison: FedAvg over clients that train nothing. What they do instead is the app's `task`.

add: add the client's number to the weights; hold: the same, and clients other than the first need five seconds;
noise: add pseudo-random numbers that depend on the client and the round only, after a pause of random length.
"""

import hashlib
import json
import random
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
    number, task = int(context.node_config["number"]), context.run_config["task"]
    if task == "noise":
        seed = (number, int(message.content["config"]["server-round"]))
        update = weights + np.random.default_rng(seed).standard_normal(len(weights), dtype=np.float32)
        time.sleep(random.uniform(0, 0.5))
    else:
        update = weights + np.float32(number)
        time.sleep(5 if task == "hold" and number > 1 else 0)
    content = RecordDict(
        {"arrays": ArrayRecord({"weights": Array(update)}), "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content=content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    config, times, out = context.run_config, [], Path(str(context.run_config["out"]))
    num_clients, num_rounds = int(config["num-clients"]), int(config["num-rounds"])

    def note(round_number: int, arrays: ArrayRecord) -> MetricRecord:
        times.append(time.time())
        with out.with_suffix(".rounds").open("a") as lines:
            lines.write(f"{times[-1]}\n")
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
    digest = hashlib.sha256(final.tobytes()).hexdigest()
    report = {"times": times, "final": [float(final.min()), float(final.max())], "digest": digest}
    out.write_text(json.dumps(report))
