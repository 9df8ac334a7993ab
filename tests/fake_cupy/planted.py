"""What is planted in our own source to see the fake find it, and by which words it must say so."""

from __future__ import annotations

from dataclasses import dataclass

from .planted_lines import LINES

__all__ = ["FAULTS", "Planted"]

BASE = "gradreduce.device.base"
CUDA = "gradreduce.device.cuda"
GPU = "gradreduce.device.cuda_gpu"
NCCL = "gradreduce.device.cuda_nccl"
GRAPHS = "gradreduce.device.cuda_capture"
LINE = "gradreduce.device.cuda_line"
QUEUES = "gradreduce.device.cuda_queues"
CAPTURE = "gradreduce.device.capture"
TABLES = "gradreduce.device.tables"
COMPILE = "gradreduce.device.cuda_compile"
PARKING = "gradreduce.device.parking"
COLOCATED = "gradreduce.device.colocated"
HIERARCHICAL = "gradreduce.allreduce.hierarchical"
FOLD = "gradreduce.allreduce.nccl"


@dataclass(frozen=True)
class Planted:
    """One fault.

    Attributes:
        says: words of the machine's message.
        changes: module or kernel, the text there, what it becomes.
        hangs: whether it shows where a queue is stuck (``hang``), not in random programs.
        lends: whether it shows where callers overwrite and drop arrays (``lending``).
    """

    says: str
    changes: tuple[tuple[str, str, str], ...]
    hangs: bool = False
    lends: bool = False


def _change(where: str, old: str, new: str = "pass") -> tuple[str, str, str]:
    return where, old, new


def _one(says: str, where: str, old: str, new: str = "pass") -> Planted:
    return Planted(says, ((where, old, new),))


