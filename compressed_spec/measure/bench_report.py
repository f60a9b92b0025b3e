"""What a benchmark found: as one JSON object, and as tables."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from compressed_spec.measure.bench_options import BenchOptions
from compressed_spec.measure.roof import TokenBytes
from compressed_spec.measure.timing import Summary

# Fields that are one measurement each: name, and what it says to a reader.
HEADLINES = {
    "speedup_off": "ours without speculation over transformers",
    "speedup_chain": "best chain over transformers",
    "speedup_tree": "best tree over transformers",
    "tree_over_off": "best tree over ours without speculation",
    "verify_d8_over_d1": "time to verify 8 nodes over 1",
    "plan_ms": "milliseconds to plan a round of 8 nodes",
    "commit_ms": "milliseconds to commit 3 of them",
    "bookkeeping_by_layers": "plan and commit, four times the layers over one a kind",
    "context_8k_over_512": "time of a token, long over short context",
    "prefill_speedup": "prefill over transformers'",
    "roof_fraction": "of the speed at which memory could be read",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All that was measured. Sides are "transformers", "off", "chain" and "tree".

    chain, tree: the shapes that were best on other prompts. logits_difference: see `check_logits`. num_differing_texts:
    of `num_texts` texts of a side, those that are not what `off` wrote. stage_milliseconds: mean of a round by stage,
    and "round", their sum. Fields of chain and tree in HEADLINES are None where no draft was
    accepted, or weights are random. batches: tokens a second by
    batch size and side. bookkeeping_milliseconds: plan and commit by number of layers. token_milliseconds: a plain
    round by context. bandwidth: bytes a second. roof_fraction: bytes a token over bandwidth, as a part of its time.
    peak_memory_alone, peak_memory: bytes of the process, before transformers came into it and in all. cache_bytes: of
    one sequence's state.
    """

    options: BenchOptions
    chain: str
    tree: str
    logits_difference: float
    num_differing_texts: dict[str, int]
    num_texts: int
    tokens_per_second: dict[str, Summary]
    seconds_per_text: dict[str, Summary]
    acceptance_length: dict[str, float]
    stage_milliseconds: dict[str, dict[str, float]]
    speedup_off: Summary
    speedup_chain: Summary | None
    speedup_tree: Summary | None
    tree_over_off: Summary | None
    batches: dict[int, dict[str, Summary]]
    verify_milliseconds: dict[int, Summary]
    verify_d8_over_d1: Summary
    plan_ms: Summary
    commit_ms: Summary
    bookkeeping_milliseconds: dict[int, Summary]
    bookkeeping_by_layers: Summary
    context_8k_over_512: Summary
    token_milliseconds: dict[int, Summary]
    prefill_tokens_per_second: dict[str, Summary]
    prefill_speedup: Summary
    token_bytes: TokenBytes
    bandwidth: Summary
    roof_fraction: Summary
    peak_memory_alone: int
    peak_memory: int
    cache_bytes: int

    def as_dict(self, run: Mapping[str, object]) -> dict[str, object]:
        """As JSON takes it: medians as plain numbers, their spreads under "spread". run: what identifies the run."""
        values: dict[str, object] = {}
        spread: dict[str, object] = {}
        for name in HEADLINES:
            summary: Summary | None = getattr(self, name)
            values[name] = None if summary is None else summary.median
            spread[name] = None if summary is None else summary.spread
        tables: dict[str, Mapping[str, Summary]] = {
            "tokens_per_second": self.tokens_per_second,
            "seconds_per_text": self.seconds_per_text,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "verify_ms": _by_text(self.verify_milliseconds),
            "plan_and_commit_ms_by_layers": _by_text(self.bookkeeping_milliseconds),
            "token_ms_by_context": _by_text(self.token_milliseconds),
            **{f"tokens_per_second_batch_{size}": table for size, table in self.batches.items()},
        }
        for name, table in tables.items():
            values[name] = {key: summary.median for key, summary in table.items()}
            spread[name] = {key: summary.spread for key, summary in table.items()}
        values |= {
            "chain": self.chain,
            "tree": self.tree,
            "acceptance_length": self.acceptance_length,
            "stage_ms": self.stage_milliseconds,
            "weight_bytes_per_token": self.token_bytes.weights,
            "state_bytes_per_token": self.token_bytes.state,
            "bytes_per_token": self.token_bytes.total,
            "bandwidth_bytes_per_second": self.bandwidth.median,
            "peak_memory_bytes": self.peak_memory,
            "peak_memory_alone_bytes": self.peak_memory_alone,
            "cache_bytes": self.cache_bytes,
            "logits_difference": self.logits_difference,
            "num_texts": self.num_texts,
            "num_differing_texts": self.num_differing_texts,
        }
        spread["bandwidth_bytes_per_second"] = self.bandwidth.spread
        return {**values, "spread": spread, "options": asdict(self.options), "run": dict(run)}

    def print(self, console: Console) -> None:
        """The report for a reader."""
        console.print(self._sides())
        console.print(self._stages())
        console.print(self._batches())
        console.print(self._parts())
        console.print(self._headlines())
        differing = {name: count for name, count in self.num_differing_texts.items() if count}
        console.print(
            "Every side wrote the same texts."
            if not differing
            else f"Texts that are not those without speculation, of {self.num_texts}: "
            + ", ".join(f"{name} {count}" for name, count in differing.items())
            + " (two tokens were nearly equal: rounding chose)."
        )
        if self.speedup_tree is None or self.speedup_chain is None:
            console.print(
                "Nothing is said of how fast speculation is: no draft was accepted, or the weights are random."
            )

    def _sides(self) -> Table:
        table = Table("", "tokens/s", "range", "tokens a round", "s a text", title="decoding, batch 1")
        labels = {"chain": f"chain {self.chain}", "tree": f"tree {self.tree}"}
        for name, summary in self.tokens_per_second.items():
            length = self.acceptance_length.get(name)
            table.add_row(
                labels.get(name, name),
                f"{summary.median:.1f}",
                _range(summary, ".1f"),
                "-" if length is None else f"{length:.2f}",
                f"{self.seconds_per_text[name].median:.2f}",
            )
        return table

    def _stages(self) -> Table:
        stages = list(next(iter(self.stage_milliseconds.values())))
        table = Table("", *stages, title="milliseconds of a round")
        for name, times in self.stage_milliseconds.items():
            table.add_row(name, *(f"{times[stage]:.2f}" for stage in stages))
        return table

    def _batches(self) -> Table:
        sides = list(next(iter(self.batches.values())))
        table = Table("batch", *sides, title="tokens/s, all rows together")
        for size, rates in self.batches.items():
            table.add_row(str(size), *(f"{rates[side].median:.1f}" for side in sides))
        return table

    def _parts(self) -> Table:
        table = Table("", "", title="parts", show_header=False)

        def row(label: str, by: Mapping[int, Summary]) -> None:
            table.add_row(label, "  ".join(f"{key}:\u00a0{summary.median:.2f}" for key, summary in by.items()))

        row("verify, ms by nodes", self.verify_milliseconds)
        row("plan + commit, ms by layers", self.bookkeeping_milliseconds)
        row("a token, ms by context", self.token_milliseconds)
        rates = "  ".join(f"{name}: {rate.median:.0f}" for name, rate in self.prefill_tokens_per_second.items())
        table.add_row(f"prefill of {self.options.context}, tokens/s", rates)
        reads = self.token_bytes
        table.add_row("bytes a token", f"{reads.weights / 1e6:.2f} MB of weights, {reads.state / 1e6:.2f} MB of state")
        table.add_row(
            "memory", f"read at {self.bandwidth.median / 1e9:.1f} GB/s: {self._roof_ms:.2f} ms a token at least"
        )
        alone, both = (f"{size / 2**20:.0f} MiB" for size in (self.peak_memory_alone, self.peak_memory))
        table.add_row("peak memory", f"{alone}; {both} with transformers")
        return table

    @property
    def _roof_ms(self) -> float:
        return 1e3 * self.token_bytes.total / self.bandwidth.median

    def _headlines(self) -> Table:
        table = Table("", "median", "range", "", title="in short")
        for name, meaning in HEADLINES.items():
            summary: Summary | None = getattr(self, name)
            numbers = ("-", "-") if summary is None else (f"{summary.median:.3g}", _range(summary, ".3g"))
            table.add_row(name, *numbers, meaning)
        return table


def _by_text(by: Mapping[int, Summary]) -> dict[str, Summary]:
    return {str(key): summary for key, summary in by.items()}


def _range(summary: Summary, form: str) -> str:
    return f"{summary.low:{form}} .. {summary.high:{form}}"
