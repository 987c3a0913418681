"""Read a ``torch.save`` archive without running anything it asks for.

Two walls, each enough alone:

1. ``pickled_names`` lists every class and function the pickle names, without building one. Only tensors, plain
   containers, numpy arrays, ``AdapterRef`` and ``RewardSpec`` pass, whatever else this process has allow-listed.
2. ``torch.load(weights_only=True)`` builds the objects, with stand-ins for everything that torch does not know.
"""

import pickle
import pickletools
import re
import struct
import threading
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

from miles_norm.errors import DumpError, UnsafeDumpError
from miles_norm.samples import AdapterRef, RewardSpec
from miles_norm.storage.array_stand_ins import NUMPY_STAND_INS, resolve_arrays

__all__ = ["load_checkpoint", "pickled_names"]

# torch keeps one allow-list for the whole process.
_LOCK = threading.Lock()

# Everything between names, strings and long integers has a fixed length, so one match skips a whole token list.
_FIXED_LENGTH = re.compile(
    rb"(?:[\x81RbaesutN\x85\x86\x87\x88\x89(\])}\x8fQ]|[Khq\x80].|M..|[Jjr].{4}|G.{8})*+", re.DOTALL
)

_STORAGES = "Bool Byte Char Short Int Long Half BFloat16 Float Double ComplexFloat ComplexDouble"
_PLAIN_NAMES = frozenset(
    {f"torch.{kind}Storage" for kind in _STORAGES.split()}
    | {"torch.storage.UntypedStorage", "torch.Size", "torch.device"}
    | {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}
    | {"collections.OrderedDict", "_codecs.encode", "builtins.set", "builtins.complex"}
)
_STAND_INS: dict[str, Any] = {
    "miles.utils.types.AdapterRef": AdapterRef,
    "miles.utils.types.RewardSpec": RewardSpec,
    **NUMPY_STAND_INS,
}
_TORCH_DTYPE = re.compile(r"torch\.(?:bool|u?int\d+|float\d\w*|bfloat16|complex\d+)")


def load_checkpoint(file: BinaryIO, subject: str) -> Any:
    """Return the object that ``torch.save`` wrote into ``file``, with all tensors on the CPU.

    Source: the format is a zip of uncompressed members, ``<prefix>/data.pkl`` and one ``<prefix>/data/<key>`` per
    storage. A compressed member never comes from torch and may grow without bound, so it is refused.

    Args:
        file: Opened for binary reading; its position is irrelevant.
        subject: What error messages are about.

    Raises:
        UnsafeDumpError: The pickle names a class or function outside the allow-list; all of them are in the message.
        DumpError: The file is damaged or not a ``torch.save`` archive.
    """
    try:
        return _load(file, subject)
    except DumpError:
        raise
    except Exception as error:  # noqa: BLE001  # A damaged archive can make the readers of zip, pickle and tensors raise anything.
        # torch wraps what went wrong into advice on turning its check off, which nobody should follow here.
        if isinstance(error, pickle.UnpicklingError) and isinstance(error.__context__, Exception):
            error = error.__context__
        first_line = (str(error).splitlines() or [""])[0]
        _refuse(subject, f"a file that fails to load with {type(error).__name__}: {first_line:.200}", error)


def _load(file: BinaryIO, subject: str) -> Any:
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint

    names = _check_names(_pickle_of(file, subject), subject)
    used = {name: _STAND_INS[name] for name in names & _STAND_INS.keys()}
    with _LOCK, _only_stand_ins(used):
        # torch finds the pickle in the zip by its own reader: what that one sees must be harmless too.
        file.seek(0)
        unsafe = get_unsafe_globals_in_checkpoint(file)
        if unsafe:
            _refuse_names(subject, set(unsafe))
        file.seek(0)
        # The explicit flag holds even where the environment turns the default off.
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    return resolve_arrays(loaded) if names & NUMPY_STAND_INS.keys() else loaded


@contextmanager
def _only_stand_ins(used: dict[str, Any]) -> Iterator[None]:
    """Allow-list the stand-ins that a file needs, hiding what this process may have allow-listed by the same names."""
    from torch.serialization import add_safe_globals, get_safe_globals, safe_globals

    def name_of(entry: Any) -> str:
        return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"

    hidden = [entry for entry in get_safe_globals() if name_of(entry) in used]
    with safe_globals(hidden):
        pass  # leaving the context takes the entries off the list
    try:
        with safe_globals([(target, name) for name, target in used.items()]):
            yield
    finally:
        add_safe_globals(hidden)


