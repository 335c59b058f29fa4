"""The calls of modules in progress, as they stand on the Python stack: what fails here first where torch has changed."""

import torch
from torch import nn

from ullage.attention.support import given, holders, module_calls


class Asking(nn.Module):
    def forward(self, hidden, position_ids=None, **keywords):
        self.calls, self.given, self.holders = list(module_calls()), given(), holders(self)
        return hidden


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Asking()

    def forward(self, hidden, position_ids=None, cu_seq_lens_q=None):
        return self.inner(hidden, some=1)


def test_the_frames_of_module_calls_hold_the_module_and_its_arguments():
    """``nn.Module.__call__`` is one Python function of (self, *args, **kwargs); its frames tell them under hooks too."""
    assert nn.Module.__call__.__code__.co_varnames[:3] == ("self", "args", "kwargs")
    around, hidden, positions = Around(), torch.zeros(1, 2), torch.arange(2)
    for hooked in (False, True):
        if hooked:
            around.inner.register_forward_pre_hook(lambda module, args: None)
            around.register_forward_hook(lambda module, args, output: None)
        around(hidden, positions, cu_seq_lens_q=torch.tensor([0, 2]))
        inner = around.inner
        assert [call.module for call in inner.calls] == [inner, around]
        assert inner.calls[0].positional == (hidden,)
        assert inner.calls[0].keywords == {"some": 1}
        assert inner.calls[1].argument("position_ids") is positions
        assert inner.given.positions == (positions,)
        assert inner.given.lengths
        assert inner.given.model is None
        assert inner.holders == [inner, around]
    assert given().positions == ()
    assert holders(around) == [around]