_FENCES = {
    "a copy waits for neither end": _one(
        "unordered", BASE, 'self.wait(end.device.mark("compute"), queue=queue)'
    ),
    "a copy waits for its source only": _one(
        "unordered", BASE, "for end in (src, dst):", "for end in (src,):"
    ),
    "a copy waits for its destination only": _one(
        "unordered", BASE, "for end in (src, dst):", "for end in (dst,):"
    ),
    "a copy's reading is not marked": _one(
        "unordered", BASE, "(self.fabric.capture or src.block).is_read(self.mark(queue), src)"
    ),
    "a writer does not wait for readers": _one(
        "unordered", BASE, "for mark in kept.readers_of(operand):", "for mark in ():"
    ),
    "a release does not wait for readers": _one(
        "unordered", BASE, 'self._before_write(buffer, "compute")  # whoever', "pass  # whoever"
    ),
    "an upload beside compute has no fence": _one(
        "unordered", BASE, 'self.wait(self.mark("compute"), queue=queue)'
    ),
    "an array is adopted without its stream": _one(
        "unordered", CUDA, 'self._ready("compute").wait_event(self._event(self._theirs(stream)))'
    ),
    "an array is released without its stream": _one(
        "unordered", CUDA, 'self._theirs(stream).wait_event(self._mark("compute"))'
    ),
    "a wait is forgotten": _one("unordered", LINE, "    stream.wait_event(event)", "    pass"),
    "a device table on transfer has no fence": _one(
        "unordered", CUDA, 'self.wait(self.mark("compute"), queue=queue)'
    ),
    "a leader does not gather": _one("unordered", COLOCATED, "leader.wait(mark, queue=queue)"),
    "a leader does not scatter": _one("unordered", COLOCATED, "other.wait(mark)"),
    "direct sums do not gather": _one(
        "unordered", HIERARCHICAL, "    gather_all(working, devices, queue)\n", "    pass\n"
    ),
    "direct sums do not scatter": _one(
        "unordered", HIERARCHICAL, "        scatter(leader, devices, queue)\n", "        pass\n"
    ),
    "folds do not gather": _one("unordered", FOLD, "    gather(leader, sharing)\n", "    pass\n"),
    "finished sums do not scatter": _one(
        "unordered", FOLD, "    scatter(leader, devices)", "    pass"
    ),
}
_LINES = {name: _one(*fault) for name, fault in LINES.items()}
_LIVES = {
    "a dead block is not parked": _one(
        "unordered", PARKING, "if all(home._passed(mark) for mark in marks):", "if True:"
    ),
    "a dead adopted array is not held for compute": _one(
        "unordered",
        PARKING,
        'users if dead.owned else [*users, (home, "compute")]',
        "users",
    ),
    "an adopted array's death is not seen": _one(
        "unordered", CUDA, "TrackedBlock(self, array,", "Block(self, array,"
    ),
    "a launch forgets what it touched": _one(
        "unordered",
        BASE,
        "operand.block.touched.add((self, queue))",
        "(self, queue)",
    ),
    "a copy forgets what it touched": _one(
        "unordered", BASE, "end.block.touched.add((self, queue))"
    ),
    "an upload forgets what it touched": _one(
        "unordered", BASE, "buffer.block.touched.add((self, queue))"
    ),
    "a device table forgets who touched it": _one(
        "unordered", CUDA, "table.held.block.touched.add((self, queue))"
    ),
    "a device table is not held": _one(
        "", TABLES, "made, num_chunks, held, made.ctypes.data", "made, num_chunks, None, 0"
    ),
    "pinned memory is not kept": _one(
        "the host", CUDA, "self._staging.append((pinned, self._event(stream)))"
    ),
    "pinned memory is not kept long enough": _one(
        "the host",
        CUDA,
        "while self._staging and self._staging[0][1].done:",
        "while self._staging:",
    ),
    "memory is taken in another stream's order": _one(
        "unordered", CUDA, 'with self.gpu, self._streams["compute"]:', "with self.gpu:"
    ),
    "half the memory": _one(
        "out of bounds", CUDA, "malloc(max(1, nbytes))", "malloc(max(1, nbytes // 2))"
    ),
    "a fill of one byte too many": _one(
        "out of bounds", CUDA, "buffer.address, 0, buffer.nbytes,",
        "buffer.address, 0, buffer.nbytes + 1,",
    ),
    "a released array does not hold its block": _one(
        "", CUDA, "buffer.nbytes, buffer.block, self", "buffer.nbytes, None, self"
    ),
    "a mesh closes without waiting": _one(
        "", CUDA, "self._synchronize(Patience(self))\n                self.drain()", "self.drain()"
    ),
    "synchronize does not wait": _one(
        "the host", CUDA, "            stream.synchronize()\n            return True",
        "            pass\n            return True",
    ),
}  # fmt: skip
_DEVICES = {
    "a launch on whatever device is current": _one(
        "wrong device", CUDA, "with self.gpu:\n                entry",
        "if True:\n                entry",
    ),
    "a fill on whatever device is current": _one(
        "wrong device", CUDA, "with self.gpu:\n            runtime.memset",
        "if True:\n            runtime.memset",
    ),
    "an upload on whatever device is current": _one(
        "wrong device", CUDA, "= self._ready(queue)\n        with self.gpu:\n            pinned",
        "= self._ready(queue)\n        if True:\n            pinned",
    ),
    "a copy on whatever device is current": _one(
        "wrong device", CUDA, "with self.gpu:\n            if dst", "if True:\n            if dst"
    ),
    "a mark on whatever device is current": _one(
        "wrong device", LINE, "with gpu:\n        event", "if True:\n        event"
    ),
    "a function of another GPU": _one(
        "wrong device", COMPILE, "key = (kernel, template, ordinal)",
        "key = (kernel, template, 0)",
    ),
    "an event never recorded": _one("never recorded", LINE, "event.record(stream)"),
    "a blocking stream": _one(
        "blocking", LINE, "cupy.cuda.Stream(non_blocking=True)", "cupy.cuda.Stream()"
    ),
    "peer access is not enabled": _one(
        "no peer access", GPU, "runtime.deviceEnablePeerAccess(there)"
    ),
    "peer access is taken for granted": _one(
        "no peer access", "gradreduce.device.fabric",
        "return (physical, other) in self.peer_access", "return True",
    ),
    "a copy between GPUs as one inside": _one(
        "memcpyPeerAsync", CUDA, "if dst.device.physical == src.device.physical:", "if True:"
    ),
    "a copy from the wrong GPU": _one(
        "not of GPUs", CUDA, "src.address, src.device.physical,", "src.address, self.physical,"
    ),
}  # fmt: skip
_KERNELS = {
    "a scalar is left out": _one("takes", CUDA, "arguments, stream=", "arguments[:-1], stream="),
    "a scalar too many": _one("takes", CUDA, "arguments, stream=", "(*arguments, 0), stream="),
    "an integer too short": _one("wants i8", CUDA, '"int64": np.int64', '"int64": np.int32'),
    "a float too short": _one("wants f8", CUDA, '"float64": np.float64', '"float64": np.float32'),
    "a float for an integer": _one("wants i8", CUDA, '"int64": np.int64', '"int64": np.float64'),
    "a struct of other fields": _one(
        "struct layout", "gradreduce.device.table",
        '("num_rows", np.int64),\n        ("row_words", np.int64),',
        '("row_words", np.int64),\n        ("num_rows", np.int64),',
    ),
    "a struct too short": _one(
        "wants s", "gradreduce.device.table", "INLINE_WORDS = 448", "INLINE_WORDS = 440"
    ),
    "a write that is not declared": _one(
        "undeclared", "gradreduce.ops.all_sum", 'writes="num_outs"', "writes=1"
    ),
    "fused multiply-add": _one("-fmad=false", COMPILE, ' "-fmad=false")', ")"),
    "a table of the wrong size": _one(
        "", TABLES, "key = (chunk_size, len(rows), looked.tobytes())",
        "key = (chunk_size, len(rows), b'')",
    ),
    "an element too many": _one(
        "", "kernels/common.cuh", "i < end; i += blockDim.x) body.template at<1>(i);",
        "i < end + 1; i += blockDim.x) body.template at<1>(i);",
    ),
    "an element read too many": _one(
        "reads", "kernels/add_n.cu", "store(out, i, total);",
        "store(out, i, total); (void)*(const volatile In*)(in[0] + i + 1);",
    ),
    "an update writes its gradient": Planted("undeclared", ((
        "kernels/rules.cuh", "this->template by<LANES>(i, load<",
        "store((T*)grad, i, Lanes<T, LANES>()); this->template by<LANES>(i, load<",
    ),), lends=True),
}  # fmt: skip
_NCCL = {
    "no group": Planted("outside a group", (
        (NCCL, 'self._run("groupStart", self._nccl.groupStart)', "pass"),
        (NCCL, 'self._run("groupEnd", self._nccl.groupEnd)', "pass"),
    )),
    "a group that does not end": _one(
        "group", NCCL, 'self._run("groupEnd", self._nccl.groupEnd)'
    ),
    "communicators made inside a group": Planted("inside a group", (
        (NCCL, "                self._make_clique(cliques, call.physicals)\n",
         "                pass\n"),
        (NCCL, "self._call(call, cliques.made[call.physicals])",
         "self._make_clique(cliques, call.physicals)\n                    "
         "self._call(call, cliques.made[call.physicals])"),
    )),
    "a rank is left out": _one(
        "left out", NCCL, "            with device.gpu:\n",
        "            if buffer is call.buffers[-1] and len(call.buffers) > 1:\n"
        "                break\n            with device.gpu:\n",
    ),
    "unequal counts": _one(
        "disagree", NCCL, "buffer.address, count, kind, number)",
        "buffer.address, count - (buffer is buffers[-1]), kind, number)",
    ),
    "unequal dtypes": _one(
        "disagree", NCCL, "buffer.address, count, kind, number)",
        "buffer.address, count, kind - (buffer is buffers[-1]), number)",
    ),
    "unequal roots": _one(
        "disagree", NCCL, "count, kind, root)", "count, kind, root * (buffer is buffers[-1]))"
    ),
    "the stream of another GPU": _one(
        "NCCL", NCCL, "device._ready(call.queue).ptr",
        "cuda_device(call.buffers[0])._ready(call.queue).ptr",
    ),
    "the other stream": _one(
        "unordered", NCCL, "device._ready(call.queue).ptr", 'device._ready("transfer").ptr'
    ),
    "the count of bytes": _one(
        "", NCCL, "return buffer.size * element.lanes,", "return buffer.nbytes * element.lanes,"
    ),
}  # fmt: skip
_CAPTURES = {
    "a capture does not fork": _one("capture", GRAPHS, "stream.wait_event(begun)"),
    "a capture does not join": _one("Unjoined", GRAPHS, "self._origin.wait_event(ended)"),
    "a capture waits for an old mark": _one(
        "from outside",
        "gradreduce.device.captures",
        "return capture.waits_for(mark)",
        "return True",
    ),
    "a capture forbids other threads nothing": _one(
        "mode", GRAPHS, "runtime.streamCaptureModeThreadLocal", "2"
    ),
    "a capture records nothing": _one("", QUEUES, "if capture is None:", "if True:"),
    "a captured copy between GPUs": _one(
        "memcpyPeerAsync", CUDA, "elif self.fabric.capture is not None:", "elif False:"
    ),
    "a graph on a stream of its own": _one(
        "unordered", GRAPHS, "graph.launch(self._home.ready())", "graph.launch(self._origin)"
    ),
    "a graph waits for its first device only": _one(
        "unordered", CAPTURE, "            gather(leader, others)", "            pass"
    ),
    "only its first device waits for a graph": _one(
        "unordered", CAPTURE, "            scatter(leader, others)", "            pass"
    ),
    "a graph does not wait for readers": _one("unordered", CAPTURE, "behind_readers(self._spans)"),
}
_NCCL["use after abort"] = Planted("after abort", (
    (NCCL, "cliques, self._cliques = self._cliques, _Cliques()", "cliques = self._cliques"),
    (NCCL, "cliques.aborted = True", "pass"),
    (NCCL, "given, kept)", "given, kept)\n        self.close()"),
))  # fmt: skip
_FABRIC = "gradreduce.device.fabric"
_WATCH = "gradreduce.device.watch"
_DOG = "gradreduce.device.watchdog"
_HANGS = {
    "no abort": ("not aborted", NCCL, "fabric.on_death.append(self._abort)"),
    "one communicator is aborted": (
        "not aborted", NCCL, "for communicator in communicators:\n                with",
        "for communicator in communicators[:1]:\n                with",
    ),
    "aborted ones are used again": (
        "after abort", NCCL, "cliques, self._cliques = self._cliques, _Cliques()\n        "
        "cliques.aborted = True", "cliques = self._cliques",
    ),
    "a download waits in the driver": (
        "would hang", CUDA, "if patience.polls:\n            return self._fetched", "if False:\n"
        "            return self._fetched",
    ),
    "a synchronize waits in the driver": (
        "", CUDA, "if not patience.polls:\n            with self.gpu:", "if True:\n"
        "            with self.gpu:",
    ),
    "pinned memory is dropped with the wait": (
        "unordered", CUDA, "self._staging.append((pinned, event))"
    ),
    "what an abort lets go on is believed": (
        "was used", BASE, "if host is None or self.fabric.has_died(generation):", "if host is None:"
    ),
    "a synchronize believes it too": (
        "was used", BASE, "if not self._synchronize(patience) or self.fabric.has_died(generation):",
        "if not self._synchronize(patience):",
    ),
    "a dead mesh is used": ("was used", _FABRIC, "raise self._death(self.reason)"),
    "the last line is looked at first": (
        "have joined batch_reduce", _WATCH, "enumerate(list(self._stages))",
        "reversed(list(enumerate(self._stages)))",
    ),
    "a dead mesh frees memory": ("would hang", CUDA, "fabric.on_death.append(self._hold)"),
    "a reset waits for no queue": (
        "would hang", CUDA, "while not self._is_idle():", "while False:"
    ),
}  # fmt: skip
_HANGING = {
    name: Planted(says, (_change(*change),), hangs=True) for name, (says, *change) in _HANGS.items()
}
_CALL = "gradreduce.one_call"
_GPU_DOOR = "gradreduce.interop_gpu"
_BORDER = "gradreduce.interop_streams"
_LENDS = {
    "a call does not hand back what came in": (_CALL, "precede(device, stream)"),
    "a value made earlier is not handed back": (
        _GPU_DOOR, "came_in(device, stream)\n            if", "if"
    ),
    "an array that comes in is not handed back": (
        _GPU_DOOR, "came_in(home, stream)\n        stream", "pass\n        stream"
    ),
    "a copy elsewhere is no reader": (
        COLOCATED, "if src.device is not device and (not", "if False and (not"
    ),
    "the caller's own code shares the fences of a call": (
        _CALL, "self._scope.fenced.clear()"
    ),
    "a prepared step does not hand back": (
        _BORDER, "(*takers, *self._lenders)", "takers"
    ),
    "a result forgets who was shown it": (_GPU_DOOR, "buffer.block.is_shown(taker)"),
    "a result does not hold its stream": (
        _GPU_DOOR, "buffer.block.is_shown(taker)", "buffer.block.is_shown(handle)"
    ),
    "a stream is behind all that died before": (
        PARKING, 'bool(getattr(user, "ptr", user) == stream)', "True"
    ),
}  # fmt: skip
_ROWS = "gradreduce.accumulator.sparse_sums"
_LENDS |= {
    "sparse sums do not gather": (_ROWS, "        gather(devices[0], devices)\n        add()",
                                  "        add()"),
    "sparse sums do not scatter": (_ROWS, "        add()\n        scatter(devices[0], devices)",
                                   "        add()"),
    "a sparse sum grows without a fence": (
        _ROWS, "        gather(devices[0], devices)\n        ops.pack(", "        ops.pack("
    ),
}  # fmt: skip
_LENDING = {name: Planted("", (_change(*change),), lends=True) for name, change in _LENDS.items()}
FAULTS: dict[str, Planted] = {
    **_FENCES, **_LINES, **_LIVES, **_DEVICES, **_KERNELS, **_NCCL, **_HANGING, **_CAPTURES,
    **_LENDING,
}  # fmt: skip
