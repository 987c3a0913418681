"""Teach a tiny model in Hugging Face's format how the agent's conversations look, for an SGLang server to run.

    python -m sglang_cpu.tiny_model out/boxes
    python examples/session_v2_agentic/warm_start_sglang.py out/boxes

The conversations, and so what it learns, are those of ``warm_start.py``. The folder is written over. Any small causal
model with a chat template that only appends can be taught.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from agent import TOOLS
from warm_start import conversation

from miles_norm.session.engines.hugging_face import HuggingFaceRenderer

STEPS, BATCH, CONVERSATIONS, LEARNING_RATE = 100, 16, 1024, 1e-2


transformers.logging.disable_progress_bar()


def warm_start(folder: Path, steps: int = STEPS, seed: int = 0) -> float:
    """Train the model in a folder on the tokens of the teacher's replies; the last loss."""
    torch.set_num_threads(1)  # the steps are too small to share
    rng, renderer = random.Random(seed), HuggingFaceRenderer(folder)
    data = [_encoded(conversation(rng), renderer) for _ in range(CONVERSATIONS)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in track(range(steps), "warm start", transient=True):
        batch = rng.sample(data, BATCH)
        tokens = nn.utils.rnn.pad_sequence([ids for ids, _ in batch], batch_first=True)
        mask = nn.utils.rnn.pad_sequence([mask for _, mask in batch], batch_first=True)[:, 1:]
        log_probs = model(input_ids=tokens[:, :-1]).logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(log_probs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return float(loss.item())


def _encoded(messages: list[dict[str, Any]], renderer: HuggingFaceRenderer) -> tuple[Tensor, Tensor]:
    """Tokens of a conversation, and 1 on those of its replies: from the opening of one to the end of its turn."""
    ids: list[int] = []
    mask: list[int] = []
    for number, message in enumerate(messages, 1):
        text = renderer.render(messages[:number], TOOLS, add_generation_prompt=False)
        if message["role"] == "assistant":
            opening = renderer.encode(renderer.render(messages[: number - 1], TOOLS, add_generation_prompt=True))
            ids, mask = opening, mask + [0] * (len(opening) - len(mask))
        ids = renderer.encode(text)
        reply = message["role"] == "assistant"
        # The line break behind the token that ends the turn is the template's.
        added = len(ids) - len(mask)
        mask += [1] * (added - 1) + [0] if reply else [0] * added
    return torch.tensor(ids), torch.tensor(mask, dtype=torch.float32)


def main() -> None:
    """Train, and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    loss = warm_start(options.folder, options.steps, options.seed)
    print(f"wrote {options.folder}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
