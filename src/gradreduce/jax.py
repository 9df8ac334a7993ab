"""``all_reduce`` of JAX's pytrees, outside ``jax.jit``.

Use it as ``gr.jax``, which imports JAX. ``import gradreduce`` does not import JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal, get_args

import jax

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import check_traced
from gradreduce.arrays.distributed import Mirrored, PerReplica, ReduceOp
from gradreduce.arrays.types import OutputType
from gradreduce.backends import default_mesh
from gradreduce.device import DType, Mesh
from gradreduce.errors import DeviceMismatchError, about, brief, listed
from gradreduce.ops import NUM_WORDS
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.reduce.arguments import check_op, validate_mesh
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.reduce.nests import key_of
from gradreduce.reduce.presets import default_ops

__all__ = ["all_reduce"]

Replicated = Literal["each", "once"]


def all_reduce(  # noqa: PLR0913  # options of one call
    grads: Any,
    op: ReduceOp = ReduceOp.MEAN,
    *,
    mesh: Mesh | None = None,
    cross_device_ops: CrossDeviceOps | None = None,
    wire_dtype: str | DType | None = None,
    replicated: Replicated = "each",
    weights: Sequence[float] | None = None,
    exact: bool = False,
    words: int = NUM_WORDS,
    deadline: float | None = None,
) -> Any:
    """Reduces the gradients of several devices outside ``jax.jit``, like ``jax.lax.pmean``.

    The mean, or sum, is over the replicas of all devices and processes of the mesh. Every shard of
    a sharded array is the gradient of one replica, and is replaced by the mean of all shards. This
    is the result of ``jax.shard_map(lambda x: jax.lax.pmean(x, axes), in_specs=spec,
    out_specs=spec)``, where ``spec`` is the array's own and ``axes`` are all axes of its JAX mesh.
    It fits the results of ``jax.pmap``, whose rows are the shards, and arrays that
    JAX regards as replicated although their copies differ::

        grads = jax.pmap(jax.grad(loss))(params, x, y)  # a row for each device
        grads = gr.jax.all_reduce(grads)  # every row is the mean
        updates, state = optimizer.update(grads, state)  # of optax

    Example: see ``examples/train_jax.py``.

    On the CPU, the host waits for JAX and for the reduction, and the shards of a result share
    memory. On GPUs the host does not wait. Arrays are only read.

    Args:
        grads: one of these:

            - A pytree of arrays that have a shard on every device of this process. The shards, in
              the order of the ids of their JAX devices, belong to the devices of the mesh. Of an
              array over several processes, each process reads its own shards.
            - A list or tuple with a pytree for each device of the mesh, all with the same
              structure. The arrays of each pytree are on a JAX device of its own; pytrees of
              devices that share a physical device may share it. Arrays that are not committed to a
              device are moved there.
            - If the mesh has one device in this process, a pytree of arrays on one device.

            A pytree without arrays is returned unchanged. None in a pytree is kept.
        op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``; see ``CrossDeviceOps.batch_reduce``.
        mesh: the mesh of the devices and processes; for arrays on JAX's CPU devices, a mesh of
            simulated devices. Default: the mesh of ``cross_device_ops``, otherwise
            ``gr.default_mesh()``.
        cross_device_ops: for example ``gr.AllReduceCrossDeviceOps(wire_dtype="bfloat16")``.
            Default: an all-reduce by NCCL, in one pack.
        wire_dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``: the dtype in which floats are
            transferred; see ``gr.AllReduceCrossDeviceOps``. Instead of ``cross_device_ops``.
        replicated: what the copies are of an array that JAX regards as replicated over all its
            devices. ``"each"``: each copy is the gradient of one replica, as for other shards.
            ``"once"``: the copies are equal, as in the results of ``jax.jit`` for sharded batches,
            and are one gradient, so that SUM adds it once. This makes no difference for MEAN, or
            for a list of pytrees.
        weights: for each device of the mesh in this process the weight of its gradients, such as
            the number of its examples; see ``CrossDeviceOps.batch_reduce``. Not for a SUM with
            ``"once"``.
        exact: add the terms as real numbers and round their sum once, so that neither their order
            nor their number changes a bit; see ``gr.AllReduceCrossDeviceOps`` and
            docs/same_bits.md. Instead of ``cross_device_ops``.
        words: see ``gr.AllReduceCrossDeviceOps``.
        deadline: seconds from now; if the devices are not done by then, the mesh fails.

    Returns:
        A pytree of the same structure with new arrays of the same shapes and shardings, committed
        to their devices and not weakly typed. Dtypes are the same, except that means of integers
        are floats.

    Raises:
        TypeError: a leaf is not a ``jax.Array``, JAX is tracing it (inside ``jax.jit``, ``grad``,
            ``vmap`` or ``shard_map``), or its dtype cannot be added. This and the next two errors
            name the path of the array in ``grads``.
        ValueError: pytrees have different structures; arrays differ in shape or dtype; an array was
            deleted or donated, has another number of shards than the mesh has devices, or is
            replicated over some of its devices; ``mesh`` is not that of ``cross_device_ops``;
            ``wire_dtype`` or ``replicated`` is unknown; ``wire_dtype``, ``exact`` or ``words`` is
            passed together with ``cross_device_ops``; or weights are wrong.
        DeviceMismatchError: (a ``ValueError``) arrays are on other devices than the mesh.
    """
    check_op("op", op)
    if not isinstance(replicated, str) or replicated not in get_args(Replicated):
        raise ValueError(f"replicated={brief(replicated)} is not one of {get_args(Replicated)}")
    if weights is not None and op is ReduceOp.SUM and replicated == "once":
        raise ValueError("weights cannot be combined with a SUM of replicated='once'")
    ops, mesh = _select_ops(
        cross_device_ops, {"wire_dtype": wire_dtype, "exact": exact, "words": words}, mesh
    )
    mesh.mesh_state.check_process()
    leaves, treedef = jax.tree_util.tree_flatten(grads)
    if not leaves:
        return grads
    paths = _paths(grads)
    _for_each(lambda leaf: _check_array(leaf, mesh), paths, leaves)
    form: type[PerReplica]
    if len(mesh) > 1 and all([len(leaf.sharding.device_set) == 1 for leaf in leaves]):
        rows = _rows(grads, mesh)
        form, paths, columns = PerReplica, _paths(grads[0]), list(zip(*rows, strict=True))
        leaves, places = list(chain(*rows)), [[replica] for replica in range(len(mesh))]
    else:
        form, columns = _Shards, _for_each(lambda leaf: _shards(leaf, mesh), paths, leaves)
        places = [list(range(len(mesh)))]
        if op is ReduceOp.SUM and replicated == "once":
            is_exact = isinstance(ops, AllReduceCrossDeviceOps) and ops.exact
            columns = [
                _once(*each, mesh, negative_zeros=is_exact)
                for each in zip(leaves, columns, strict=True)
            ]
    with StreamScope():
        values = form.of_grads(columns, [(path, str(path)) for path in paths], mesh)
        kind: OutputType = "numpy" if mesh.mesh_state.shares_host_memory else "jax"
        pairs = [(value, value) for value in values]
        reduced = ops.batch_reduce(op, pairs, output_type=kind, weights=weights, deadline=deadline)
        sources = [(value, place) for place in places for value in reduced]
        results = [_like(*each) for each in zip(leaves, sources, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, results)


def _select_ops(
    cross_device_ops: CrossDeviceOps | None, options: dict[str, Any], mesh: Mesh | None
) -> tuple[CrossDeviceOps, Mesh]:
    """Returns what reduces, and the mesh; see the arguments of ``all_reduce``."""
    usual = {"wire_dtype": None, "exact": False, "words": NUM_WORDS}
    changed = {name: value for name, value in options.items() if value != usual[name]}
    if cross_device_ops is not None:
        for name, value in changed.items():
            raise ValueError(
                f"{name}={brief(value)} cannot be combined with cross_device_ops: pass it to that "
                "object"
            )
        ops = cross_device_ops
    else:
        ops = AllReduceCrossDeviceOps(**changed) if changed else default_ops()
    if not isinstance(ops, CrossDeviceOps):
        raise ValueError(f"cross_device_ops={brief(ops)} must be a CrossDeviceOps")
    mesh = validate_mesh(mesh) or ops.mesh or default_mesh()
    if ops.mesh not in (None, mesh):
        raise ValueError(
            f"mesh={mesh} is not the mesh of cross_device_ops, {ops.mesh}: pass one of the two"
        )
    return ops, mesh


class _Shards(PerReplica):
    """The shards of one array, as replicas."""

    def _name_of(self, index: int, replica: int | None = None, of: str = "grads") -> str:
        return f"{of}{_bracket(self._key)}"


def _paths(tree: Any) -> list[str | int]:
    """Returns the path of each leaf, such as ``"dense.kernel"``; in a list, its index."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [key_of([_part(key) for key in path]) for path, _ in found]


