"""Stand-ins for the samples of Miles (29 fields) and slime (30): the same fields, defaults, methods and dump format."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Self


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Counters:
    """Counters of an engine, which a dump holds as a dict."""

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> Self:
        return cls(**{entry.name: values.get(entry.name, 0) for entry in fields(cls)})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))


@dataclass
class SpecInfo(Counters):
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class PrefixCacheInfo(Counters):
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


class Methods:
    """What trainers call on a sample."""

    Status = Status

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        own = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
        sample = cls(**{name: value for name, value in row.items() if name in own})
        sample.status = Status(row["status"])
        sample.spec_info = SpecInfo.from_dict(row["spec_info"])
        sample.prefix_cache_info = PrefixCacheInfo.from_dict(row["prefix_cache_info"])
        for name in row.keys() - own:
            setattr(sample, name, row[name])
        return sample

    def to_dict(self) -> dict[str, Any]:
        row = dict(vars(self))
        row["status"] = self.status.value
        row["spec_info"], row["prefix_cache_info"] = self.spec_info.to_dict(), self.prefix_cache_info.to_dict()
        return row

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)


@dataclass
class MilesSample(Methods):
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    adapter: Any = None
    reward_spec: Any = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)


@dataclass
class SlimeSample(Methods):
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: Any = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)


def prompt_group(*rewards: Any, kind: Any = MilesSample, **fields: Any) -> list[Any]:
    """One rollout per reward, each with a prompt of one token and a response of two."""
    return [
        kind(group_index=0, index=n, reward=reward, tokens=[7, 8, 9], response_length=2, **fields)
        for n, reward in enumerate(rewards)
    ]
