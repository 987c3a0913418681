"""Sessions that Miles' real server recorded, as requests in the order of commits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from conversations import assistant

from miles_norm.session.completion import Completion

SESSIONS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data/session_conversations.json").read_text(encoding="utf-8")
)


def completion_of(request: dict[str, Any]) -> Completion:
    return Completion(
        message=assistant(request["completion_text"]),
        token_ids=np.array(request["completion_token_ids"]),
        log_probs=np.array(request["completion_log_probs"]),
        finish_reason=request["finish_reason"],
        weight_version="default",
        response_id=str(request["request"]),
    )
