"""One NVFlare site, which trains nothing and writes down when it received the weights. What it does is its task.

add: add the site's number to the weights; hold: the same, and sites other than the first need five seconds;
noise: add pseudo-random numbers that depend on the site and the round only, after a pause of random length.
"""

import argparse
import hashlib
import json
import random
import time
from pathlib import Path

import numpy as np
import nvflare.client as flare


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=("add", "hold", "noise"), default="add")
    options = parser.parse_args()
    flare.init()
    name, times = flare.get_site_name(), []
    number = int(name.rpartition("-")[2])
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        times.append(time.time())
        (key, weights), *_ = received.params.items()
        digest = hashlib.sha256(weights.tobytes()).hexdigest() if options.task == "noise" else ""
        if options.task == "noise":
            seed = (number, received.current_round)
            update = weights + np.random.default_rng(seed).standard_normal(len(weights), dtype=np.float32)
            time.sleep(random.uniform(0, 0.5))
        else:
            update = weights + float(number)
            time.sleep(5 if options.task == "hold" and number > 1 else 0)
        flare.send(flare.FLModel(params={key: update}, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": 1}))
        last = [float(weights.min()), float(weights.max())]
        (options.out / f"{name}.json").write_text(json.dumps({"times": times, "received": last, "digest": digest}))


if __name__ == "__main__":
    main()