def _part(key: Any) -> Any:
    """Converts a key of a JAX path to a dict key, index or attribute name."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _bracket(path: str | int | None) -> str:
    """Formats a path as an index; empty if ``grads`` is a single array."""
    return "" if path == "" else f"[{path!r}]"


def _for_each(
    call: Callable[[Any], Any], paths: Sequence[str | int], leaves: Sequence[Any]
) -> list[Any]:
    """Calls a function with each leaf; errors begin with its path."""
    results = []
    for path, leaf in zip(paths, leaves, strict=True):
        try:
            results.append(call(leaf))
        except (TypeError, ValueError) as error:
            raise about(f"grads{_bracket(path)}", error) from None
    return results


def _check_array(leaf: Any, mesh: Mesh) -> None:
    """Raises unless a leaf is an array with values, on devices of the mesh's kind."""
    check_traced(leaf)
    if not isinstance(leaf, jax.Array):
        raise TypeError(f"{type(leaf).__name__} is not a jax.Array: pass jax.numpy.asarray of it")
    if leaf.is_deleted():
        raise ValueError("the JAX array was deleted or donated: pass it before that")
    device = next(iter(leaf.sharding.device_set))
    if (device.platform == "cpu") != mesh.mesh_state.shares_host_memory:
        raise DeviceMismatchError(
            f"the array is on {device}, but {mesh} has other devices: open one with "
            f"backend={'sim' if device.platform == 'cpu' else 'cuda'!r}"
        )


