"""Bytes of a rank, counted from the tensors; sharded ones are in the tests of FSDP."""

import torch

from tests.support.rank_memory import LocalBytes, local_bytes


def test_counts_tied_parameters_once_and_leaves_step_counts_out():
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second, torch.nn.Linear(4, 1, bias=False).bfloat16())
    optimizer = torch.optim.AdamW(model[:2].parameters())
    assert local_bytes(model) == LocalBytes(parameters=64 + 8, gradients=0, moments=0)
    model[:2](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    held = local_bytes(model, optimizer)
    assert held == LocalBytes(parameters=72, gradients=64, moments=128)
    assert held.total == 264
