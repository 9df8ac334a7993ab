"""What AGN workers use of a center, in this process or in another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device
from gradreduce.optim.optimizer import Optimizer, Scalars

from .push import PushConfig
from .session_hook import WorkerRegistry
from .worker_variables import WorkerVariables


class Center(ABC):
    """A center, as getters and optimizers of workers use it; methods are thread-safe.

    Attributes:
        devices: the devices of the workers must be in their mesh.
        registry: of the workers.
    """

    devices: tuple[Device, ...]
    registry: WorkerRegistry

    @abstractmethod
    def variable_for(self, name: str, local: Variable) -> Variable:
        """Returns the center variable of a name; the first call creates it from ``local``.

        Raises:
            ValueError: it has another shape or dtype.
        """

    @abstractmethod
    def join(self, optimizer: Optimizer) -> None:
        """Registers an optimizer; the first one defines the rule.

        Raises:
            ValueError: an optimizer of another class, or with other slots or masters.
        """

    @abstractmethod
    def slot(self, variable: Variable, name: str) -> Variable | None:
        """Returns a slot of a center variable, or None."""

    @abstractmethod
    def slot_variables(self) -> list[Variable]:
        """Returns every slot of every center variable."""

    @abstractmethod
    def prepare(
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        of: Sequence[Variable],
        config: PushConfig,
    ) -> None:
        """Compiles the kernels of a push and creates the slots of center variables.

        Args:
            optimizer: of the worker, which has joined.
            variables: of the worker.
            of: those of the variables that are pushed.
            config: settings of the push.

        Raises:
            KeyError: a variable that the worker's getter did not create.
        """

    @abstractmethod
    def written_by_push(self, variables: WorkerVariables) -> list[Buffer]:
        """Returns memory of this process that a push writes besides the worker's variables."""

    @abstractmethod
    def push_scope(self) -> AbstractContextManager[None]:
        """Returns a context manager for a local step and the push that belongs to it.

        It defers Ctrl-C, so that both are made or none, unless a push waits for another process.
        """

    @abstractmethod
    def push(
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        config: PushConfig,
        scalars: Scalars,
        then: Callable[[], None],
    ) -> None:
        """Updates the center by ``variables.sums``, and pulls: one push.

        A failure before the center has changed leaves everything unchanged; the worker then calls
        this again with the same sums.

        Args:
            optimizer: of the worker; its slots exist.
            variables: of the worker; those that have sums get the center's values, and so do their
                masters.
            config: settings of the push.
            scalars: of the rule.
            then: called at the end, while Ctrl-C is deferred; replaces the sums and records what
                was pulled.
        """

    @abstractmethod
    def pull(
        self, optimizer: Optimizer, variables: WorkerVariables, then: Callable[[], None]
    ) -> None:
        """Copies the center to a worker's variables and masters.

        Args:
            optimizer: of the worker.
            variables: of the worker; all are overwritten.
            then: called at the end, while Ctrl-C is deferred; clears the sums and records what was
                pulled.
        """