def _shards(leaf: Any, mesh: Mesh) -> list[Any]:
    """Returns the shards of an array, in the order of their JAX devices.

    Raises:
        ValueError: the shards are not one replica for each device of the mesh.
    """
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
    if len(shards) != len(mesh):
        raise ValueError(
            f"the array has {len(shards)} shard(s) in this process, but {mesh} has {len(mesh)} "
            f"device(s): pass mesh=gr.open_mesh({len(shards)}, backend={mesh.backend!r}), or "
            "arrays with a shard on each device"
        )
    count = len(leaf.sharding.device_set)
    if not leaf.is_fully_addressable and count != mesh.num_replicas:
        raise ValueError(
            f"the array has {count} shards in all processes, but {mesh} has {mesh.num_replicas} "
            "replicas: pass mesh=gr.open_mesh(processes=...) over the processes of JAX"
        )
    parts = [shard.data for shard in shards]
    if not leaf.is_fully_replicated and parts[0].size * count != leaf.size:
        raise ValueError(
            "the array is replicated over some of its devices, but not over all "
            f"({leaf.sharding}): use jax.lax.pmean over that axis in jax.shard_map"
        )
    return parts


def _once(leaf: Any, parts: Sequence[Any], mesh: Mesh, *, negative_zeros: bool) -> tuple[Any, ...]:
    """Replaces all copies of a replicated array but the first by zeros; they are added.

    Args:
        leaf: the array.
        parts: its copies in this process.
        mesh: the mesh.
        negative_zeros: make zeros of -0.0, which change no exact sum.
    """
    if not leaf.is_fully_replicated:
        return tuple(parts)
    # An array of all processes has its first copy in process 0.
    has_first = leaf.is_fully_addressable or mesh.process_index == 0
    kept = tuple(parts[:1] if has_first else ())
    zeros = [
        jax.numpy.zeros(part.shape, part.dtype, device=next(iter(part.sharding.device_set)))
        for part in parts[len(kept) :]
    ]
    return (*kept, *[-each if negative_zeros else each for each in zeros])


