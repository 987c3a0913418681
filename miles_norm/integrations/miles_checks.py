"""What the hooks of Miles and slime refuse and what they warn of: wiring that would train something else in silence."""

from __future__ import annotations

import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from miles_norm.columns.ids import plain_id
from miles_norm.columns.sample_columns import flatten_samples, plain_rows, row_field
from miles_norm.config import NormalizationConfig
from miles_norm.errors import ConfigError, SampleError, format_rows, shown
from miles_norm.integrations.miles_flags import trainer_flags
from miles_norm.loss.checks import is_whole
from miles_norm.result import NormalizedRewards

__all__ = [
    "check_indices",
    "flat_samples",
    "refuse_settings_that_remove_rows",
    "refuse_steps_with_metadata",
    "warn_of_rows_left_out",
    "warn_of_trainers_without_mask_sums",
]

_SHARDING_MODULES: Final = ("miles.ray.rollout.train_data_conversion", "miles.ray.rollout", "slime.ray.rollout")
"""Where the trainers convert samples and cut the columns into shards."""

_NEEDING_METADATA: Final = {
    "multi_lora_n_adapters": "--multi-lora-n-adapters",
    "use_dynamic_global_batch_size": "--use-dynamic-global-batch-size",
}

logger = logging.getLogger("miles_norm")


def flat_samples(samples: Any) -> list[Any]:
    """The samples of a hook; nested ones, none, and what has no reward are refused."""
    rows, sizes, _ = flatten_samples(samples)
    if sizes is not None:
        raise SampleError(
            "samples of a hook",
            got=f"{len(sizes)} lists with {len(rows)} samples in them",
            expected="a flat list of samples",
            reason="the trainer flattens before it calls a hook, and takes one entry per sample back",
            remedy="pass the samples one after the other; group_index on each of them names its prompt group",
        )
    if not rows:
        raise SampleError(
            "samples of a hook",
            got="no samples",
            expected="a flat list of samples",
            reason="the trainer cannot take a step without a row",
            remedy="check what the rollout function returned, and that its filters left something",
        )
    return plain_rows(rows)


def refuse_settings_that_remove_rows(config: NormalizationConfig) -> None:
    """Settings that only the convert hook can carry out."""
    settings = config.model_dump()
    removing = {
        "missing_reward": config.missing_reward == "exclude",
        "untrained_rollouts": config.untrained_rollouts == "exclude",
        "truncated_rollouts": config.truncated_rollouts == "untrain",
        "zero_variance_groups": config.zero_variance_groups == "drop_from_loss",
        "min_group_size": config.min_group_size > 1,
    }
    found = [f"{name}={settings[name]!r}" for name, removes in removing.items() if removes]
    if found:
        raise ConfigError(
            "--custom-reward-post-process-path",
            got=", ".join(found),
            expected="settings that take no row out of the loss",
            reason="this hook returns rewards only: the trainer would still train and count the rows",
            remedy="use --custom-convert-samples-to-train-data-path "
            "miles_norm.integrations.miles.convert_samples_to_train_data, or leave these settings away",
        )


def refuse_steps_with_metadata(args: Any, rows: list[Any]) -> None:
    """Steps whose train data holds something that the convert hook is not given."""
    adapters = [n for n, adapter in enumerate(row_field(rows, "adapter")) if adapter is not None]
    flags = trainer_flags(args, _NEEDING_METADATA)
    found = []
    if adapters or flags.get("multi_lora_n_adapters"):
        with_adapter = f" ({format_rows(adapters)} with an adapter)" if adapters else ""
        found.append(f"a multi-LoRA step, --multi-lora-n-adapters{with_adapter}")
    if flags.get("use_dynamic_global_batch_size"):
        found.append("--use-dynamic-global-batch-size")
    if found:
        raise ConfigError(
            "--custom-convert-samples-to-train-data-path",
            got=" and ".join(found),
            expected="a step whose train data needs no metadata",
            reason="the trainer passes no metadata of the step (step_slots, dynamic_global_batch_size) to this hook, "
            "and does not train without",
            remedy="use --custom-reward-post-process-path miles_norm.integrations.miles.post_process_rewards; or call "
            "miles_norm.convert_samples_to_train_data(samples, config, metadata=...) where the metadata is at hand",
        )


def check_indices(rows: list[Any]) -> None:
    """Rows without an ``index`` that int64 holds; 3.0 and a tensor of 3 are the index 3, as of any id."""
    indices = row_field(rows, "index")
    bad = [n for n, index in enumerate(indices) if not _is_int64(plain_id(index))]
    if bad:
        raise SampleError(
            f"index of {format_rows(bad)}",
            got=", ".join(shown(indices[n]) for n in bad[:5]),
            expected="an integer of int64 on every row",
            reason="the trainer packs sample_indices as int64, and index names the rollout of a row without rollout_id",
            remedy="set Sample.index where the sample is made; siblings share it",
            rows=bad,
        )


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def warn_of_rows_left_out(result: NormalizedRewards, kept: Tensor, step_size: Any) -> None:
    """Name the rollouts that the train data is without.

    Raises:
        SampleError: nothing is left.
    """
    ids = result.index.rollout_ids
    excluded = [ids[rollout] for rollout in torch.nonzero(~result.counted_rollouts)[:, 0].tolist()]
    left = len(ids) - len(excluded)
    if not bool(kept.any()):
        raise SampleError(
            "train data",
            got=f"{len(ids)} rollouts, none of which counts",
            expected="at least one rollout to train on",
            reason="the trainer cannot take a step without a row",
            remedy="drop such a batch before conversion (--dynamic-sampling-filter-path), or loosen the settings that "
            "exclude rollouts",
        )
    text = f"{int((~kept).sum())} of {len(kept)} rows are left out of the train data"
    if excluded:
        text += f", those of {format_rows(excluded, 'rollout')}; {left} rollouts are left"
    if is_whole(step_size, low=1) and left % step_size:
        text += f", no multiple of --global-batch-size {step_size}: the trainer drops what does not fill a step"
    logger.warning(text)


def warn_of_trainers_without_mask_sums(result: NormalizedRewards) -> None:
    """Versions of the trainers that know no ``rollout_mask_sums`` drop that column and divide each row by itself."""
    if result.index.num_rollouts == result.index.num_rows:
        return
    loaded = [getattr(sys.modules.get(name), "__file__", None) for name in _SHARDING_MODULES]
    files = [file for file in loaded if file is not None]
    if files and not any(map(_reads_mask_sums, files)):
        logger.warning(
            "the trainer in %s knows no rollout_mask_sums: its loss divides each row by the row's own tokens, so that "
            "a rollout weighs more the more rows it has; update the trainer",
            ", ".join(files),
        )


@cache
def _reads_mask_sums(file: str) -> bool:
    """Whether a module, compiled or not, names the column; one that cannot be read, out of an archive, may do so."""
    try:
        return b"rollout_mask_sums" in Path(file).read_bytes()
    except OSError:
        return True
