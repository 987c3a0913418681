"""SGLang without a GPU: a torchvision that can be imported, a launcher, and tiny models."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["declare_torchvision_ops"]

_kept: list[object] = []  # An operator is gone with the library object that declared it.


def declare_torchvision_ops() -> None:
    """Make ``import torchvision`` work beside a torch without CUDA; called by torch at the end of its own import.

    SGLang imports torchvision. On PyPI its Linux builds are for CUDA, and their operators do not load here; the Python
    side then fails over two of them, which it describes to torch without looking whether they are there. Declared
    without a kernel, they are there, and fail only when they are called. A torchvision whose operators load is left as
    it is.
    """
    import torch

    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(Path(found.origin).with_name("_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