def _rows(grads: Any, mesh: Mesh) -> list[list[Any]]:
    """Returns the arrays of each tree, all on the tree's own JAX device."""
    if type(grads) not in (list, tuple) or len(grads) != len(mesh):
        size = f"of {len(grads)} entries" if isinstance(grads, list | tuple) else "of arrays"
        raise ValueError(
            f"grads is a {type(grads).__name__} {size} that are each on one JAX device; pass a "
            f"list with one pytree for each of {len(mesh)} devices of {mesh}, or sharded arrays"
        )
    trees = [jax.tree_util.tree_flatten(tree) for tree in grads]
    for replica, (_, treedef) in enumerate(trees):
        if treedef != trees[0][1]:
            raise ValueError(_difference(grads, replica))
    homes = [_home(grads, replica, row) for replica, (row, _) in enumerate(trees)]
    pairs = {(device.physical, home) for device, home in zip(mesh, homes, strict=True)}
    if len(pairs) > len(set(homes)):
        raise DeviceMismatchError(
            f"the trees of grads are on {listed(homes)}, but {mesh} has other physical devices: "
            "put each tree on a JAX device of its own, or open the mesh with devices that share one"
        )
    return [
        [leaf if leaf.sharding.device_set == {home} else jax.device_put(leaf, home) for leaf in row]
        for home, (row, _) in zip(homes, trees, strict=True)
    ]


def _home(grads: Sequence[Any], replica: int, row: Sequence[Any]) -> Any:
    """Returns the JAX device of a tree. Uncommitted arrays count only if all are uncommitted."""
    placed = [(index, leaf) for index, leaf in enumerate(row) if getattr(leaf, "committed", True)]
    index_of_device = {
        next(iter(leaf.sharding.device_set)): index for index, leaf in placed or enumerate(row)
    }
    if len(index_of_device) > 1:
        paths = _paths(grads[replica])
        where = listed(f"{paths[index]!r} on {home}" for home, index in index_of_device.items())
        raise DeviceMismatchError(
            f"grads[{replica}] is on several JAX devices ({where}): put all of it on one"
        )
    return next(iter(index_of_device))


def _difference(grads: Sequence[Any], replica: int) -> str:
    """Returns a message about how the tree of a replica differs from the first."""
    mine, first = _paths(grads[replica]), _paths(grads[0])
    missing = [repr(path) for path in first if path not in mine]
    extra = [repr(path) for path in mine if path not in first]
    how = [f"it lacks {listed(missing)}"] * bool(missing)
    how += [f"it has also {listed(extra)}"] * bool(extra)
    trees = [brief(jax.tree_util.tree_structure(grads[each])) for each in (replica, 0)]
    how = how or [f"it is {trees[0]}, not {trees[1]}"]
    return f"grads[{replica}] has another structure than grads[0]: {' and '.join(how)}"


def _like(leaf: Any, source: tuple[Mirrored, Sequence[int]]) -> Any:
    """Returns results as an array with the shape and sharding of a leaf.

    Args:
        leaf: the array of ``grads``.
        source: the result, and the replicas that the shards of the array are.
    """
    mirrored, replicas = source
    if mirrored.kind == "jax":
        parts = [mirrored[replica] for replica in replicas]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    host = mirrored[replicas[0]]  # all replicas are equal, so JAX's shards share this memory
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: host)
