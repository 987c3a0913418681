"""A process that appends records to a journal and prints each one that was acknowledged.

python journal_writer.py PATH SYNC sessions N    N sessions append turns, for ever
python journal_writer.py PATH SYNC fill N        turns of N bytes until one fails, one more after a line on stdin
"""

import asyncio
import sys

from miles_norm.errors import JournalError
from miles_norm.session.store import Journal


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def sessions(journal: Journal, number: int) -> None:
    async def session(name: int) -> None:
        turn = 0
        while True:
            await journal.append(f"s{name}", "turn", f"{turn} ".encode() * 100)
            say(f"s{name} {turn}")
            turn += 1

    await asyncio.gather(*(session(name) for name in range(number)))


async def fill(journal: Journal, size: int) -> None:
    turn = 0
    try:
        while turn < 100_000:
            await journal.append("s", "turn", f"{turn} ".encode().ljust(size, b"."))
            say(f"s {turn}")
            turn += 1
    except JournalError as error:
        say("failed " + " ".join(str(error).split()))
    await asyncio.to_thread(sys.stdin.readline)
    await journal.append("s", "turn", b"last ")
    await journal.close()
    say("closed")
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    path, sync, mode, number = sys.argv[1:]
    asyncio.run({"sessions": sessions, "fill": fill}[mode](Journal(path, sync=sync), int(number)))  # type: ignore[arg-type]
