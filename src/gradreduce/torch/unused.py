"""Finds the parameters whose gradients stay None, because no replica has used them.

All replicas must do the same: an optimizer leaves a ``.grad`` of None alone, but may change the
parameter of one of zeros. After a failed step some replicas may have None and others zeros.

One process sees which gradients its replicas have. Several processes have flags at the end of the
last bucket, so that they need no other exchange. Each replica has a flag for each parameter: 0 if
the parameter has got no gradient since the last averaged step and its ``.grad`` was None, otherwise
1. The flags are averaged with the gradients of the last bucket. If a flag is 0 afterwards, no
replica of any process has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def make_flags(parameters: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Returns a tensor for the last bucket, whose ``.grad`` has the flags of a replica.

    Args:
        parameters: the parameters of the replica.
        parts: its ``Part`` of each bucket, in their order.
    """
    flags = _flags_of(parts)
    like = parameters[parts[-1].indices[0]]
    tensor = torch.zeros(len(flags), dtype=like.dtype, device=like.device, requires_grad=True)
    tensor.grad = torch.frombuffer(flags, dtype=torch.uint8).to(like)
    return tensor


def write_flags(replica: Any) -> None:
    """Writes the flags of a ``Replica``, on PyTorch's current stream."""
    flags = _flags_of(replica.parts)
    if 0 in flags:
        replica.flags.copy_(torch.frombuffer(flags, dtype=torch.uint8))
    else:
        replica.flags.fill_(1)


def leave_unused(replicas: Sequence[Any]) -> None:
    """Sets gradients to None again that were None in all replicas of all processes.

    The host waits for the flags, if there are flags and a gradient was None here.

    Args:
        replicas: each ``Replica`` of this process, after the reduction.
    """
    for replica in replicas:
        if not any([part.unset for part in replica.parts]):
            continue
        if replica.flags is None:
            rows = [_flags_of(each.parts) for each in replicas]
            flags = list(map(max, zip(*rows, strict=True)))
        else:
            flags = replica.flags.tolist()
        parameters, start = replica.parameters, 0
        for part in replica.parts:
            for position in part.unset:
                if not flags[start + position]:
                    parameters[part.indices[position]].grad = None
            start += len(part.indices)


def _flags_of(parts: Sequence[Any]) -> bytearray:
    positions = [(part, position) for part in parts for position in range(len(part.indices))]
    return bytearray([position not in part.unset for part, position in positions])
