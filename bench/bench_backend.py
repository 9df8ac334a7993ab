"""Measures the backend "gradreduce" of torch.distributed on the CPU, compared with gloo."""

import statistics
from functools import partial
from typing import Any

from measure.case import OURS, Floor, counted, times
from measure.clock import After, Calls, each, garbage_kept, in_turns, timed
from measure.in_processes import figures_of, torchrun
from measure.runner import Bench, Benchmark

SIZE = 2  # processes
SMALL, LARGE, STEP = "all-reduce of 1 kB", "all-reduce of 64 MB", "DDP step, ResNet-18"
GLOO, BACKEND = "gloo", "backend"
NBYTES = {SMALL: 1000, LARGE: 64 * 10**6}
ROUNDS, QUICK_ROUNDS = {SMALL: 1000, LARGE: 21, STEP: 11}, 2
IMAGES, QUICK_IMAGES = (4, 3, 112, 112), (2, 3, 32, 32)
SECONDS = 300.0  # for all that the processes do
ABOVE, RATIO = "us above gloo", "time over gloo's, median of pairs"
OF_TORCH = ("torch",)

# On an AMD EPYC virtual machine with 2 cores that others kept busy, 2026-11, load average 10 to 78.
# No quiet machine was at hand.
FLOORS = (
    Floor(f"{SMALL}: {ABOVE}", SMALL, counted(ABOVE), "<=", 250, "533 to 589", OF_TORCH),
    Floor(f"{LARGE}: times as fast as gloo", LARGE, times(GLOO, BACKEND), ">=", 0.75,
          "0.58 to 1.06", OF_TORCH),
    Floor(f"{STEP}: {RATIO}", STEP, counted(RATIO), "<=", 1.15, "1.03 to 1.07", OF_TORCH),
)  # fmt: skip
Taken = dict[str, list[float]]  # seconds of the rounds by candidate


def sums(groups: dict[str, Any], nbytes: int) -> Calls:
    """Returns an all-reduce of float32 over each group."""
    import torch
    import torch.distributed as dist

    return {
        name: partial(dist.all_reduce, torch.zeros(nbytes // 4), group=group)
        for name, group in groups.items()
    }


def steps(groups: dict[str, Any], quick: bool) -> Calls:
    """Returns a step of DDP over each group: forward, backward and update."""
    import torch
    from measure.torch_modules import resnet18

    images = torch.randn(QUICK_IMAGES if quick else IMAGES)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    calls = {}
    for name, group in groups.items():
        model = torch.nn.parallel.DistributedDataParallel(resnet18(), process_group=group)
        calls[name] = partial(step, model, torch.optim.SGD(model.parameters(), lr=0.01))
    return calls


def in_each(quick: bool) -> dict[str, Taken] | None:
    """Measures in one of the processes; the first returns what it found."""
    import torch
    import torch.distributed as dist

    import gradreduce.torch.backend  # noqa: F401  # registers it

    torch.set_num_threads(1)
    dist.init_process_group("gradreduce")
    groups = {GLOO: dist.new_group(backend="gloo"), OURS + BACKEND: dist.group.WORLD}
    cases = {name: sums(groups, 40 if quick else nbytes) for name, nbytes in NBYTES.items()}
    cases[STEP] = steps(groups, quick)
    barrier, found = partial(dist.barrier, groups[GLOO]), {}
    for name, calls in cases.items():
        turns = [timed(candidate, After(barrier, call)) for candidate, call in calls.items()]
        with garbage_kept():
            found[name] = in_turns(turns, QUICK_ROUNDS if quick else ROUNDS[name], warm_ups=3)
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return found if is_first else None


def cases(bench: Bench) -> None:
    """Starts two processes, if PyTorch is installed."""
    if not bench.has("torch"):
        return
    most = str(2**40)  # freed memory is kept: new pages take as long as everything else
    found: dict[str, Taken] = figures_of(
        "bench_backend:in_each", bench.quick, launcher=torchrun(SIZE), seconds=SECONDS,
        OMP_NUM_THREADS="1", MALLOC_TRIM_THRESHOLD_=most, MALLOC_MMAP_THRESHOLD_=most,
    )  # fmt: skip
    for name, taken in found.items():
        pairs = zip(taken[OURS + BACKEND], taken[GLOO], strict=True)
        figures = {RATIO: statistics.median([ours / theirs for ours, theirs in pairs])}
        # The best of the microseconds, because other work on the machine doubles them.
        took = each(min if name == SMALL else statistics.median, taken)
        if name == SMALL:
            figures = {ABOVE: (took[OURS + BACKEND] - took[GLOO]) * 1e6}
        bench.note(name, f"{SIZE} processes, float32", figures, took)


BENCHMARK = Benchmark(__doc__, cases, FLOORS)

if __name__ == "__main__":
    BENCHMARK.main()
