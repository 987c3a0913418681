"""A device that is none: tensors that say they are on CUDA, compute on the CPU, and count what a GPU would be asked.

Code that chooses by device takes its path for a GPU. Every operation is a launch; every time the host needs a value
(``item``, ``tolist``, ``nonzero``, a boolean mask as an index, a copy to the CPU) it would have to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Operations whose result, or whose shape, the host has to know.
WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal", "bincount"}
# Views start no kernel.
VIEWS = {
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "reshape", "_reshape_alias", "lift_fresh",
}  # fmt: skip


@dataclass
class Seen:
    """What the device was asked for."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)


_SEEN: list[Seen] = []


@contextmanager
def watched() -> Iterator[Seen]:
    """Count launches and waits of everything that happens to pretended tensors in the body."""
    seen = Seen()
    _SEEN.append(seen)
    try:
        with _Factories():
            yield seen
    finally:
        _SEEN.pop()


def without_waits(call: Callable[[], object], launches: int) -> None:
    """The host never waits, and the device is asked a bounded number of times."""
    with watched() as seen:
        call()
    assert seen.waits == {}
    assert 0 < seen.launches.total() <= launches, seen.launches


class Pretended(Tensor):
    """A tensor on the pretended device; ``on_device`` makes one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, layout=inner.layout, device=CPU
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor on a device to numpy")

    def __repr__(self) -> str:
        return f"Pretended({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _Factories(torch.overrides.TorchFunctionMode):
    """``torch.zeros(..., device="cuda")`` and its kin, whatever device they are told, are made here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = device_of(func, args, kwargs)
        if func in (Tensor.to, Tensor.cpu) and wanted is not None:
            there = isinstance(args[0], Pretended)
            if there and wanted.type == "cpu":
                _wait("to the CPU")
                return args[0].inner.clone()
            if wanted.type == "cuda":
                moved = args[0] if there else on_device(args[0])
                dtype = kwargs.get("dtype")
                return moved if dtype is None else moved.to(dtype)
        elif wanted is not None and wanted.type == "cuda":
            made = func(*args, **kwargs | {"device": CPU})
            _launch(func.__name__)
            return made if isinstance(made, Pretended) else Pretended(made)
        return func(*args, **kwargs)


def device_of(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call asks for."""
    if func is Tensor.cpu:
        return CPU
    wanted = kwargs.get("device")
    if wanted is None and func is Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
        wanted = args[1]
    return None if wanted is None else torch.device(wanted)


def on_device(tensor: Tensor) -> Pretended:
    """A copy on the pretended device."""
    return Pretended(tensor.clone())


def off_device(value: Any) -> Any:
    """What the host would read, without counting that."""
    return tree_map(lambda x: x.inner if isinstance(x, Pretended) else x, value)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    kwargs = dict(kwargs)
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    strangers = [x for x in given if not isinstance(x, Pretended) and x.ndim]
    if strangers and name not in ("copy_", "index", "index_put_", "_index_put_impl_"):
        raise RuntimeError(f"{name}: a tensor on the CPU beside one on the device")
    masks = [
        x
        for x in (args[1] if name in ("index", "index_put", "index_put_") else ())
        if x is not None and x.dtype in (torch.bool, torch.uint8)
    ]
    unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in WAITS or masks or unknown_size:
        _wait(f"{name} with a mask" if masks else name)
    if name not in VIEWS:
        _launch(name)
    if kwargs.get("device") is not None:
        kwargs["device"] = CPU
    found = func(*off_device(args), **off_device(kwargs))
    if name == "sqrt":  # a GPU rounds it correctly, torch on a CPU does not always
        found = torch.from_numpy(np.sqrt(args[0].inner.numpy()))
    if isinstance(args[0], Pretended) and found is args[0].inner:  # in place
        return args[0]
    return tree_map(lambda x: Pretended(x) if isinstance(x, Tensor) else x, found)


def _launch(name: str) -> None:
    for seen in _SEEN:
        seen.launches[name] += 1


def _wait(name: str) -> None:
    for seen in _SEEN:
        seen.waits[name] += 1
