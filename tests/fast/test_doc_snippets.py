"""Every Python block of the documents is a doctest, a shipped example, or is run here or where its framework is."""

import ast
import asyncio
import inspect
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doc_blocks import PAGES, ROOT, Block, blocks
from fake_sglang import FakeSGLang, serving
from tokenizers import Tokenizer, models

from miles_norm import NormalizationConfig, RolloutColumns, normalize_rewards
from miles_norm.conversion import train_data_from_result
from miles_norm.session.engines.chatml import ChatMLRenderer
from miles_norm.session.engines.sglang import SGLangEngine

PYTHON = [block for block in blocks("python") if not block.text.startswith(">>> ")]
EXAMPLES = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
"""Run by test_docs.py, test_loss_docs.py and test_integration_docs.py, output included."""
NOT_RUN = {
    "result = normalize_rewards(samples, NormalizationConfig(...), prompt_group_sizes=None)": "a signature",
    "from miles_norm.integrations.trl import RolloutGRPOTrainer": "needs TRL; tests/integration/trl_models.py does so",
    "from miles_norm.cluster import get_shard": "needs Ray; tests/ray/test_scaling_docs.py",
    "dataset.map_batches(normalize_batch": "needs Ray; tests/ray/test_scaling_docs.py",
}


async def run(block: Block, **names: Any) -> dict[str, Any]:
    """What the block, which may await, has named; the last expression as ``_``."""
    module = ast.parse(block.text)
    if isinstance(last := module.body[-1], ast.Expr):
        module.body[-1] = ast.fix_missing_locations(
            ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
        )
    made = eval(compile(module, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(made):
        await made
    return names


def one_process_of_a_group(block: Block, patch: pytest.MonkeyPatch) -> None:
    columns = RolloutColumns(group=[0, 0], rollout=[0, 1], reward=[1.0, 0.0], trainable_tokens=[2, 4])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = NormalizationConfig(advantage_estimator="dr_grpo")
        made = asyncio.run(run(block, columns=columns, config=config))
    finally:
        dist.destroy_process_group()
    assert made["found"].advantages.tolist() == [0.5, -0.5]
    assert made["_"].tolist() == [1 / 4, 1 / 8]


def files_of_train_data(block: Block, patch: pytest.MonkeyPatch) -> None:
    row = {"group_index": 0, "tokens": [5, 6, 7], "response_length": 2}
    rows = [row | {"rollout_id": number, "reward": float(number)} for number in (0, 1)]
    data = train_data_from_result(rows, normalize_rewards(rows))
    read = asyncio.run(run(block, data=data))["_"]
    assert read["tokens"].tolists() == data["tokens"].tolists()
    assert "loss_masks" not in read


def engine_of_a_model(block: Block, patch: pytest.MonkeyPatch) -> None:
    folder = Path("path/of/the/model")
    folder.mkdir(parents=True)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    engine = asyncio.run(run(block))["engine"]
    assert engine.renderer.render([{"role": "user", "content": "aa"}], add_generation_prompt=True) == "aa"


def engine_behind_a_router(block: Block, patch: pytest.MonkeyPatch) -> None:
    names = asyncio.run(run(block, SGLangEngine=SGLangEngine, renderer=ChatMLRenderer()))
    assert isinstance(names["engine"], SGLangEngine)


def new_weights_of_an_engine(block: Block, patch: pytest.MonkeyPatch) -> None:
    server = FakeSGLang()

    async def update() -> None:
        async with serving(server):
            engine = SGLangEngine(server.url, ChatMLRenderer())
            await engine.start()
            try:
                await run(block, engine=engine)
            finally:
                await engine.close()

    asyncio.run(update())
    assert server.weight_version == "17"


def drop_ins_of_agent_lightning(block: Block, patch: pytest.MonkeyPatch) -> None:
    """In a module of the name that Agent Lightning's has."""
    package, verl = ModuleType("agentlightning"), ModuleType("agentlightning.verl")
    trainer = verl.trainer = ModuleType("agentlightning.verl.trainer")  # type: ignore[attr-defined]
    for module in (package, verl, trainer):
        patch.setitem(sys.modules, module.__name__, module)
    asyncio.run(run(block))
    scaled = trainer.normalize_advantages_by_rollout(torch.ones(2, 2), torch.ones(2, 2), ["A", "A"], num_trained_rows=2)
    assert scaled.tolist() == [[0.25, 0.25], [0.25, 0.25]]  # 4 tokens, one rollout, though two rows
    assert callable(trainer.compute_rollout_level_advantage)


RUN: dict[str, Callable[[Block, pytest.MonkeyPatch], None]] = {
    "from miles_norm import loss_weights, normalize_distributed": one_process_of_a_group,
    "from miles_norm.storage import read_train_data": files_of_train_data,
    "from miles_norm.session.engines.hugging_face": engine_of_a_model,
    'engine = SGLangEngine("http://127.0.0.1:30000", renderer, workers': engine_behind_a_router,
    "await engine.update_weights": new_weights_of_an_engine,
    "from functools import partial\n\nfrom agentlightning": drop_ins_of_agent_lightning,
}


@pytest.mark.parametrize("begin", RUN, ids=[function.__name__ for function in RUN.values()])
def test_blocks_run(begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [block for block in PYTHON if block.text.startswith(begin)]
    monkeypatch.chdir(tmp_path)
    RUN[begin](block, monkeypatch)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_no_block_is_passed_over(block: Block) -> None:
    ast.parse(block.text)
    begins = [begin for begin in (*RUN, *NOT_RUN) if block.text.startswith(begin)]
    assert len(begins) + any(block.text in code for code in EXAMPLES) == 1


def test_every_excuse_is_needed() -> None:
    assert [begin for begin in NOT_RUN if not any(block.text.startswith(begin) for block in PYTHON)] == []


def test_blocks_with_prompts_are_doctests() -> None:
    """pytest collects them from every page, where its framework is installed (conftest.py)."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert "--doctest-glob=*.md" in settings["addopts"]
    assert {path.relative_to(ROOT).parts[0] for path in PAGES} <= set(settings["testpaths"])
    for block in blocks("python"):
        assert block.text.startswith(">>> ") or ">>> " not in block.text
        # Without it the closing fence would be a part of the last output.
        assert not block.text.startswith(">>> ") or block.text.endswith("\n\n")
