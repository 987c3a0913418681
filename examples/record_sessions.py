"""An agent against a session server, and its rollouts as training rows; the README shows it."""

import asyncio

import openai

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.session.engines.embedded import EmbeddedEngine
from miles_norm.session.rollout import RolloutOptions, run_rollouts
from miles_norm.session.server import ServerConfig, running_server


async def solve(*, base_url, prompt, request_kwargs, metadata, **kwargs):
    """The agent: two drafts of one answer, which are two leaves."""
    messages = [{"role": "user", "content": prompt}]
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=metadata.get("api_key", "none")) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages, **request_kwargs)
    return {"reward": float(len(answer.choices[0].message.content) % 2)}


async def main():
    """Serve, and run the agent four times on each of two prompts."""
    async with running_server(EmbeddedEngine(), ServerConfig(port=0)) as address:
        options = RolloutOptions(n_samples_per_prompt=4, request_kwargs={"max_tokens": 20})
        return await run_rollouts(solve, ["Say something.", "Say more."], address, options)


rows = asyncio.run(main())
result = normalize_rewards(rows, NormalizationConfig())
print(len(rows), "rows,", result.index.num_rollouts, "rollouts,", result.index.num_groups, "prompt groups")
