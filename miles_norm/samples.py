"""The row schema: Miles' ``Sample`` fields, and stand-ins for the two small classes that its dumps pickle.

Neither torch nor numpy is imported here: rows are read, filtered and printed without them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from miles_norm.errors import SampleError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["AdapterRef", "RewardSpec", "Sample"]

_Scalar = str | int | None


class _Reference:
    """Unpickling without a constructor call, whichever way the original class stored its state."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        # A plain class pickles a dict, a frozen dataclass with slots a list in field order, any other class with
        # slots the pair (instance dict or None, slot dict).
        names = [entry.name for entry in fields(self)]  # type: ignore[arg-type]
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        if isinstance(state, list | tuple) and len(state) <= len(names):
            state = dict(zip(names, state, strict=False))
        # Attributes that a later version of the original class adds are left out, and a missing one is None.
        values = [state.get(name) for name in names] if isinstance(state, dict) else [state]
        if not isinstance(state, dict) or not all(isinstance(value, _Scalar) for value in values):
            raise SampleError(
                f"pickled {type(self).__name__}",
                got=f"the state {state!r:.200}",
                expected=f"{' and '.join(names)}, each a string, an integer or None",
                reason="these objects name things and hold nothing else",
                remedy=f"write the row again with a plain {type(self).__name__}",
            )
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class AdapterRef(_Reference):
    """The LoRA adapter that generated a row; stands in for ``miles.utils.types.AdapterRef`` when a dump is unpickled.

    >>> AdapterRef("math-lora", 0)
    AdapterRef(name='math-lora', slot=0)
    """

    name: str | None = None
    """Name of the adapter; rows of different adapters are never in one prompt group."""
    slot: int | None = None
    """Slot of the adapter in the inference engine."""

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "slot": self.slot}

    __setstate__ = _Reference.__setstate__


@dataclass(frozen=True, slots=True)
class RewardSpec(_Reference):
    """How a row was scored; stands in for ``miles.utils.types.RewardSpec`` when a dump is unpickled."""

    rm_type: str | None = None
    """Name of a built-in reward function."""
    custom_rm_path: str | None = None
    """Import path of a reward function of one's own."""

    def __getstate__(self) -> dict[str, Any]:
        return {"rm_type": self.rm_type, "custom_rm_path": self.custom_rm_path}

    __setstate__ = _Reference.__setstate__


