"""One NVFlare site: it adds its number to the weights, and writes down when it received them."""

import argparse
import json
import time
from pathlib import Path

import nvflare.client as flare


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    flare.init()
    name, times, last = flare.get_site_name(), [], []
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        times.append(time.time())
        (key, weights), *_ = received.params.items()
        last = [float(weights.min()), float(weights.max())]
        update = weights + float(int(name.rpartition("-")[2]))
        flare.send(flare.FLModel(params={key: update}, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": 1}))
        (options.out / f"{name}.json").write_text(json.dumps({"times": times, "received": last}))


if __name__ == "__main__":
    main()
