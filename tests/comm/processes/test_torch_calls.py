"""PyTorch's functions have the parameters of the stand-in in the tests on the fake CuPy."""

import inspect

import pytest
from fake_cupy import distributed


def parameters(call):
    """Names of the parameters that are used, and which have defaults."""
    found = inspect.signature(call).parameters.values()
    return {each.name: each.default is each.empty for each in found}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("torch.distributed", "P2POp.__init__"),
        ("torch.distributed", "batch_isend_irecv"),
        ("torch.distributed", "all_reduce"),
        ("torch.distributed", "reduce"),
        ("torch.distributed", "broadcast"),
        ("torch.distributed", "all_gather_single"),
        ("torch.distributed", "reduce_scatter_single"),
        ("torch.distributed", "isend"),
        ("torch.distributed", "irecv"),
        ("torch.distributed", "init_process_group"),
        ("torch.distributed", "destroy_process_group"),
        ("torch.cuda", "stream"),
    ],
)
def test_the_stand_in_has_the_parameters_of_pytorch(place, name):
    import torch.distributed

    modules = {"torch.distributed": torch.distributed, "torch.cuda": torch.cuda}
    theirs, ours = modules[place], distributed
    for part in name.split("."):
        theirs, ours = getattr(theirs, part), getattr(ours, part)
    required = parameters(theirs)
    for parameter, is_required in parameters(ours).items():
        assert required.get(parameter) == is_required, parameter
    assert {each for each in required if required[each]} <= set(parameters(ours))


@pytest.mark.torch
def test_the_stand_in_has_what_else_is_used_of_pytorch():
    import torch
    import torch.distributed as dist

    names = list(inspect.signature(torch.cuda.ExternalStream.__new__).parameters)
    assert tuple(names[1:3]) == distributed.ExternalStream._fields
    assert torch.device("cuda", 1).type == distributed.TorchDevice("cuda", 1).type
    backends = str(dist.BackendConfig(dist.Backend("cpu:gloo,cuda:nccl")))
    assert dict(each.split(":") for each in backends.split(",")) == {"cpu": "gloo", "cuda": "nccl"}
    dtypes = [getattr(torch, name) for name in distributed.DTYPES]
    assert [dtype.itemsize for dtype in dtypes] == [
        distributed._ITEMSIZES[number] for number in distributed.DTYPES.values()
    ]
    assert callable(dist.get_backend_config)
    assert callable(dist.is_nccl_available)
