"""Measure what hiding single updates costs in Flower and NVFlare, for 10 clients: CPU seconds and bytes.

Run it in the peer's environment (`flower.txt`, or `nvflare.txt` and `tenseal==0.3.18`):
`python tests/bench/peers/secure.py flower|nvflare [--parameters 11250000] [--part 0.02]`. It calls the functions that
their clients and coordinators call, without a network, on a part of the parameters, and multiplies: all of them handle
one value after the other. Flower's SecAgg+ has its default quantisation, and one client is lost after it has shared
its secrets, whose sharing is not measured. NVFlare's encryption has the parameters of its provisioning (CKKS, 8192,
60-40-40 bits). `measure_secure_rounds.py` measures fedssl.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

NUM_CLIENTS, NUM_TRIALS = 10, 3


def seconds(step: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least CPU seconds of a few trials, and what the last one returned."""
    trials = []
    for _ in range(NUM_TRIALS):
        began = time.process_time()
        found = step()
        trials.append(time.process_time() - began)
    return min(trials), found


def flower(update: np.ndarray[Any, Any]) -> tuple[float, float, int]:
    """Return the CPU seconds of a client and of the coordinator, and the bytes that a client sends."""
    from flwr.common import ndarrays_to_parameters
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        factor_combine,
        parameters_addition,
        parameters_mod,
        parameters_multiply,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.quantization import dequantize, quantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    clipping, levels, modulus = 8.0, 4_194_304, 4_294_967_296

    def added(vector: list[Any], num_masks: int, combine: Callable[..., list[Any]]) -> list[Any]:
        shapes = [each.shape for each in vector]
        for number in range(num_masks):
            vector = combine(vector, pseudo_rand_gen(number.to_bytes(32, "big"), modulus, shapes))
        return vector

    def client() -> list[Any]:
        words = factor_combine(1000, quantize(parameters_multiply([update], 1.0), clipping, levels))
        return list(parameters_mod(added(words, NUM_CLIENTS, parameters_addition), modulus))

    def coordinator() -> list[Any]:
        total = vector
        for _ in range(NUM_CLIENTS - 2):
            total = parameters_addition(total, vector)
        total = parameters_mod(added(total, 2 * (NUM_CLIENTS - 1), parameters_subtraction), modulus)
        return list(dequantize(total[1:], clipping, levels))

    client_seconds, vector = seconds(client)
    return client_seconds, seconds(coordinator)[0], sum(map(len, ndarrays_to_parameters(vector).tensors))


def nvflare(update: np.ndarray[Any, Any]) -> tuple[float, float, int]:
    """Return the same for NVFlare, whose clients also decrypt the sum."""
    import tenseal

    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 40])
    context.global_scale = 2**40
    encrypting, sent = seconds(lambda: tenseal.ckks_vector(context, update * np.float64(10)).serialize())

    def coordinator() -> bytes:
        total = tenseal.ckks_vector_from(context, sent)
        for _ in range(NUM_CLIENTS - 1):
            total = total + tenseal.ckks_vector_from(context, sent)
        return bytes((total * (1.0 / (10 * NUM_CLIENTS))).serialize())

    adding, found = seconds(coordinator)
    decrypting, mean = seconds(lambda: tenseal.ckks_vector_from(context, found).decrypt())
    assert np.allclose(mean, update, atol=1e-3)
    return encrypting + decrypting, adding, len(sent)


def main() -> None:
    """Print the seconds of a client and of the coordinator, and a client's bytes as a multiple of a plain update's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["flower", "nvflare"])
    parser.add_argument("--parameters", type=int, default=11_250_000)
    parser.add_argument("--part", type=float, default=0.02)
    options = parser.parse_args()
    size = int(options.parameters * options.part)
    update = (np.random.default_rng(0).standard_normal(size) * 0.01).astype(np.float32)
    client, coordinator, num_bytes = {"flower": flower, "nvflare": nvflare}[options.peer](update)
    sys.stdout.write(
        f"| {options.peer} | {client / options.part:.2f} | {coordinator / options.part:.2f} | "
        f"{num_bytes / update.nbytes:.2f} |\n"
    )


if __name__ == "__main__":
    main()
