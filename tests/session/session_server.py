"""A session server as a process: python session_server.py JSON, the fields of its config.

Its engine takes milliseconds. It prints its address, or the error that kept it from starting.
"""

import asyncio
import json
import random
import sys

from scripted import ScriptedEngine, said

from miles_norm.errors import MilesNormError
from miles_norm.session.completion import Completion
from miles_norm.session.engines.protocol import GenerationRequest
from miles_norm.session.server import ServerConfig, serve


def say(text: str) -> None:
    sys.stdout.write(" ".join(text.split()) + "\n")
    sys.stdout.flush()


async def script(request: GenerationRequest) -> Completion:
    """Repeats the last message, with some delay so that turns of many sessions overlap."""
    await asyncio.sleep(random.random() / 100)
    return said(f"You said: {request.messages[-1]['content']}")


if __name__ == "__main__":
    try:
        serve(ScriptedEngine(script), ServerConfig(**json.loads(sys.argv[1])), on_start=say)
        say("ended")
    except MilesNormError as error:
        say(f"{type(error).__name__}: {error}")
