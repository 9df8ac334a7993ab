"""64 sequences of unequal length, a model that predicts the next token, and its gradients."""

from functools import cache

import numpy as np
from support.libraries import torch
from support.torch_layers import fully_sharded, gradients

import gradreduce as gr

NUM_SEQUENCES, NUM_TOKENS = 64, 11


def model():
    net = torch.nn.Sequential(
        torch.nn.Embedding(NUM_TOKENS, 6), torch.nn.Linear(6, 8), torch.nn.Linear(8, NUM_TOKENS)
    )
    source = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, generator=source)
    return net


@cache
def sequences():
    """Tokens, one more than are predicted."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, NUM_SEQUENCES)
    return [torch.from_numpy(rng.integers(NUM_TOKENS, size=1 + length)) for length in lengths]


def mean_loss(net, *of_batch):
    """The mean over the tokens of sequences of the loss of the next token, and their number."""
    found = net(torch.cat([each[:-1] for each in of_batch]))
    following = torch.cat([each[1:] for each in of_batch])
    return torch.nn.functional.cross_entropy(found, following), len(following)


@cache
def of_one_batch():
    """In float64: in float32 the sums over 3,000 tokens alone are wrong by more than 1e-6."""
    net = model().double()
    mean_loss(net, *sequences())[0].backward()
    return [each.numpy() for each in gradients(net)]


def error(found):
    """The largest error of a tensor, relative to the size of the gradient of one batch."""
    pairs = zip(map(np.asarray, found), of_one_batch(), strict=True)
    return max(np.linalg.norm(each - wanted) / np.linalg.norm(wanted) for each, wanted in pairs)


def by_fsdp(mesh, micro_batches):
    """The gradients, by a model whose root is sharded over the processes of the mesh.

    All processes have as many micro-batches of one forward each, which gathers parameters.
    """
    net = fully_sharded(mesh, model())
    for number, batch in enumerate(micro_batches, 1):
        net.set_requires_gradient_sync(number == len(micro_batches))
        gr.torch.weighted(*mean_loss(net, *batch), net).backward()
    return [each.grad.full_tensor() for each in net.parameters()]
