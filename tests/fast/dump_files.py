"""Files and values that the tests of dumps share."""

import enum
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from miles_norm.samples import AdapterRef, RewardSpec

HERE = Path(__file__).parent
SESSION = HERE.parents[1] / "examples/data/miles_session_v2.pt"
REAL = [SESSION, *(HERE / "data" / f"{name}.pt" for name in ("miles_mainstream", "miles_multi_lora", "slime_dump"))]
LORA = HERE / "data/miles_multi_lora.pt"
FORMATS = [".pt", ".jsonl", ".jsonl.gz", ".jsonl.zst"]


def plain(value):
    """References as dicts, everything else as it is."""
    if isinstance(value, AdapterRef | RewardSpec):
        return value.__getstate__()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def archive(path, data_pkl, members=None, compression=zipfile.ZIP_STORED):
    """A torch.save archive around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in {"data.pkl": data_pkl, "version": b"3\n", "byteorder": b"little", **(members or {})}.items():
            if data is not None:
                file.writestr(f"archive/{name}", data)
    return path


def saved(path, value):
    torch.save(value, path)
    return path


class Hostile:
    """Unpickling this makes a folder."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Note:
    text: str
    colour: Colour
