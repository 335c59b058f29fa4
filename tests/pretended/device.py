"""A pretended CUDA device: tensors of the CPU whose storages say that they lie on a GPU.

A storage is marked, so that views, parameters and saved tensors have their place without a class of their own. Two of
torch's modes do the rest. :class:`_Calls` sees what Python asks for by name: the device of a tensor, a move, a tensor
made on a device. :class:`_Kernels` sees each operator of forward and backward: its results lie where its arguments do,
arguments on two devices raise as CUDA's do, and what makes the host wait for the device is noted with its line.

What C++ makes by itself, such as the zeros in a backward pass, is made on the CPU here, and goes with either device.
torch gives no other way to a device that is named ``cuda`` without one: a renamed ``privateuse1`` may not have the name
of a device that torch knows, and tensors whose own device is CUDA have no backward in a build without it.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ullage.core.replacing import replaced

CUDA = torch.device("cuda", 0)
#: Where a storage lies: on the device, or, of what C++ made, wherever it is used. Without a mark it is on the host.
_DEVICE, _ANYWHERE, _HOST = "device", "anywhere", "host"
aten = torch.ops.aten

#: Operators whose results have a size that only the device knows, or that give a number to the host.
_WAITING = {
    getattr(packet, overload): packet.__name__
    for packet in (
        aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.equal,
        aten.bincount, aten.is_nonzero, aten._local_scalar_dense,
    )
    for overload in packet.overloads()
}  # fmt: skip
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


#: What only CUDA takes: a histogram of integers, and a product of half precision that is added to float32.
_ON_CPU = {
    aten.histc.default: lambda x, *rest: aten.histc.default(x.double(), *rest).to(x.dtype),
    aten.addmm.dtype_out: lambda total, left, right, dtype, *, out, **scales: out.copy_(
        torch.addmm(total, left.to(dtype), right.to(dtype), **scales)
    ),
}


class Mixed(RuntimeError):
    """Tensors of two devices in one operator."""


class Tally:
    """What the host did with the device: a line for each wait, and for each copy to the device."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._muted = 0

    def note(self, kind: str, *, waits: bool = True) -> None:
        if not self._muted:
            (self.waits if waits else self.copies)[f"{kind} {_line()}"] += 1

    def clear(self) -> None:
        self.waits.clear()
        self.copies.clear()

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Note nothing within: what a test does, and what a kernel does behind its call."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1


def _line() -> str:
    """The innermost line that is neither torch's nor a test's; the operator's backward where there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in ("/torch/", "/tests/pretended/", "<frozen", "<string>", "contextlib")):
            return f"{name.split('site-packages/')[-1].split('/src/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward pass"


def _storage(tensor: Tensor) -> Any:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # within vmap
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return (tensor._values if isinstance(tensor, NestedTensor) else tensor).untyped_storage()


def place(tensor: Tensor) -> str:
    with torch._C.DisableTorchFunction():
        return getattr(_storage(tensor), "place", _HOST)


def _put(tensor: Tensor, where: str) -> Tensor:
    _storage(tensor).place = where
    return tensor


def on_device(tensor: Tensor) -> bool:
    return place(tensor) == _DEVICE


def _names_device(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


class _Moved(torch.autograd.Function):
    """A copy on the other device, as is its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: str, back: str) -> Tensor:
        ctx.back = back
        return _put(tensor.clone(), there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _put(gradients[0].clone(), ctx.back), None, None


class _Kernels(TorchDispatchMode):
    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, NestedTensor) for each in types):
            return NotImplemented  # its values come by themselves
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        places = [place(each) for each in tensors]
        if _DEVICE in places:
            self._look(func, args, kwargs, tensors, places)
        out = _ON_CPU.get(func, func)(*args, **kwargs)
        where = _DEVICE if _DEVICE in places else _HOST if _HOST in places else _ANYWHERE
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and not hasattr(_storage(each), "place") and where != _HOST:
                _put(each, where)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], places: list[str]) -> None:
        """Note what waits, and raise for arguments on two devices."""
        strangers = [each for each, where in zip(tensors, places) if where == _HOST and each.dim() > 0]
        if func in _WAITING:
            self.tally.note(_WAITING[func])
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.tally.note("repeat_interleave")
        elif func is aten.copy_.default:
            if _HOST in places:
                self._copied(args[1], to_device=places[0] == _DEVICE, non_blocking=len(args) > 2 and args[2])
            return
        elif func in _INDEXING and places[0] == _DEVICE:
            for each in args[1]:
                if each is not None and each.dtype in (torch.bool, torch.uint8):
                    self.tally.note("boolean index")
                elif each is not None and place(each) == _HOST and each.dim():
                    self._copied(each, to_device=True, non_blocking=False)
                strangers = [other for other in strangers if other is not each]
        if strangers:
            raise Mixed(f"{func}: a tensor {list(strangers[0].shape)} of the host, at {_line()}")

    def _copied(self, source: Tensor, *, to_device: bool, non_blocking: bool) -> None:
        if to_device and source.numel():
            self.tally.note("copy", waits=False)
        if source.numel() and not non_blocking:
            self.tally.note("copy" if to_device else "read")