def _pickle_of(file: BinaryIO, subject: str) -> bytes:
    """Return ``data.pkl``, after checking that the archive is laid out as torch lays it out."""
    file.seek(0)
    head = file.read(4)
    size = file.seek(0, 2)
    if head != b"PK\x03\x04":
        kind = "a bare pickle" if head[:1] == b"\x80" else "a file that is not a zip archive"
        _refuse(subject, f"{kind} (it begins with {head!r})")
    if not zipfile.is_zipfile(file):
        _refuse(subject, "a zip archive without its end: the file was cut short or is still being written")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        prefix = names[0].partition("/")[0] if names else ""
        packed = [one.filename for one in members if one.compress_type or one.compress_size != one.file_size]
        if packed:
            _refuse(subject, f"a zip archive with compressed members: {', '.join(packed[:5])}")
        if sum(member.file_size for member in members) > size:
            _refuse(subject, "a zip archive whose members are larger than the file")
        if len(set(names)) < len(names) or any(not name.startswith(f"{prefix}/") for name in names):
            _refuse(subject, "a zip archive with repeated members or members outside one folder")
        if f"{prefix}/data.pkl" not in names:
            _refuse(subject, f"a zip archive without data.pkl, with {', '.join(names[:5]) or 'no members'}")
        return archive.read(f"{prefix}/data.pkl")


def pickled_names(data: bytes) -> set[str]:
    """List the classes and functions that a protocol 2 pickle names, building none of them.

    Raises:
        pickle.UnpicklingError: An instruction that ``torch.save`` does not write.
        EOFError, ValueError, IndexError, struct.error: The pickle ends early.

    >>> sorted(pickled_names(pickle.dumps({"a": {1, 2}, "b": 1 + 2j}, protocol=2)))
    ['builtins.complex', 'builtins.set']
    """
    names: set[str] = set()
    position = 0
    while True:
        match = _FIXED_LENGTH.match(data, position)
        position = match.end() if match else position
        code = data[position : position + 1]
        if code == b".":
            return names
        if code == b"c":
            middle = data.index(b"\n", position)
            end = data.index(b"\n", middle + 1)
            module, name = data[position + 1 : middle].decode(), data[middle + 1 : end].decode()
            names.add(f"{'builtins' if module == '__builtin__' else module}.{name}")
            position = end + 1
        elif code == b"X":
            position += 5 + struct.unpack_from("<I", data, position + 1)[0]
        elif code in (b"U", b"\x8a"):
            position += 2 + data[position + 1]
        elif code:
            raise pickle.UnpicklingError(f"the pickle instruction {code!r} at byte {position}")
        else:
            raise EOFError("the pickle has no end")


def _check_names(data: bytes, subject: str) -> set[str]:
    def foreign(names: set[str]) -> set[str]:
        return {n for n in names if n not in _PLAIN_NAMES and n not in _STAND_INS and not _TORCH_DTYPE.fullmatch(n)}

    try:
        names = pickled_names(data)
    except pickle.UnpicklingError as error:
        names = foreign(_disassembled_names(data))
        if names:
            _refuse_names(subject, names)
        _refuse(subject, f"{error}, which torch.save does not write", error)
    if foreign(names):
        _refuse_names(subject, foreign(names))
    return names


def _disassembled_names(data: bytes) -> set[str]:
    """Name what a pickle of any protocol refers to, as far as it can be told; it is refused in any case."""
    names: set[str] = set()
    memo: dict[Any, str | None] = {}
    pushed: deque[str | None] = deque([None, None], maxlen=2)  # the last two values, where they are strings
    for code, argument in _instructions(data):
        if code in ("GLOBAL", "INST"):
            names.add(str(argument).replace(" ", ".", 1).replace("__builtin__.", "builtins."))
            pushed.append(None)
        elif code == "STACK_GLOBAL":
            names.add(".".join(part or "(a name made while unpickling)" for part in pushed))
            pushed.append(None)
        elif code.startswith("EXT"):
            names.add(f"copyreg extension {argument}")
        elif code.endswith("PUT"):
            memo[argument] = pushed[-1]
        elif code == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
        elif code.endswith("GET"):
            pushed.append(memo.get(argument))
        elif code not in ("PROTO", "FRAME"):
            pushed.append(argument if isinstance(argument, str) else None)
    return names


def _instructions(data: bytes) -> Iterator[tuple[str, Any]]:
    try:
        for opcode, argument, _ in pickletools.genops(data):
            yield opcode.name, argument
    except Exception:  # noqa: BLE001  # A pickle that is damaged further on: what came before is still worth naming.
        return


def _refuse_names(subject: str, names: set[str]) -> NoReturn:
    raise UnsafeDumpError(
        subject,
        got=f"a pickle that names {', '.join(ascii(name)[1:-1][:200] for name in sorted(names))}",
        expected="tensors, numpy arrays of numbers or text, plain containers, AdapterRef and RewardSpec only",
        reason="building any other object can run code of the file's author; nothing of this file was run",
        remedy="where the file was written, convert these values to plain ones, or write the rows as .jsonl",
    )


def _refuse(subject: str, got: str, cause: Exception | None = None) -> NoReturn:
    raise DumpError(
        subject,
        got=got,
        expected="an archive written by torch.save: a zip with uncompressed members, data.pkl and its tensors",
        reason="nothing is read from a file that is not exactly what torch.save writes",
        remedy="copy the file again if it was cut, or write it again with torch.save(dump, path) or as .jsonl",
    ) from cause