@dataclass(slots=True)
class Sample:
    """One row: a token sequence that enters the train batch, with Miles' field names and defaults.

    Why: one schema to build rows by hand and to read dumps with. Functions that take samples accept any object or dict
    with these fields as well, so converting is never required.

    Shapes: T tokens in all, the last ``response_length`` of them are the response; ``loss_mask`` and the log-probs run
    over the response only.

    >>> row = Sample.from_dict({"tokens": [1, 2, 3], "reward": 1.0, "status": "COMPLETED", "run": "a"})
    >>> row.status, row.rollout_id, row.extra
    ('completed', None, {'run': 'a'})
    >>> row.to_dict()["run"]
    'a'
    """

    group_index: int | str | None = None
    """Prompt group of the row."""
    index: int | str | None = None
    """Number of the rollout in the batch; the rollout's id where ``rollout_id`` is None."""
    rollout_id: int | str | None = None
    """Rollout of the row; None when it is the only one of its rollout."""
    prompt: str | list[dict[str, Any]] = ""
    """Text or chat messages."""
    tokens: "list[int] | NDArray[np.integer[Any]]" = field(default_factory=list)
    """Ids of prompt and response; like mask and log-probs a list or an array."""
    multimodal_inputs: dict[str, Any] | None = None
    """Images, video or audio of the prompt."""
    multimodal_train_inputs: dict[str, Any] | None = None
    """The same as tensors for training."""
    response: str = ""
    """Text of the response."""
    response_length: int = 0
    """Number of response tokens."""
    label: str | None = None
    """Reference answer."""
    reward: float | dict[str, Any] | None = None
    """Score, or named scores; None while unscored."""
    loss_mask: "list[int] | NDArray[np.integer[Any]] | None" = None
    """1 on each trainable response token, else 0; None makes all of them trainable."""
    weight_versions: list[str] = field(default_factory=list)
    """Policy version of each generation."""
    rollout_log_probs: "list[float] | NDArray[np.floating[Any]] | None" = None
    """Log-probability of each response token under the policy that generated it."""
    rollout_routed_experts: Any = None
    """Experts chosen, int32 [T - 1, layers, top-k]."""
    rollout_indexer_topk: Any = None
    """Positions chosen by a sparse attention indexer."""
    remove_sample: bool = False
    """Takes the row out of the loss; it stays in the statistics."""
    teacher_log_probs: list[float] | None = None
    """Log-probabilities under a teacher."""
    opd_reverse_kl: list[float] | None = None
    """Reverse KL to the teacher, per token."""
    status: str = "pending"
    """pending, completed, truncated, aborted or failed."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever the agent and the environment record."""
    generate_function_path: str | None = None
    """Import path of the function that generated the row."""
    train_metadata: dict[str, Any] | None = None
    """Handed to the trainer as it is."""
    adapter: Any = None
    """AdapterRef or a mapping with its fields; None without adapters."""
    reward_spec: Any = None
    """RewardSpec or a mapping with its fields."""
    routing_key: str | None = None
    """Key that keeps a session on one engine."""
    non_generation_time: float = 0.0
    """Seconds spent outside the engine."""
    spec_info: dict[str, Any] = field(default_factory=dict)
    """Counters of speculative decoding; an absent counter is 0."""
    prefix_cache_info: dict[str, Any] = field(default_factory=dict)
    """Counters of the prefix cache; an absent counter is 0."""
    is_padding: bool = False
    """A row that fills a shard and counts in nothing."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys that are no field of this class, kept as they are."""

    def __getattr__(self, name: str) -> Any:
        # Called for unknown names only: a key of ``extra`` reads like a field, as it does in a dict of the same row.
        if name != "extra" and name in self.extra:
            return self.extra[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Read one row of a dump.

        Values are taken as they are, token lists are not copied. Missing keys take the defaults, unknown ones go to
        ``extra``. ``status`` may be an Enum or in capitals.

        Raises:
            SampleError: ``row`` is no mapping, or ``status`` is no string.
        """
        if not isinstance(row, Mapping):
            raise SampleError(
                "row of a rollout dump",
                got=f"a value of type {type(row).__name__}",
                expected="a mapping from field names to values",
                reason="the fields of a row are found by name",
                remedy="pass one dict per row, as Sample.to_dict() returns it",
            )
        known = {key: value for key, value in row.items() if key in _FIELD_NAMES}
        sample = cls(**known, extra={key: value for key, value in row.items() if key not in _FIELD_NAMES})
        sample.status = _status_text(sample.status)
        return sample

    def to_dict(self) -> dict[str, Any]:
        """Return the row as Miles writes it into a dump: one key per field, and ``extra`` flat among them.

        Values are the sample's own, not copies. ``is_padding`` is written for padding rows only, because other
        readers do not know it.

        Raises:
            SampleError: ``extra`` holds the name of a field.
        """
        clashes = sorted(_FIELD_NAMES & self.extra.keys())
        if clashes:
            raise SampleError(
                "Sample.extra",
                got=f"the keys {', '.join(clashes)}",
                expected="keys that are no field of Sample",
                reason="a row has one value per name",
                remedy="set the field instead",
            )
        row = {name: getattr(self, name) for name in _FIELD_ORDER if name != "is_padding" or self.is_padding}
        return {**row, **self.extra}


_FIELD_ORDER = tuple(entry.name for entry in fields(Sample) if entry.name != "extra")
_FIELD_NAMES = frozenset(_FIELD_ORDER)


def _status_text(status: Any) -> str:
    text = status.value if isinstance(status, Enum) else status
    if not isinstance(text, str):
        raise SampleError(
            "status of a row",
            got=f"a value of type {type(text).__name__}",
            expected="a string such as 'completed' or 'truncated', or an Enum with such a value",
            reason="truncated and aborted rows can be treated apart only when the status is readable",
            remedy="write the status as a string",
        )
    return text.lower()