class _Calls(TorchFunctionMode):
    def __init__(self, kernels: _Kernels) -> None:
        super().__init__()
        self.kernels, self.tally = kernels, kernels.tally
        tensor: Any = Tensor
        self.own = {
            tensor.device.__get__: lambda x: CUDA if on_device(x) else tensor.device.__get__(x),
            tensor.is_cuda.__get__: on_device,
            tensor.is_cpu.__get__: lambda x: not on_device(x) and tensor.is_cpu.__get__(x),
            tensor.to: self.to,
            tensor.cuda: lambda x, device=CUDA, non_blocking=False: self.move(x, CUDA, non_blocking),
            tensor.cpu: lambda x: self.move(x, "cpu", False),
            tensor.pin_memory: _pinned,
            tensor.is_pinned: lambda x, device=None: hasattr(_storage(x), "is_pinned"),
            tensor.tolist: self.read(tensor.tolist),
            tensor.numpy: self.refuse(tensor.numpy),
            tensor.__array__: self.refuse(tensor.__array__),
            tensor.backward: self.backward,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        other = next((each for each in (*args, *kwargs.values()) if _is_of_its_own(each)), None)
        if other is not None:
            with self:
                return type(other).__torch_function__(func, types, args, kwargs)
        if func in self.own:
            return self.own[func](*args, **kwargs)
        device = kwargs.get("device")
        where = _DEVICE if _names_device(device) else _HOST
        out = func(*args, **(kwargs | {"device": "cpu"} if where == _DEVICE else kwargs))
        for each in tree_leaves(out):
            # Made by this call, of nothing that lies anywhere, or of what is moved by it.
            if isinstance(each, Tensor) and not each.is_meta and (place(each) == _ANYWHERE or device is not None):
                if place(each) != where and func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
                    self.kernels._copied(each, to_device=where == _DEVICE, non_blocking=False)
                _put(each, where)
        return out

    def move(self, tensor: Tensor, device: Any, non_blocking: bool) -> Tensor:
        if (
            device is None
            or torch.device(device).type not in ("cpu", "cuda")
            or _names_device(device) == on_device(tensor)
        ):
            return tensor
        where = _DEVICE if _names_device(device) else _HOST
        if tensor.is_nested:
            made = [self.move(each, device, non_blocking) for each in (tensor.values(), tensor.offsets())]
            return torch.nested.nested_tensor_from_jagged(*made)
        self.kernels._copied(tensor, to_device=where == _DEVICE, non_blocking=non_blocking)
        return _Moved.apply(tensor, where, place(tensor))  # type: ignore[return-value]

    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            device, dtype, blocking = CUDA if on_device(args[0]) else args[0].device, args[0].dtype, False
        else:
            parsed = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
            device, dtype, blocking = parsed[:3]
        if device is not None and device.type not in ("cpu", "cuda"):
            return tensor.to(*args, **kwargs)
        moved = self.move(tensor, device, blocking)
        return moved if dtype is None else moved.to(dtype)

    def read(self, function: Any) -> Any:
        def read(tensor: Tensor, *args: Any) -> Any:
            if on_device(tensor):
                self.tally.note("read")
            return function(tensor, *args)

        return read

    @staticmethod
    def refuse(function: Any) -> Any:
        def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if on_device(tensor):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
            return function(tensor, *args, **kwargs)

        return refuse

    def backward(self, tensor: Tensor, gradient: Any = None, **kwargs: Any) -> None:
        with self:  # what of it is Python asks for devices too
            torch.autograd.backward(tensor, gradient, **kwargs)


def _is_of_its_own(value: Any) -> bool:
    """Whether a value is no tensor, and says itself what functions of torch do with it."""
    return not isinstance(value, (Tensor, type)) and hasattr(type(value), "__torch_function__")


def _pinned(tensor: Tensor, device: Any = None) -> Tensor:
    made = tensor.clone()
    _storage(made).is_pinned = True
    return made


class _Autocast(torch.autocast):
    """The CPU's autocast in place of CUDA's; its lists differ, matrix products and linear layers are in both."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(_on_cpu(device_type), *args, **kwargs)


def _on_cpu(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


def _grouped(group: Any, *given: Any) -> Any:
    """Tensors of an optimizer by device and dtype, which C++ groups by the CPU."""
    found = group(*given)
    return {(CUDA if on_device(each[0][0][0]) else key[0], key[1]): each for key, each in found.items()}


@contextlib.contextmanager
def pretending() -> Iterator[Tally]:
    """CUDA, as far as Python sees it, an H100 by its capability."""
    tally = Tally()
    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    group = torch._C._group_tensors_by_device_and_dtype
    as_there = [
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.backends.cudnn, "is_acceptable", lambda *_: False),  # so nothing is laid out for it
        (torch.cuda, "synchronize", lambda *_: tally.note("synchronize")),
        (torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, *_: torch.set_rng_state(state)),
        (torch, "is_autocast_enabled", lambda device="cuda": is_enabled(_on_cpu(device))),
        (torch, "get_autocast_dtype", lambda device: dtype_of(_on_cpu(device))),
        (torch._C, "_group_tensors_by_device_and_dtype", lambda *given: _grouped(group, *given)),
        (torch, "autocast", _Autocast),
        (torch.amp, "autocast", _Autocast),
    ]
    kernels = _Kernels(tally)
    with contextlib.ExitStack() as stack:
        for owner, name, value in as_there:
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(kernels)
        stack.enter_context(_Calls(kernels))
        yield tally
