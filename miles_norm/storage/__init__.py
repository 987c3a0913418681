"""Files: train data in columns, and what reading and writing dumps of every format takes.

The functions are imported when they are used, so that reading JSON lines costs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_norm.storage.train_files import iter_train_data, read_train_data, write_train_data

__all__ = ["iter_train_data", "read_train_data", "write_train_data"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from miles_norm.storage import train_files

    return getattr(train_files, name)
