"""NVFlare's half of the comparison: the FedAvg recipe for NumPy, deployed in POC mode with one process per site.

python nvflare_job.py --clients 2 --rounds 6 --megabytes 0.4 --out FOLDER
"""

import argparse
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe.poc_env import PocEnv


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    weights = options.out / "weights.npy"
    np.save(weights, np.zeros(int(options.megabytes * 1e6 / 4), dtype=np.float32))
    recipe = NumpyFedAvgRecipe(
        name="exchange",
        initial_ckpt=str(weights),
        min_clients=options.clients,
        num_rounds=options.rounds,
        train_script=str(Path(__file__).with_name("nvflare_client.py")),
        train_args=f"--out {options.out}",
    )
    env = PocEnv(num_clients=options.clients)
    try:
        run = recipe.execute(env)
        run.get_result(timeout=540)
    finally:
        env.stop(clean_up=True)


if __name__ == "__main__":
    main()
