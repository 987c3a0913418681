"""A device that is none: tensors that say they are on CUDA, compute on the CPU, and count what a GPU would be asked.

Code that chooses by device takes its path for a GPU. Every operation is a launch; every time the host needs a value
(``item``, ``tolist``, ``nonzero``, a boolean mask as an index, a copy to the CPU) it would have to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Operations whose result, or whose shape, the host has to know.
WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal", "bincount", "aminmax_"}
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
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda":
            made = func(*args, **kwargs | {"device": CPU})
            _launch(func.__name__)
            return made if isinstance(made, Pretended) else Pretended(made)
        if (
            func is Tensor.to
            and args[1:]
            and isinstance(args[1], str | torch.device)
            and torch.device(args[1]).type == "cuda"
        ):
            return args[0] if isinstance(args[0], Pretended) else on_device(args[0])
        return func(*args, **kwargs)


def on_device(tensor: Tensor) -> Pretended:
    """A copy on the pretended device."""
    return Pretended(tensor.clone())


def off_device(value: Any) -> Any:
    """What the host would read, without counting that."""
    return tree_map(lambda x: x.inner if isinstance(x, Pretended) else x, value)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    kwargs = dict(kwargs)
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    strangers = [x for x in given if not isinstance(x, Pretended) and x.ndim]
    if strangers and name not in ("copy_", "index", "index_put_", "_index_put_impl_"):
        raise RuntimeError(f"{name}: a tensor on the CPU beside one on the device")
    masks = [
        x
        for x in (args[1] if name in ("index", "index_put", "index_put_") else ())
        if x is not None and x.dtype in (torch.bool, torch.uint8)
    ]
    if name in WAITS or masks or to_host:
        _wait(f"{name} with a mask" if masks else "to the CPU" if to_host else name)
    if name not in VIEWS:
        _launch(name)
    if to_host:
        return func(*off_device(args), **off_device(kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = CPU
    found = func(*off_device(args), **off_device(kwargs))
    if isinstance(args[0], Pretended) and found is args[0].inner:  # in place
        return args[0]
    return tree_map(lambda x: Pretended(x) if isinstance(x, Tensor) else x, found)


def _launch(name: str) -> None:
    for seen in _SEEN:
        seen.launches[name] += 1


def _wait(name: str) -> None:
    for seen in _SEEN:
        seen.waits[name] += 1
