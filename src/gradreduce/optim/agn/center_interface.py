"""The interface of a center for AGN workers, and what it knows of a worker.

The center may be in another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.weights import ONE

from .push import PushConfig, PushPlan
from .rounds import CenterOptions, Round
from .session_hook import Registry
from .sums import Sums


class WorkerVariables:
    """The trainable variables of a worker.

    Attributes:
        centers: the center variable of each variable, in the order of creation.
        sums: the sums of gradients times weights since the last push. A step or push sets a new
            mapping; items are not added to, or removed from, the old one.
        count: the number of steps since the last push or pull.
        excess: the sum of weight - 1 of these steps, in the units of ``weights.py``.
        pulled: the value from which the distance scaling measures, on the worker's first device;
            see ``Worker._end_period``.
        num_steps: the number of local steps.
        pulled_at: the number of pushes that the center had applied at the last pull; counted by a
            center with a rule.
        round: the round of the center that has the last push, until the worker has pulled.
        last_push: the plan of the last push if it can run again, its sums, and the slots of the
            center. Used by a center in this process.
    """

    def __init__(self) -> None:
        self.centers: dict[Variable, Variable] = {}
        self.sums: Sums = {}
        self.count = self.excess = 0
        self.pulled: dict[Variable, Buffer] = {}
        self.num_steps = self.pulled_at = 0
        self.round: Round | None = None
        self.last_push: tuple[PushPlan, Sums, object] | None = None

    def weight(self) -> int:
        """Returns the sum of the weights since the last push or pull, in exact units."""
        return self.count * ONE + self.excess

    def center_of(self, var: Any) -> Variable:
        """Returns the center variable of ``var``; raises ``KeyError`` if there is none."""
        center = self.centers.get(var) if isinstance(var, Variable) else None
        if center is None:
            raise KeyError(f"{var!r} was not created by this AGNCustomGetter")
        return center


class Center(ABC):
    """The methods of a center that getters and optimizers call; they are thread-safe.

    Attributes:
        devices: devices of the mesh that the devices of the workers must belong to.
        registry: the ``Registry`` of the workers.
        options: how pushes are applied.
    """

    devices: tuple[Device, ...]
    registry: Registry
    options: CenterOptions = CenterOptions()

    @abstractmethod
    def variable_for(self, name: str, local: Variable) -> Variable:
        """Returns the center variable of a name; the first call creates it from ``local``.

        Raises:
            ValueError: the center variable has another shape or dtype than ``local``.
        """

    @abstractmethod
    def join(self, optimizer: Optimizer) -> object:
        """Registers an optimizer. The first one defines the rule, if the center has none.

        The result is for methods of the same class.

        Raises:
            ValueError: the optimizer has another class, other slots or other masters than the first
                one. If the center has a rule, only masters are compared.
        """

    def expect(self, num_worker: int) -> None:  # noqa: B027  # optional
        """Sets the number of workers, before ``join``; a round needs none that have ended.

        Raises:
            ValueError: a round needs more pushes than there are workers.
        """

    @abstractmethod
    def slot(self, variable: Variable, name: str) -> Variable | None:
        """Returns a slot of a center variable, or None."""

    @abstractmethod
    def slot_variables(self) -> list[Variable]:
        """Returns every slot of every center variable."""

    @abstractmethod
    def set_up_push(
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        of: Sequence[Variable],
        config: PushConfig,
    ) -> None:
        """Compiles the kernels of a push and creates the slots of center variables.

        Args:
            optimizer: the worker's optimizer, which has joined.
            variables: all variables of the worker.
            of: the variables that will be pushed.
            config: settings of the push.

        Raises:
            KeyError: the worker's getter did not create a variable.
        """

    @abstractmethod
    def list_written_buffers(self, variables: WorkerVariables) -> list[Buffer]:
        """Returns the memory in this process that a push writes, except the worker's variables."""

    @abstractmethod
    def push_scope(self) -> AbstractContextManager[None]:
        """Returns a context manager in which a worker launches local steps, pushes and pulls.

        It defers Ctrl-C, so that a step and the push that belongs to it are both made or neither. A
        push that waits for another process can be interrupted.
        """

    @abstractmethod
    def push(
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        config: PushConfig,
        scalars: Scalars,
        weight: float,
        then: Callable[[bool], None],
    ) -> None:
        """Updates the center by ``variables.sums``, and pulls; drops a push that is too old.

        If it fails before the center has changed, nothing has changed, and the worker calls this
        again with the same sums.

        Args:
            optimizer: the worker's optimizer; its slots exist.
            variables: the worker's variables. The pull overwrites variables that have sums, and
                their masters.
            config: settings of the push.
            scalars: the scalars of the optimizer's rule; not used if the center has a rule.
            weight: the sum of the weights of the period, which the sums are divided by.
            then: called at the end, while Ctrl-C is deferred, with whether the push was applied. It
                replaces the sums and records the values that were pulled.

        Raises:
            DeadlineExceededError: a round did not get its pushes before the deadline of the call.
                The push belongs to the round; the next call waits for it again.
        """

    @abstractmethod
    def pull(
        self, optimizer: Optimizer, variables: WorkerVariables, then: Callable[[], None]
    ) -> None:
        """Copies the center to a worker's variables and masters.

        Args:
            optimizer: the worker's optimizer.
            variables: the worker's variables, which are all overwritten.
            then: called at the end, while Ctrl-C is deferred. It clears the sums and records the
                values that were pulled.
        """
