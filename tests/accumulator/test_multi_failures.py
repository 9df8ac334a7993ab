"""A joint take whose launches fail part-way: the sums are unchanged, or the devices fail."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.backends.sim.collective import SimCollective
from gradreduce.errors import BackendUnavailableError, CancelledError


class InjectedError(RuntimeError):
    """The failure that a test plants."""


class Case(NamedTuple):
    """One joint take.

    Attributes:
        placement: the placement of the mesh.
        dtypes: the accumulators: ``"float32:1"`` on that device, ``"float32"`` over the mesh.
        applies: the number of gradients of each.
        outcomes: for each launch and collective of the take, the result of its failure: the sums
            are unchanged, or the devices fail.
        algorithm: the all-reduce algorithm.
        peers: whether GPUs have peer access.
        size: the size of the gradients.
    """

    placement: list[int]
    dtypes: tuple[str, ...]
    applies: tuple[int, ...]
    outcomes: tuple[str, ...]
    algorithm: str = "hierarchical_copy"
    peers: bool = True
    size: int = 3

    def open(self, implementation: str) -> gr.Mesh:
        return gr.open_mesh(
            self.placement,
            backend="sim",
            kernels=implementation,
            strict=True,
            peer_access=self.peers,
        )

    def filled(self, mesh: gr.Mesh) -> list[gr.ConditionalAccumulator]:
        """Accumulators that hold 1, 2, … on each of their devices."""
        ops = gr.AllReduceCrossDeviceOps(self.algorithm)
        made = []
        for name, times in zip(self.dtypes, self.applies, strict=True):
            dtype, _, place = name.partition(":")
            home = mesh.devices[int(place)] if place else mesh
            acc = gr.ConditionalAccumulator(dtype, device=home, cross_device_ops=ops)
            for value in range(1, times + 1):
                one = np.full(self.size, value, dtype)
                acc.apply_grad(one if place else gr.PerReplica([one] * len(mesh), mesh))
            made.append(acc)
        return made

    def check(self, taken) -> None:
        """Checks the means of the gradients of ``filled``."""
        for result, times in zip(taken, self.applies, strict=True):
            values = result.values if isinstance(result, gr.Mirrored) else [result]
            assert all((value == (times + 1) / 2).all() for value in values)


SIDE_BY_SIDE = [
    Case([0, 0], ("float32:0", "float32:1"), (2, 2), ("stay",)),
    Case([0, 0], ("float32:0", "float32:1"), (2, 3), ("stay", "lost")),
    Case([0, 1], ("float32:0", "float64:1"), (2, 2), ("stay", "lost")),
    Case([0, 0], ("float32:0", "float16:1"), (2, 2), ("stay", "stay")),
    Case([0, 1], ("float32:0", "float16:0", "float16:1"), (2, 2, 2), ("stay",) * 3),
]
OVER_A_MESH = [
    Case([0, 1], ("float32",), (2,), ("stay",)),
    # Two slices, one on each GPU; and without peer access, where nothing is reduced in place.
    Case([0, 1], ("float32",), (2,), ("stay", "lost"), size=20_000),
    Case([0, 1], ("float32",), (2,), ("stay", "stay"), size=20_000, peers=False),
    # Two packs with two divisors: the first is reduced out of place, the second in place.
    Case([0, 1], ("float32", "float32"), (2, 3), ("stay", "stay")),
    # The single sum is divided last; the sums of the mesh must still be intact before.
    Case([0, 1], ("float32", "float32:0"), (2, 2), ("stay", "stay")),
    # The collective, which one of the two may have received, and their divisions.
    Case([0, 1], ("float32",), (2,), ("lost",) * 3, "nccl"),
    Case([0, 0, 1], ("float32",), (2,), ("stay", "lost", "lost", "lost"), "nccl"),
    Case([0, 1], ("float32", "float16:1"), (2, 2), ("stay",) * 4, "nccl"),
]
CASES = [*SIDE_BY_SIDE, *OVER_A_MESH]
FAILURES = [
    pytest.param(case, number, outcome, id=f"{place}-launch{number}-{outcome}")
    for place, case in enumerate(CASES)
    for number, outcome in enumerate(case.outcomes, 1)
]


@contextlib.contextmanager
def failing_at(mesh, number):
    """Makes the n-th launch or collective fail, from 1 on; yields those that were tried."""
    tried = []

    def counted(real):
        def run(*args, **options):
            tried.append(real.__name__)
            if len(tried) == number:
                raise InjectedError(real.__name__)
            return real(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for device in mesh.devices:
            patch.setattr(device, "_launch", counted(device._launch))
        give = SimCollective._submit
        patch.setattr(
            SimCollective, "_submit", lambda self, issue, *rest: give(self, counted(issue), *rest)
        )
        yield tried


def counters(accumulators):
    return [(acc.num_accumulated(), acc.global_step, acc.num_dropped) for acc in accumulators]


@pytest.mark.parametrize(("case", "number", "outcome"), FAILURES)
def test_no_take_returns_a_sum_that_is_already_divided(implementation, case, number, outcome):
    with case.open(implementation) as mesh:
        accumulators = case.filled(mesh)
        before = counters(accumulators)
        with failing_at(mesh, number), pytest.raises(InjectedError) as caught:
            gr.take_grads(accumulators, 2)
        assert counters(accumulators) == before
        notes = getattr(caught.value, "__notes__", [])
        if outcome == "stay":
            assert notes == []
            case.check(gr.take_grads(accumulators, 2))
            return
        assert "cannot be used any more" in notes[0]
        for acc in accumulators:
            for call in (lambda acc=acc: acc.take_grad(1), lambda acc=acc: acc.apply_grad([1.0])):
                with pytest.raises(BackendUnavailableError, match="failed half way"):
                    call()
        assert counters(accumulators) == before


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_launch_of_these_takes_was_made_to_fail(implementation, case):
    with case.open(implementation) as mesh:
        accumulators = case.filled(mesh)
        with failing_at(mesh, 0) as tried:
            case.check(gr.take_grads(accumulators, 2))
        assert len(tried) == len(case.outcomes)


def test_a_failing_take_and_the_takes_queued_behind_it_raise_the_error(
    implementation, call_threads
):
    """Also if another thread's apply completes it: that apply adds its gradient and continues."""
    with gr.open_mesh([0, 0], backend="sim", kernels=implementation, strict=True) as mesh:
        first, second = (gr.ConditionalAccumulator("float32", device=each) for each in mesh.devices)
        for acc, times in ((first, 4), (second, 2)):
            for _ in range(times):
                acc.apply_grad([1.0])
        joint = call_threads.waiting(gr.take_grads, [first, second], 3)
        behind = call_threads.waiting(second.take_grad, 1)
        with failing_at(mesh, 3) as tried:  # the apply's own, and a division by 4
            assert second.apply_grad([1.0]) is True
        assert len(tried) == 3
        with pytest.raises(InjectedError) as caught:
            joint.result()
        assert "cannot be used any more" in caught.value.__notes__[0]
        with pytest.raises((BackendUnavailableError, CancelledError), match=r"failed|cancelled"):
            behind.result()
        assert counters([first, second]) == [(4, 0, 0), (3, 0, 0)]
