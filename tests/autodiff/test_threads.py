"""Several threads differentiate at the same time, independently."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

import gradreduce as gr

DESCENT = gr.GradientDescentOptimizer(1.0)
NUM_THREADS, NUM_TURNS = 8, 6
SECONDS = 30


def gradients(loss, *variables):
    return [found for found, _ in DESCENT.compute_gradients(loss, list(variables) or None)]


class Worker:
    """The losses of one thread, which use a shared Variable and its own."""

    def __init__(self, place, shared, own, together):
        self.place, self.shared, self.own, self.together = place, shared, own, together

    def loss(self):
        cubes = np.sum(self.shared**3)
        self.together.wait(SECONDS)  # all inside their losses at once
        return cubes * self.own

    def faulty(self):
        np.sum(self.shared * 100)
        raise ZeroDivisionError

    def work(self):
        found = []
        for turn in range(NUM_TURNS):
            with gr.replica(self.place):
                found.append(gradients(self.loss, self.shared, self.own))
            if (turn + self.place) % 3 == 0:
                with pytest.raises(ZeroDivisionError):
                    gradients(self.faulty)
        return found


def test_many_threads_with_exceptions():
    with gr.open_mesh(NUM_THREADS, backend="sim") as mesh:
        shared = gr.Variable(np.arange(1.0, 5.0), dtype="float64", device=mesh)
        together = Barrier(NUM_THREADS)
        workers = [
            Worker(
                place, shared, gr.Variable(place + 1.0, dtype="float64", device=device), together
            )
            for place, device in enumerate(mesh.devices)
        ]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            results = list(pool.map(Worker.work, workers, timeout=SECONDS))
    x = np.arange(1.0, 5.0)
    for scale, found in enumerate(results, start=1):
        assert len(found) == NUM_TURNS
        for slope, factor in found:
            assert slope.tolist() == (3 * scale * x**2).tolist()
            assert float(factor) == np.sum(x**3)


def test_a_thread_of_a_loss_reads_plain_values():
    """A loss belongs to one thread; a thread that it starts computes without a tape."""
    with gr.open_mesh(1, backend="sim") as mesh, ThreadPoolExecutor(1) as pool:
        x = gr.Variable([1.0, 2.0], device=mesh)

        def loss():
            other = pool.submit(lambda: x * 2).result(SECONDS)
            assert type(other) is np.ndarray
            return np.sum(other * x)

        assert gradients(loss)[0].tolist() == [2.0, 4.0]
