"""NVFlare's half of the comparison: a FedAvg recipe, deployed in POC mode with one process per site.

python nvflare_job.py --clients 2 --rounds 6 --megabytes 0.4 --out FOLDER --recipe numpy
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe.poc_env import PocEnv


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--task", default="add", help="of the sites")
    parser.add_argument(
        "--watch", action="store_true", help="write states to OUT/states; copy the job if OUT/again is made"
    )
    options = parser.parse_args()
    common = {
        "name": "exchange",
        "min_clients": options.clients,
        "num_rounds": options.rounds,
        "train_script": str(Path(__file__).with_name("nvflare_client.py")),
        "train_args": f"--out {options.out} --task {options.task}",
    }
    num_floats = int(options.megabytes * 1e6 / 4)
    recipe = _torch(num_floats, common) if options.recipe == "torch" else _numpy(num_floats, options.out, common)
    env = PocEnv(num_clients=options.clients)
    try:
        run = recipe.execute(env)
        if options.watch:
            _watch(env, run.get_job_id(), options.out)
        run.get_result(timeout=540)
    finally:
        env.stop(clean_up=True)


def _watch(env: PocEnv, job: str, folder: Path) -> None:
    """Write a line with the time and the state every second, and submit a copy of the job once `again` is in the
    folder."""
    again = folder / "again"
    while True:
        try:
            state = env.get_job_status(job)
            if again.exists():
                session = env._get_session_manager()._get_session()
                job = session.clone_job(job)
                session.close()
                again.unlink()
        except Exception as error:  # noqa: BLE001  # the server does not answer, in one of many ways
            state = type(error).__name__
        with (folder / "states").open("a") as lines:
            lines.write(f"{time.time()} {state}\n")
        time.sleep(1)


def _numpy(num_floats: int, folder: Path, common: dict[str, Any]) -> NumpyFedAvgRecipe:
    weights = folder / "weights.npy"
    np.save(weights, np.zeros(num_floats, dtype=np.float32))
    return NumpyFedAvgRecipe(initial_ckpt=str(weights), **common)


def _torch(num_floats: int, common: dict[str, Any]) -> Any:
    """Return the recipe for PyTorch, with the setting that its documents recommend for large models."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import ExchangeFormat

    zeros = {"class_path": "torch.nn.PReLU", "args": {"num_parameters": num_floats, "init": 0.0}}  # one tensor
    return FedAvgRecipe(
        model=zeros, server_expected_format=ExchangeFormat.PYTORCH, enable_tensor_disk_offload=True, **common
    )


if __name__ == "__main__":
    main()
