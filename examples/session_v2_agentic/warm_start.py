"""Teach the embedded policy how the agent's conversations look, by imitation of a teacher that is often wrong.

    python examples/session_v2_agentic/warm_start.py out/policy.safetensors

The teacher claims to be done without having opened anything (25% of its first replies), writes something that is no
tool call (15%), or calls ``open`` (40%) or ``ask`` (20%). The policy does the same afterwards, so its rollouts succeed
now and then, and have one row or several.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from agent import TOOLS

from miles_norm.session.engines.chatml import ChatMLRenderer
from miles_norm.session.engines.embedded_policy import EmbeddedPolicy

STEPS, BATCH, CONVERSATIONS, LEARNING_RATE = 100, 32, 2048, 5e-3


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """One conversation about one box, as the agent leads it."""
    box = rng.randrange(10)
    opening = rng.choice(("help", f"{rng.randrange(3)} so far"))
    question = {"role": "user", "content": f"{opening}, box {box}"}
    done = {"role": "assistant", "content": "done"}
    kind = rng.choices(("claim", "stumble", "open", "ask"), weights=(25, 15, 40, 20))[0]
    if kind == "claim":
        return [question, done]
    if kind == "stumble":
        return [question, {"role": "assistant", "content": f"open box {box}"}]
    calls = [{"id": "0", "type": "function", "function": {"name": kind, "arguments": "{}"}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    return [question, call, {"role": "tool", "content": rng.choice(("open", "open", "shut"))}, done]


def warm_start(steps: int = STEPS, seed: int = 0) -> EmbeddedPolicy:
    """A policy that imitates the teacher: cross-entropy on the tokens of its replies."""
    torch.set_num_threads(1)  # the steps are too small to share
    rng, renderer = random.Random(seed), ChatMLRenderer()
    prefix = torch.tensor([renderer.encode(renderer.render([], TOOLS, add_generation_prompt=False))])
    data = [_encoded(conversation(rng), renderer) for _ in range(CONVERSATIONS)]
    policy = EmbeddedPolicy(seed=seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in track(range(steps), "warm start", transient=True):
        batch = rng.sample(data, BATCH)
        tokens = nn.utils.rnn.pad_sequence([ids for ids, _ in batch], batch_first=True)
        mask = nn.utils.rnn.pad_sequence([mask for _, mask in batch], batch_first=True)
        # Every conversation begins with the same list of tools: it is read once, and is nothing to learn.
        with torch.no_grad():
            _, state = policy.gru(policy.embedding(prefix))
        states, _ = policy.gru(policy.embedding(tokens[:, :-1]), state.expand(-1, BATCH, -1).contiguous())
        log_probs = policy.head(states).log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(log_probs * mask[:, 1:]).sum() / mask[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return policy


def _encoded(messages: list[dict[str, Any]], renderer: ChatMLRenderer) -> tuple[Tensor, Tensor]:
    """Tokens of a conversation, and 1 on those of its replies."""
    ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        turn = renderer.encode(renderer.render([message], add_generation_prompt=False))
        opening = len(renderer.encode("<|im_start|>assistant\n")) if message["role"] == "assistant" else len(turn)
        ids += turn
        mask += [0] * opening + [1] * (len(turn) - opening - 1) + [0] if opening < len(turn) else [0] * len(turn)
    return torch.tensor(ids), torch.tensor(mask, dtype=torch.float32)


def main() -> None:
    """Train, and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    warm_start(options.steps).save(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
