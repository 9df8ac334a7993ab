"""Actors of ``gradreduce.ray`` that run each call at once, so that clients need no Ray.

The modules are those of ``actor_world.load``, whose classes are the clients. A call has ended when
``remote`` returns. Arguments and answers are copied, as between processes.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray_actors.actor_world import Exited, RayActorError, RayTaskError


class Actors:
    """Actors by name.

    Attributes:
        on_answer: called with the name of the method before a client gets an answer. If it returns
            True, the answer is lost, and the client asks again.
    """

    def __init__(self, modules: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
        self.on_answer: Callable[[str], bool] = lambda method: False
        self._modules, self._loop = modules, asyncio.new_event_loop()
        self._instances: dict[str, Any] = {}
        self._made: dict[str, Callable[[], Any]] = {}
        ray = modules.client.ray
        patch.setattr(ray, "get", self._get)
        patch.setattr(ray, "ObjectRef", type("ObjectRef", (), {}), raising=False)
        patch.setattr(modules.cluster, "init", lambda: None)
        patch.setattr(modules.cluster, "check_usable", lambda: None)
        for module in (modules.client, modules.coordinator):
            patch.setattr(module, "start_shard", self._start)

    def restart(self) -> None:
        """Replaces all actors by new ones, which load their snapshots."""
        for name, make in self._made.items():
            self._instances[name] = make()

    def close(self) -> None:
        """Ends calls for whose answers nobody has waited."""
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _start(self, settings: Any, make_state: Callable[[Any], Any]) -> Any:
        name = settings.actor_name
        if name not in self._instances:
            of_shard, of_first = self._modules.shard.Shard, self._modules.coordinator.Coordinator
            self._made[name] = partial(
                of_shard if settings.shard else of_first, settings, make_state
            )
            self._instances[name] = self._made[name]()
        return _Handle(self, name)

    def call(self, name: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Calls a method; returns what ``ray.get`` of a client, or ``await`` of an actor, takes."""
        answer = self._run(name, method, copy.deepcopy(arguments))
        if self._loop.is_running():  # another actor calls
            return self._loop.create_task(answer)
        try:
            found = copy.deepcopy(self._loop.run_until_complete(answer))
        except (RayTaskError, RayActorError) as error:
            found = error
        if self.on_answer(method):
            return RayTaskError(self._modules.shard.RetryError())
        return found

    async def _run(self, name: str, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return await getattr(self._instances[name], method)(*arguments)
        except Exited:
            del self._instances[name], self._made[name]
            raise RayActorError("INTENDED_USER_EXIT") from None
        except Exception as error:
            raise RayTaskError(error) from None

    @staticmethod
    def _get(reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference


class _Handle:
    """Calls an actor: ``handle.method.remote(...)``."""

    def __init__(self, actors: Actors, name: str) -> None:
        self._of_call = actors, name

    def __getattr__(self, method: str) -> Any:
        actors, name = self._of_call

        def remote(*arguments: Any) -> Any:
            return actors.call(name, method, arguments)

        once = SimpleNamespace(remote=remote)
        return SimpleNamespace(remote=remote, options=lambda max_task_retries: once)
