"""Log-probs of token sequences as transformers computes them; asked and answered in lines of JSON.

Each sequence goes through the model alone and at once, without a cache, so that nothing of how a server batches,
caches and continues is shared.
"""

import functools
import json
import sys

import torch
from transformers import AutoModelForCausalLM


@functools.cache
def load(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def log_probs(model: torch.nn.Module, tokens: list[int], temperature: float) -> list[float]:
    """Of every token but the first."""
    ids = torch.tensor([tokens])
    logits = model(ids).logits[0, :-1] / temperature
    return logits.log_softmax(dim=-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()


for line in sys.stdin:
    job = json.loads(line)
    found = [log_probs(load(job["model"]), tokens, job["temperature"]) for tokens in job["rows"]]
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
