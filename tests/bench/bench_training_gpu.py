"""Images per second of SimCLR on a GPU in bf16, next to bare loops and to loops with PIL, and where a step's time goes.

    PYTHONPATH=tests python tests/bench/bench_training_gpu.py resnet18 convnet resnet50-224 vit-small-224
    PYTHONPATH=tests python tests/bench/bench_training_gpu.py resnet18 --ways compiled bare-compiled --json found.json
    make bench ARGS="-k training_gpu -s"        only ResNet-18, asserted

Per case, in the order of `--ways`:

- `eager`, `recorded`, `compiled`: rounds of the engine with these `gpu_steps`. `images/s` counts whole rounds;
  `in steps` leaves their start and their end out, which take the milliseconds `outside`. Then the time of the views,
  of the forward and the backward pass, and of a whole step: by the host's clock, and the sum over the GPU's kernels.
  Their difference is waiting.
- `bare-eager`, `bare-recorded`, `bare-compiled`: the shortest loop that trains the same model by the same loss on
  tensors that are ready on the GPU, taking its steps in the same three ways.
- `pil`, `lightly`: the bare loop, whose views come from a DataLoader with PIL (see `loader_loops.py`).

`fedssl is`: the engine's rate over that of the bare loop of the same steps; for loaders, that of its fastest steps.

The time of the first steps, which includes compiling, is reported separately. `--limit` bounds one measurement,
`--seconds` all of them; each result is added to `--json` at once. torch keeps compiled kernels on disk, so that a run
of the same case and ways beforehand (`--turn-seconds 0`) shortens the first steps.
"""

import argparse
import contextlib
import cProfile
import gc
import io
import json
import os
import pstats
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bench.bench_training import Case, contrast, seconds, spec_of
from bench.loader_loops import Loss, lightly_parts, loaded_views, torchvision_views
from fedssl.engine import LocalProgress, cuda_graphs, release_trainer, run_local_round, start_run
from fedssl.engine.cuda_graphs import on_own_stream
from fedssl.engine.optimization import autocast, total_loss
from fedssl.engine.trainer import borrow_trainer
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData
from fedssl.precision import exact_float32

CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "resnet18": ({"name": "resnet18"}, 32, 512),
    "convnet": ({"name": "convnet"}, 32, 512),
    "resnet50-224": ({"name": "resnet50", "stem": "imagenet"}, 224, 64),
    "vit-small-224": ({"name": "vit-small"}, 224, 128),
}
"""Encoder, pixels, images per batch."""
ENGINE, LOADERS, BARE = ("eager", "recorded", "compiled"), ("pil", "lightly"), "bare-"
WAYS = ("eager", "recorded", "bare-eager", "bare-recorded", "compiled", "bare-compiled", *LOADERS)
WARM_UP_STEPS, PROFILED_STEPS, TURNS = 6, 4, 3
MOST_BYTES = {"cuda": 2_000_000_000, "cpu": 20_000_000}
"""The most memory that a round's images take."""
LEAST_OF_ROOF = 0.3
"""Least share of the roof: the rate of a bf16 matrix product over the operations of an image, as torch counts them."""

Found = dict[str, Any]


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def case_of(name: str, batch_size: int | None, size: int | None, gpu_steps: str = "eager") -> Case:
    """Return a case of FedSimCLR. Its number of steps is not used: a round lasts as long as the measurement needs."""
    encoder, pixels, images = CASES[name]
    wanted = {"precision": "bf16", "gpu_steps": gpu_steps}
    spec = spec_of("fedsimclr", encoder, 3, size or pixels, batch_size or images, **wanted)
    return Case(name, METHODS["fedsimclr"], contrast, spec, WARM_UP_STEPS)


def random_images(case: Case, num_images: int, device: torch.device) -> ClientData:
    size = case.spec.data.image_size
    return ClientData(torch.randint(0, 256, (num_images, 3, size, size), dtype=torch.uint8, device=device))


def _most_images(case: Case, device: torch.device) -> int:
    most = MOST_BYTES[device.type] // (3 * case.spec.data.image_size**2)
    return max(most, WARM_UP_STEPS * case.spec.training.batch_size)


