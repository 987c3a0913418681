"""What the benchmarks are asked for, where each figure stands in their JSON, and why a figure is missed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A figure of one benchmark and its bound."""

    benchmark: str
    label: str
    value: Callable[[Figures], float | None]
    """None where a benchmark left it out and said why."""
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    why_missed: Callable[[Figures], str] | None = None

    def met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    @property
    def asked(self) -> str:
        sign, bound = ("≥", self.at_least) if self.at_least is not None else ("≤", self.at_most)
        return f"{sign} {bound:g}{self.unit}"


def compared(order: str, *, large: bool) -> Callable[[Figures], Figures]:
    def find(figures: Figures) -> Figures:
        found = [one for one in figures["comparisons"] if one["order"] == order and (one["rows"] > 10_000) == large]
        return found[0]

    return find


GROUPED, SHUFFLED = compared("grouped", large=True), compared("shuffled", large=True)
FEW = compared("grouped", large=False)


def slow_lists(figures: Figures) -> str:
    profile, plain = figures["lists"]["profile_ms"], figures["plain_ms"]
    counting, reading = profile["counting_masks"], profile["reading_fields"]
    return (
        f"every entry of a mask that is a Python list has to be looked at. Of {profile['conversion']:.1f} ms, "
        f"{counting:.1f} are that, through a buffer and without a sum, and {reading:.1f} read the fields of the rows. "
        f"The plain conversion takes {plain:.1f} ms, {profile['two_sums_of_lists']:.1f} of them its two sums; if "
        f"counting were all, the ratio would be {plain / counting:.1f}."
    )


def slow_arrays(figures: Figures) -> str:
    profile, plain, rows = figures["arrays"]["profile_ms"], figures["plain_ms"], figures["rows"]
    counting, reading = profile["counting_masks"], profile["reading_fields"]
    floor = counting + reading
    return (
        f"of {profile['conversion']:.2f} ms for {rows} rows, reading twenty attributes of each takes {reading:.2f} "
        f"and looking at the bytes of its mask once {counting:.2f}: {floor * 1e3 / rows:.2f} us a row that no "
        f"conversion of objects can do without, where {plain / 100:.2f} ms in all was asked for. These two alone are "
        f"{plain / floor:.0f} times faster than the plain conversion."
    )


def steep_growth(figures: Figures) -> str:
    first, last = (
        {name: points[end][1] / points[end][0] * 1e9 for name, points in figures["growth"].items()} for end in (0, -1)
    )
    return (
        f"what does not fit the caches costs more a row, on a busy machine most of all. Copying the columns alone, in "
        f"the same run, has the exponent {figures['growth_exponents']['copy']:.2f}: from {first['copy']:.1f} to "
        f"{last['copy']:.1f} ns a row, while normalization goes from {first['ours']:.1f} to {last['ours']:.1f}."
    )


def steep_schedule(figures: Figures) -> str:
    costs = ", ".join(f"{seconds / rows * 1e6:.2f} at {rows}" for rows, seconds in figures["growth"])
    return (
        f"microseconds a row are {costs}. Updates are scheduled one by one, in the same steps however many there are; "
        "what grows is the time of a step, as the rows of a large batch come from memory that no cache holds."
    )


def steep_assembly(figures: Figures) -> str:
    costs = ", ".join(f"{line['ours'] / line['tokens'] * 1e9:.0f} at {line['tokens']}" for line in figures["linear"])
    return (
        f"nanoseconds a token are {costs}: large conversations do not fit the caches, and the longer a call takes, the "
        "more a busy machine is in its way. Appending the tokens to lists, in the same run, has the exponent "
        f"{figures['growth_exponents']['appended']:.2f}."
    )


def kept_of_dumps(figures: Figures) -> float:
    run = figures["run"]
    return float(run["kept_bytes_per_dump"] * (run["steps"] - 1) / run["one_dump_bytes"])


def slowest_weights(figures: Figures) -> float:
    name = "times_faster_than_tensor_loop"
    return min(one[name] for one in figures["weights"] if name in one)


TARGETS = (
    Target("normalize", "grouped rows, times a tensor loop of the same bits",
           lambda f: GROUPED(f)["times_faster_than_tensor_loop"], at_least=300, unit="x"),
    Target("normalize", "grouped rows, time of one stable sort",
           lambda f: GROUPED(f)["times_one_stable_sort"], at_most=3, unit="x"),
    Target("normalize", "shuffled rows, times a tensor loop",
           lambda f: SHUFFLED(f)["times_faster_than_tensor_loop"], at_least=100, unit="x"),
    Target("normalize", "2,500 rows, times a tensor loop",
           lambda f: FEW(f)["times_faster_than_tensor_loop"], at_least=100, unit="x"),
    Target("normalize", "2,500 rows", lambda f: FEW(f)["ms"], at_most=0.6, unit=" ms"),
    Target("normalize", "growth exponent", lambda f: f["growth_exponents"]["ours"], at_most=1.05,
           why_missed=steep_growth),
    Target("normalize", "peak extra memory, bytes a row",
           lambda f: max(f["peak_bytes_per_row"].values()), at_most=100),
    Target("convert", "from lists, times a plain conversion",
           lambda f: f["lists"]["times_faster"], at_least=3, unit="x", why_missed=slow_lists),
    Target("convert", "from arrays, times a plain conversion",
           lambda f: f["arrays"]["times_faster"], at_least=100, unit="x", why_missed=slow_arrays),
    Target("convert", "from arrays, peak extra memory of the payload",
           lambda f: f["arrays"]["peak_share_of_payload"] * 100, at_most=5, unit="%"),
    Target("convert", "decoding safetensors, times decoding to lists",
           lambda f: f["decoding_s"]["lists"] / f["decoding_s"]["columns"], at_least=20, unit="x"),
    Target("loss_weights", "all aggregations, times a tensor loop",
           slowest_weights, at_least=100, unit="x"),
    Target("loss_weights", "waits of the host", lambda f: max(w["waits"] for w in f["weights"]), at_most=0),
    Target("shard", "schedule on 64 ranks", lambda f: f["schedule"]["seconds"], at_most=1, unit=" s"),
    Target("shard", "small cases, fullest rank above an exact search",
           lambda f: (f["small_cases"] - 1) * 100, at_most=1, unit="%"),
    Target("shard", "growth exponent", lambda f: f["growth_exponent"], at_most=1.1, why_missed=steep_schedule),
    Target("ray_scale", "index columns to the driver, bytes a row", lambda f: f["index_bytes_per_row"], at_most=64),
    Target("ray_scale", "bytes of tokens at the driver", lambda f: f["token_bytes_at_the_driver"], at_most=0),
    Target("cli_scale", "peak memory above that of three rows, bytes a row",
           lambda f: f["peak_bytes_per_row_above_floor"], at_most=600),
    Target("audit", "page of 100,000 rows in a browser",
           lambda f: f["page"] and f["page"]["seconds"], at_most=2, unit=" s"),
    Target("audit", "what is kept of all dumps, times what one takes", kept_of_dumps, at_most=2, unit="x"),
    Target("session_assembly", "growth exponent in tokens", lambda f: f["growth_exponents"]["ours"], at_most=1.05,
           why_missed=steep_assembly),
    Target("session", "server time of a turn, one client, any journal",
           lambda f: max(one["turn_p50_s"] for one in f.values()) * 1e3, at_most=2, unit=" ms"),
    Target("session", "turns per second, many sessions",
           lambda f: 1 / max(one["turn_share_s"] for one in f.values()), at_least=198),
)  # fmt: skip
"""Bounds at full size; at the sizes of a short run some are not reached, as overhead weighs more there."""
