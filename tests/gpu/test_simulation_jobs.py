"""If several processes share a GPU, a simulation with deterministic steps has the same bits as in one process."""

import torch

from fedssl.simulation import simulate
from support.methods import method_spec, shards


def test_processes_that_share_a_gpu_give_the_same_bits_as_one() -> None:
    training = {"batch_size": 32, "local_epochs": 3, "gpu_steps": "recorded", "deterministic": True}
    spec = method_spec("fedema", training=training)
    one, two = (simulate(spec, shards(spec), device="cuda", jobs=jobs) for jobs in (1, 2))
    assert one.model.keys() == two.model.keys()
    assert [name for name in one.model if not torch.equal(one.model[name], two.model[name])] == []
    assert [record.clients for record in one.history] == [record.clients for record in two.history]