def measure_loop(take: Callable[[int], object], case: Case, device: torch.device, turn_seconds: float) -> Found:
    """Return the rate of `take(number of steps)`, and how much longer its first steps take than the following ones."""
    batch_size = case.spec.training.batch_size
    first = seconds(lambda: take(WARM_UP_STEPS), device)
    warm = seconds(lambda: take(WARM_UP_STEPS), device)
    number = max(
        WARM_UP_STEPS, min(_most_images(case, device) // batch_size, round(turn_seconds / warm * WARM_UP_STEPS))
    )
    rates = [number * batch_size / seconds(lambda: take(number), device) for _ in range(TURNS)]
    return {"images_per_second": statistics.median(rates), "turns": rates, "steps": number, "first_s": first - warm}


def measure_engine(case: Case, device: torch.device, turn_seconds: float) -> Found:
    """Measure rounds of the engine, and then the parts of a step."""
    ctx, progress = case.context(device), list[LocalProgress]()
    broadcast = start_run(case.method, case.context(device, 0, "")).received
    images = random_images(case, _most_images(case, device), device).images

    def take(number: int) -> None:
        data = ClientData(images[: number * case.spec.training.batch_size])
        run_local_round(case.method, broadcast, None, data, ctx, progress.append)

    found = measure_loop(take, case, device, turn_seconds)
    found["in_steps"] = statistics.median(each.images_per_second for each in progress if each.step == found["steps"])
    num_images = found["steps"] * case.spec.training.batch_size
    found["outside_ms"] = 1e3 * num_images * (1 / found["images_per_second"] - 1 / found["in_steps"])
    if turn_seconds:
        say(_calls_of(lambda: take(2)))
        found["parts"] = measure_parts(case, device)
    return found


def _calls_of(work: Callable[[], object]) -> str:
    """Return which functions take the host's time. A function that reads a number also waits for the GPU."""
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(work)
    pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(60)
    return text.getvalue()


def measure_parts(case: Case, device: torch.device) -> Found:
    """Return milliseconds of the host's clock and of kernels per step, and the number of kernels, for each part."""
    ctx = case.context(device)
    with borrow_trainer(case.method, ctx) as trainer, exact_float32(device), on_own_stream(device):
        algorithm, modules = trainer.algorithm, trainer.modules
        data = random_images(case, PROFILED_STEPS * case.spec.training.batch_size, device)
        batches = list(algorithm.batches(data, 0, ctx))
        take_step = trainer.start_round(algorithm.schedule(len(data.images), ctx), ctx)

        def forward() -> list[Tensor]:
            with autocast(ctx):
                return [total_loss(algorithm.objective(modules, batch, ctx)[0]) for batch in batches[:1]]

        def forward_and_backward() -> None:
            for _ in batches:
                modules.zero_grad(set_to_none=True)
                forward()[0].backward()  # type: ignore[no-untyped-call]

        parts: dict[str, Callable[[], object]] = {
            "views": lambda: list(algorithm.batches(data, 0, ctx, trainer.make_views))
        }
        if case.spec.training.gpu_steps == "eager":
            parts["forward"] = lambda: [forward() for _ in batches]
            parts["forward and backward"] = forward_and_backward
        parts["step without views"] = lambda: [take_step(batch) for batch in batches]
        return {name: _part(name, work, device) for name, work in parts.items()}


def _part(name: str, work: Callable[[], object], device: torch.device) -> Found:
    on_gpu = device.type == "cuda"
    work()
    wall = min(seconds(work, device) for _ in range(2))
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        seconds(work, device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    rows = [row for row in profiler.key_averages() if row.device_type == kind and not row.is_user_annotation]
    spent = [row.self_device_time_total if on_gpu else row.self_cpu_time_total for row in rows]
    say(f"\nkernels of {name}: ms per step, times per step")
    for time_us, row in sorted(zip(spent, rows, strict=True), key=lambda pair: -pair[0])[:25]:
        say(f"{time_us / 1e3 / PROFILED_STEPS:9.3f}{row.count / PROFILED_STEPS:8.1f}  {row.key[:150]}")
    return {
        "wall_ms": wall * 1e3 / PROFILED_STEPS,
        "kernels_ms": sum(spent) / 1e3 / PROFILED_STEPS,
        "kernels": sum(row.count for row in rows) / PROFILED_STEPS,
    }


def bare_step(case: Case, device: torch.device, loss: Loss, how: str) -> Callable[[Tensor], object]:
    """Return the shortest step that trains the case's model on views (2B, C, S, S)."""
    ctx = case.context(device)
    modules = case.method.bind(case.spec).client.build(ctx).to(device)
    network = nn.Sequential(modules["encoder"], modules["projector"]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = case.spec.training.optimizer
    optimizer = torch.optim.SGD(
        network.parameters(), config.learning_rate, config.momentum, weight_decay=config.weight_decay, fused=True
    )

    def loss_of(views: Tensor) -> Tensor:
        return loss(*network(views).chunk(2))

    if how == "compiled":
        torch.compiler.reset()
        loss_of = torch.compile(loss_of, dynamic=False)

    def step(views: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(ctx):
            total = loss_of(views)
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def recorded(step: Callable[[Tensor], object], views: Tensor) -> Callable[[Tensor], object]:
    """Return the step as a CUDA graph."""
    place, stream = views.clone(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(place)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(place)

    def replay(views: Tensor) -> None:
        place.copy_(views)
        graph.replay()

    return replay


def measure_bare(case: Case, device: torch.device, turn_seconds: float, how: str) -> Found:
    """Measure the bare loop on four batches that are ready on the device."""
    shape = (2 * case.spec.training.batch_size, 3, case.spec.data.image_size, case.spec.data.image_size)
    batches = [torch.rand(shape, device=device).to(memory_format=torch.channels_last) for _ in range(4)]
    started = time.perf_counter()
    step = bare_step(case, device, case.loss, how)
    if how != "eager" and device.type == "cuda":
        step = recorded(step, batches[0])
    prepared = time.perf_counter() - started
    found = measure_loop(lambda n: [step(batches[i % 4]) for i in range(n)], case, device, turn_seconds)
    found["first_s"] += prepared
    return found


def measure_loader(case: Case, device: torch.device, turn_seconds: float, whose: str, num_workers: int) -> Found:
    """Measure the bare, eager loop with views from a DataLoader."""
    data = case.spec.data
    transform, loss = lightly_parts(data, 0.1) if whose == "lightly" else (torchvision_views(data), case.loss)
    step = bare_step(case, device, loss, "eager")
    views = loaded_views(transform, data, case.spec.training.batch_size, device, num_workers)
    found = measure_loop(lambda n: [step(next(views)) for _ in range(n)], case, device, turn_seconds)
    views.close()  # type: ignore[attr-defined]
    return found


def measure(name: str, way: str, device: torch.device, options: argparse.Namespace) -> Found:
    """Return the measurement of one way of training a case."""
    is_engine, given = way in ENGINE, (device, options.turn_seconds)
    case = case_of(name, options.batch_size, options.size, way if is_engine else "eager")
    # The engine lets cuDNN benchmark its algorithms for whole batches. With --no-search, cuDNN guesses the fastest one.
    if not options.search:
        cuda_graphs._benchmarking = contextlib.nullcontext
    with torch.backends.cudnn.flags(enabled=True, benchmark=options.search, deterministic=False, allow_tf32=True):
        if is_engine:
            return measure_engine(case, *given)
        if way in LOADERS:
            return measure_loader(case, *given, way, options.workers)
        return measure_bare(case, *given, way.removeprefix(BARE))


@contextlib.contextmanager
def at_most(limit: float) -> Iterator[None]:
    """Raise TimeoutError inside if the block lasts longer, in seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(name: str, way: str, device: torch.device, options: argparse.Namespace, limit: float) -> Found:
    """Return the measurement and its warnings, or the error: a failed measurement must not end the others."""
    started = time.perf_counter()
    say(f"\n== {name} {way}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with at_most(limit):
                found = measure(name, way, device, options)
        except Exception as error:  # noqa: BLE001
            say(traceback.format_exc())
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
    release_trainer()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found |= {"took_s": time.perf_counter() - started}
    if messages := sorted({str(each.message)[:300] for each in caught}):
        found["warnings"] = messages
    say(json.dumps(found, indent=1))
    return found


def table(results: Found) -> str:
    """Return the table as text: one line per measurement, and one per part of a step."""
    rates = {way: found["images_per_second"] for way, found in results["ways"].items() if "error" not in found}
    best = max((rates[way] for way in ENGINE if way in rates), default=float("nan"))
    head = (
        f"{'images/s':>27}{'in steps':>10}{'fedssl is':>11}{'of roof':>9}{'first, s':>10}{'took, s':>9}{'outside':>9}"
    )
    lines = [f"{results['case']}: {results['gflop_per_image']:.2f} GFLOP per image", head]
    for way, found in results["ways"].items():
        if "error" in found:
            lines.append(f"{way:<15} {found['error'][:110]}")
            continue
        rate = rates[way]
        ratio = (best if way in LOADERS else rates.get(way.removeprefix(BARE), float("nan"))) / rate
        share = rate * results["gflop_per_image"] * 1e9 / results["roof"]
        lines.append(
            f"{way:<15}{rate:>12,.0f}{found.get('in_steps', rate):>10,.0f}{ratio:>11.3f}{share:>9.3f}"
            f"{found['first_s']:>10.1f}{found['took_s']:>9.1f}"
            f"{found.get('outside_ms', 0):>9.1f}"
        )
        lines += [f"  {each}" for each in found.get("warnings", ()) if "the training step cannot" in each]
    lines.append(f"{'ms per step':>39}{'clock':>9}{'kernels':>9}{'number':>9}")
    for way, found in results["ways"].items():
        for part, at in found.get("parts", {}).items():
            lines.append(f"{way:<15}{part:<24}{at['wall_ms']:>9.2f}{at['kernels_ms']:>9.2f}{at['kernels']:>9.0f}")
    return "\n".join(lines)


def matmul_flops(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """Return the floating-point operations per second of a bf16 matrix product of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return repeats * 2 * size**3 / seconds(lambda: [a @ b for _ in range(repeats)], device)


def flops_per_image(case: Case, device: torch.device, num_images: int = 8) -> float:
    """Return the operations of a training step per image, as torch counts convolutions and matrix products.

    A step has both views and the forward and the backward pass.
    """
    ctx, data = case.context(device), case.images(device, num_images)
    algorithm = case.method.bind(case.spec).client
    modules = algorithm.build(ctx).to(device).train()
    batch = next(iter(algorithm.batches(data, 0, ctx)))
    with FlopCounterMode(display=False) as counter:
        losses, _ = algorithm.objective(modules, batch, ctx)
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops() / len(batch.indices)


def measure_case(name: str, device: torch.device, options: argparse.Namespace, roof: float, until: float) -> Found:
    """Return the measurements of a case in all ways, and write each as soon as it is done."""
    case = case_of(name, options.batch_size, options.size)
    title = f"{name}, batches of {case.spec.training.batch_size}{'' if options.search else ', no search'}"
    stored = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results: Found = {"case": title, "device": _device_name(device), "roof": roof, "ways": {}}
    results["gflop_per_image"] = flops_per_image(case, device) / 1e9
    results["ways"].update(stored.get(title, {}).get("ways", {}))
    for way in options.ways:
        left = until - time.monotonic()
        if left < 3:
            results["ways"][way] = {"error": "no time left"}
            continue
        results["ways"][way] = attempt(name, way, device, options, min(left, options.limit))
        if options.json:
            options.json.write_text(json.dumps(stored | {title: results}, indent=1))
    return results


def _device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, {os.cpu_count()} processors"


def arguments(given: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seconds", type=float, default=900, help="of all measurements together")
    parser.add_argument("--limit", type=float, default=120, help="seconds of one measurement")
    parser.add_argument("--turn-seconds", type=float, default=0.6, help=f"of each of the {TURNS} turns")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--no-search", dest="search", action="store_false", help="cuDNN does not try its algorithms")
    parser.add_argument("--size", type=int, help="pixels of an image's side")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the DataLoader")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="where the results are added")
    return parser.parse_args(given)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_reaches_the_expected_share_of_its_matrix_product_speed() -> None:
    device = torch.device("cuda")
    options = arguments(["resnet18", "--ways", "recorded", "compiled"])
    roof = matmul_flops(device)
    results = measure_case("resnet18", device, options, roof, time.monotonic() + options.seconds)
    say(table(results))
    rates = [found["images_per_second"] for found in results["ways"].values()]
    assert max(rates) * results["gflop_per_image"] * 1e9 / roof >= LEAST_OF_ROOF


def main() -> None:
    options = arguments(sys.argv[1:])
    device, until = torch.device(options.device), time.monotonic() + options.seconds
    roof = matmul_flops(device) if device.type == "cuda" else matmul_flops(device, 256, 2)
    tables = []
    for name in options.cases:
        tables.append(table(measure_case(name, device, options, roof, until)))
        say(tables[-1])
    say("\n".join(["", f"{_device_name(device)}: bf16 matrix product {roof / 1e12:.0f} TFLOP/s", *tables]))


if __name__ == "__main__":
    main()
