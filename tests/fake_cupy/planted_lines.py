"""Faults in what leaves fences out (``cuda_line.py``), and in who may have memory again."""

from __future__ import annotations

__all__ = ["LINES"]

CUDA = "gradreduce.device.cuda"
LINE = "gradreduce.device.cuda_line"
PARKING = "gradreduce.device.parking"

# What is planted -> words of the machine's message, module, the text there, what it becomes.
LINES: dict[str, tuple[str, ...]] = {
    "an old wait is taken for a new one": (
        "unordered",
        LINE,
        "if self._behind.get(other) is event:",
        "if other in self._behind:",
    ),
    "an old end is taken for a new one": (
        "unordered",
        LINE,
        "if last is not end or self.shown:",
        "if event is None:",
    ),
    "a launch is not noticed": (
        "unordered",
        CUDA,
        "            self._given(queue)\n\n        return issue",
        "\n        return issue",
    ),
    "a wait is not noticed": (
        "unordered",
        LINE,
        "self._behind[other] = event\n        self.given()",
        "self._behind[other] = event",
    ),
    "catching up is not noticed": (
        "unordered",
        LINE,
        "self._behind[leader] = event\n                self.given()",
        "self._behind[leader] = event",
    ),
    "an upload is not noticed": (
        "unordered",
        CUDA,
        "self._staging.popleft()\n        self._given(queue)",
        "self._staging.popleft()",
    ),
    "an adopted stream is not noticed": (
        "unordered",
        CUDA,
        'self._event(self._theirs(stream)))\n        self._given("compute")',
        "self._event(self._theirs(stream)))",
    ),
    "new memory is not noticed": (
        "unordered",
        CUDA,
        'self._given("compute")  # memory',
        "pass  # memory",
    ),
    "a leader is not trailed": (
        "unordered",
        LINE,
        "                self.leader = leader",
        "                pass",
    ),
    "a dead block goes to who does not know its users": (
        "unordered",
        PARKING,
        "all(home._comes_behind(*user) for user in users)",
        "True",
    ),
    "a dead block of whom the pool does not know goes there": (
        "unordered",
        PARKING,
        "if users and home._is_led:",
        "if False:",
    ),
    "a block's next owner does not know who used it": (
        "unordered",
        CUDA,
        "block.touched |= dead.touched",
    ),
    "who trails a leader never catches up": (
        "unordered",
        LINE,
        "self._catch_up()\n        return self.stream",
        "pass\n        return self.stream",
    ),
}
