"""A round on several GPUs equals that on one GPU up to rounding."""

import dataclasses

import pytest
import torch

from fedssl.engine import run_local_round
from fedssl.methods import METHODS
from fedssl.parallel.devices import train_on_devices
from support.methods import context
from support.rounds import client_data, start
from support.several_devices import assert_close, digits_spec


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["fedsimclr", "fedbyol", "feddino", "fedmae"])
def test_a_round_on_all_gpus_equals_one_on_a_single_gpu(name: str) -> None:
    spec = digits_spec(name)
    received, data = start(spec).received, client_data(spec, "client-0")
    ctx = dataclasses.replace(context(spec, 1, "client-0"), device=torch.device("cuda"))
    alone = run_local_round(METHODS[name], received, None, data.to("cuda"), ctx)
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    assert_close(train_on_devices(received, None, data, ctx, devices), alone, received)
