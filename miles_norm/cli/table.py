"""Tables that keep every digit: columns of numbers have the width they need, ids and notes wrap."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from miles_norm.cli.terminal import printable

__all__ = ["Column", "Note", "print_table"]

_GAP = "  "
_LEAST_FOLDED = 8
_LEAST_NOTE = 17
"""A narrower column of notes gives way to notes on lines of their own."""


@dataclass(frozen=True)
class Column:
    """A column; ``above`` is a first header line that may reach over the columns to its right."""

    head: str
    above: str = ""
    folds: bool = False
    """Text, at the left, broken where the table is too wide; else numbers, at the right."""


@dataclass(frozen=True)
class Note:
    """What stands at the end of a line, or below it."""

    text: str = ""
    style: str = ""


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], notes: Sequence[Note]
) -> None:
    """Print one line per row, more where something has to wrap; nothing is cut off."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = _widths(columns, cells, console.width)
    used = sum(widths) + len(_GAP) * len(widths)
    longest = max((cell_len(note.text) for note in notes), default=0)
    room = console.width - used
    beside = room >= min(longest, _LEAST_NOTE)
    above, head = _heads(columns, widths, with_notes=beside and longest > 0)
    for line in (above, head) if above else (head,):
        console.print(Text(line, style="bold"))
    for row, note in zip(cells, notes, strict=True):
        folded = [chop_cells(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        wrapped = _wrapped_note(note.text, room) if beside else []
        for number in range(max(len(wrapped), *map(len, folded))):
            pieces = [lines[number] if number < len(lines) else "" for lines in folded]
            text = Text(_GAP.join(_pad(*piece) for piece in zip(pieces, widths, columns, strict=True)))
            if number < len(wrapped):
                text.append(_GAP).append(wrapped[number], note.style)
            text.rstrip()
            console.print(text)
        if not beside and note.text:
            below = textwrap.wrap(note.text, console.width - 4, initial_indent=" " * 4, subsequent_indent=" " * 4)
            console.print(Text("\n".join(below), style=note.style))


def _widths(columns: Sequence[Column], cells: list[list[str]], available: int) -> list[int]:
    widths = [max([cell_len(column.head), *(cell_len(row[n]) for row in cells)]) for n, column in enumerate(columns)]
    folding = [n for n, column in enumerate(columns) if column.folds]
    while folding and sum(widths) + len(_GAP) * (len(widths) - 1) > available:
        widest = max(folding, key=lambda n: widths[n])
        if widths[widest] <= _LEAST_FOLDED:
            break
        widths[widest] -= 1
    return widths


def _wrapped_note(text: str, width: int) -> list[str]:
    """Lines that hold as many whole parts, separated by commas, as fit."""
    lines: list[str] = []
    for part in text.split(", ") if text else []:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f", {part}"
        else:
            lines[-1:] = [f"{lines[-1]},"] if lines else []
            lines += textwrap.wrap(part, max(width - 1, 1))
    return lines


def _heads(columns: Sequence[Column], widths: list[int], *, with_notes: bool) -> tuple[str, str]:
    above, head = "", []
    position = 0
    for column, width in zip(columns, widths, strict=True):
        if column.above:
            # Above one column of numbers it ends where they end; a longer one reaches to the right.
            above = above.ljust(position + max(width - len(column.above), 0)) + column.above
        head.append(_pad(column.head, width, column))
        position += width + len(_GAP)
    return above, _GAP.join([*head, "notes"] if with_notes else head).rstrip()


def _pad(text: str, width: int, column: Column) -> str:
    space = " " * max(width - cell_len(text), 0)
    return text + space if column.folds else space + text
