"""Accumulated gradient normalization: names and signatures; the algorithm is still missing.

Source: tf.contrib.opt.AGNOptimizer (agn_optimizer.md); arXiv 1710.02368.
"""

from __future__ import annotations

from typing import Any

from gradreduce.device import Device, Mesh
from gradreduce.variables import Variable

from .base import Optimizer

__all__ = ["AGNCenter", "AGNCustomGetter", "AGNOptimizer"]


class AGNCenter:
    """Centre variables and their slots, spread over a mesh by bytes.

    Args:
        mesh: where they lie. Default: ``gr.default_mesh()``.

    Raises:
        NotImplementedError: always, in this version.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        raise NotImplementedError("AGNCenter is not implemented yet")


class AGNCustomGetter:
    """Makes the local, centre and accumulation copies of a worker's variables.

    Args:
        worker_device: the worker's device, or its part of a mesh.
        center: where the centre variables are. Default: the process-wide centre.

    Raises:
        NotImplementedError: always, in this version.
    """

    def __init__(self, worker_device: Device | Mesh, *, center: AGNCenter | None = None) -> None:
        raise NotImplementedError("AGNCustomGetter is not implemented yet")

    def center_variable(self, var: Variable) -> Variable:
        """The centre copy of a worker's variable.

        Args:
            var: a variable that came through this getter.
        """
        raise NotImplementedError("AGNCustomGetter is not implemented yet")

    def accumulation(self, var: Variable) -> Variable:
        """The sum of the gradients of a worker's variable since its last push.

        Args:
            var: a variable that came through this getter.
        """
        raise NotImplementedError("AGNCustomGetter is not implemented yet")


class AGNOptimizer(Optimizer):
    """Accumulates gradients locally and pushes their mean to the centre once per period.

    Args:
        optimizer: the rule for local and centre updates.
        num_worker: how many workers there are.
        custom_getter: the worker's ``AGNCustomGetter``.
        communication_period: local steps between two pushes, at least 1.
        use_locking: whether push, centre update and pull are one locked step.
        name: of the optimizer.

    Raises:
        NotImplementedError: always, in this version.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_worker: int,
        custom_getter: AGNCustomGetter,
        communication_period: int = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
    ) -> None:
        raise NotImplementedError("AGNOptimizer is not implemented yet")

    @property
    def local_step(self) -> Variable:
        """How many steps this worker has made."""
        raise NotImplementedError("AGNOptimizer is not implemented yet")

    def get_init_op(self, task_index: int) -> Any:
        """A callable that copies the centre to the local variables and clears the accumulation.

        Args:
            task_index: of the worker.
        """
        raise NotImplementedError("AGNOptimizer is not implemented yet")

    def make_session_run_hook(
        self, is_chief: bool, task_index: int, *, wait_timeout: float | None = None
    ) -> Any:
        """A context manager that initialises a worker.

        Args:
            is_chief: whether this worker also initialises the centre.
            task_index: of the worker.
            wait_timeout: seconds to wait for the other workers; None waits for nobody.
        """
        raise NotImplementedError("AGNOptimizer is not implemented yet")
