"""`compressed-spec sweep`: measure trees, batch sizes and prompts, one line of JSON a point."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from compressed_spec.commands.sweep_summary import print_comparisons
from compressed_spec.launch import Process, join
from compressed_spec.measure.datasets import Dataset, read_dataset
from compressed_spec.measure.environment import checkpoint_hash, environment, tokenizer_hash
from compressed_spec.measure.expansion import TreeList, expand_names, expand_numbers, expand_trees
from compressed_spec.measure.point import Bench, Point, Workload
from compressed_spec.measure.processes import is_first_process, num_processes
from compressed_spec.measure.prompting import PromptFormat, prompting_for
from compressed_spec.measure.record import Environment, Setup, SweepRecord
from compressed_spec.measure.results import ResultsFile, open_results
from compressed_spec.measure.sweep import Grid, Outcome, run_sweep
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint, open_checkpoint
from compressed_spec.models.deepseek_v4.load import checkpoint_folder, load_model
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.text import load_tokenizer
from compressed_spec.verifying import make_verifier

LEAST_REQUESTS = 16
CACHE_POLICY = "a row a request, reserved in full and released at its end; nothing is reused of earlier prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCommand:
    """Measure every combination of the lists given, and write one JSON object a line. May be stopped at any moment:
    the same command goes on where it was, and tries again what failed."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint: a folder, a hub id, or "demo"."""
    output: str
    """Results file (JSON Lines); what it holds already is not measured again."""
    dataset: str = "gsm8k"
    """Prompts, in a list: gsm8k, mbpp, spec_bench (64 of each ship with the package; NAME:FILE reads the original file,
    gsm8k:hub and mbpp:hub fetch it), sharegpt:FILE, or a file with a prompt a line."""
    trees: str = "off,s3_k1_d4,s3_k2_d6"
    """Trees, in a list; braces are multiplied out, as in s{2..7}_k{1,2,3}_d{2..16}, without what makes no tree."""
    drafters: str = "auto"
    """Drafters, in a list; see generate."""
    batch_sizes: str = "1"
    """Requests under way at once, in a list."""
    temperatures: str = "0"
    """In a list; 0 is greedy."""
    arrival_rate: str | None = None
    """Requests a second, in a list: they come at their own times, whatever is under way, and --batch-sizes are the most
    that run at once. Without it, each of --batch-sizes clients has its next request when its last one is answered."""
    arrivals: Literal["poisson", "uniform"] = "poisson"
    """Gaps between requests at an arrival rate: drawn, or all the same."""
    requests: int | None = None
    """Of each point; 16, or the largest batch size if that is more. Several times the batch size keep it full."""
    max_new_tokens: int = 128
    """Most tokens a request."""
    repeats: int = 1
    """Times to measure each point; all points come once before any comes again, each time from another one on."""
    request_timeout: float | None = None
    """Seconds from its arrival after which a request is cut off."""
    warmup_tokens: int = 4
    """Decoded of a first batch before a point is timed."""
    prompt_format: PromptFormat = "auto"
    """"template" (prompt_template of tokenizer_config.json), "chat", "raw", or the first of these that there is."""
    ignore_eos: bool = False
    """Go on to --max-new-tokens whatever the text says."""
    verifier: str = "auto"
    """How drafts are accepted above temperature 0; see generate."""
    top_p: float = 1.0
    """Keep the most probable tokens of this mass."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens of at least this part of the best one's probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that occurred are less likely."""
    seed: int = 0
    """Of sampling and arrivals; the same in every repeat."""
    device: str = "cpu"
    """Where to run, such as "cpu" or "cuda"."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Of weights, activations and KV."""
    numerics: Literal["fast", "invariant"] = "fast"
    """"invariant": bit for bit the same with speculation or without (CPU)."""
    compile: bool = False
    """Fuse the model's small operations first (CPU): two minutes of compiling, then rounds several times faster."""

    def run(self) -> None:
        """Measure and write. Raises ValueError for a fault of the user's, before anything is measured."""
        trees, grid, num_requests = self._checked()
        process = Process.from_environment()
        with join(process, device=process.device(self.device)) as run:
            datasets = [read_dataset(name, num_requests) for name in grid.datasets]
            checkpoint = open_checkpoint(checkpoint_folder(self.model))
            tokenizer = load_tokenizer(checkpoint.folder)
            weights_hash = checkpoint_hash(checkpoint.folder)
            workloads = {one.name: self._workload(one, checkpoint, weights_hash, tokenizer) for one in datasets}
            with _results(self.output) as results:
                model = load_model(
                    checkpoint.folder,
                    device=process.device(self.device),
                    dtype=self.dtype,
                    numerics=self.numerics,
                    compile=self.compile,
                    progress=is_first_process(),
                    group=run.group,
                )
                bench = Bench(
                    model=model,
                    tokenizer=tokenizer,
                    environment=environment(model.device, sys.argv),
                    ignore_eos=self.ignore_eos,
                )
                outcome = _run(grid.points(), workloads, bench, num_requests, results)
                if results is not None:
                    ids = {workloads[point.dataset].point_id(point) for point in grid.points()}
                    mine = [record for record in results.records if record.point_id in ids]
                    self._report(trees, outcome, mine, bench.environment)
        if outcome.failures and not outcome.num_finished + outcome.num_skipped:
            raise ValueError(f"Every point failed, the first with: {outcome.failures[0].error}")

    def _checked(self) -> tuple[TreeList, Grid, int]:
        """What the options say. Raises ValueError."""
        trees = expand_trees(self.trees)
        batch_sizes = [int(size) for size in expand_numbers("--batch-sizes", self.batch_sizes, least=1, whole=True)]
        temperatures = expand_numbers("--temperatures", self.temperatures, least=0, whole=False)
        rates: list[float | None] = [None]
        if self.arrival_rate is not None:
            rates = list(expand_numbers("--arrival-rate", self.arrival_rate, least=0, whole=False))
        if 0 in rates:
            raise ValueError("--arrival-rate has 0, at which no request would come: use more.")
        for name, number in (
            ("--repeats", self.repeats),
            ("--max-new-tokens", self.max_new_tokens),
            ("--requests", 1 if self.requests is None else self.requests),
        ):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")
        if self.warmup_tokens < 0 or (self.request_timeout is not None and self.request_timeout <= 0):
            raise ValueError("--warmup-tokens must be 0 or more, and --request-timeout more than 0 seconds.")
        num_requests = max(LEAST_REQUESTS, *batch_sizes) if self.requests is None else self.requests
        if self.arrival_rate is None and max(batch_sizes) > num_requests:
            raise ValueError(
                f"{num_requests} requests never keep a batch of {max(batch_sizes)} busy: raise --requests to that."
            )
        for temperature in temperatures:
            SamplingParams(temperature=temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
        make_verifier("coupled" if self.verifier == "auto" else self.verifier)
        grid = Grid(
            trees=trees.names,
            drafters=expand_names(self.drafters),
            batch_sizes=batch_sizes,
            temperatures=temperatures,
            datasets=expand_names(self.dataset),
            arrival_rates=rates,
            repeats=self.repeats,
        )
        return trees, grid, num_requests

    def _workload(
        self, dataset: Dataset, checkpoint: Checkpoint, weights_hash: str, tokenizer: PreTrainedTokenizerBase
    ) -> Workload:
        prompting = prompting_for(tokenizer, self.prompt_format, dataset.task)
        eos = ", ".join(map(str, checkpoint.config.eos_token_ids))
        setup = Setup(
            model=self.model,
            checkpoint_hash=weights_hash,
            tokenizer_hash=tokenizer_hash(checkpoint.folder),
            num_requests=len(dataset.prompts),
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            verifier=self.verifier,
            stop_rule="length alone" if self.ignore_eos else f"EOS (token ids {eos}) or length",
            cache_policy=CACHE_POLICY,
            prompt_format=prompting.kind,
            prompt_template=prompting.template,
            dtype=self.dtype,
            weights=tuple(sorted({info.dtype for info in checkpoint.tensors.values()})),
            numerics=self.numerics,
            compiled=self.compile,
            device=self.device,
            arrivals=self.arrivals,
            request_timeout=self.request_timeout,
            warmup_tokens=self.warmup_tokens,
            num_processes=num_processes(),
        )
        prompts_ids = tuple(map(tuple, prompting.encode(tokenizer, dataset.prompts)))
        return Workload(dataset=dataset, prompts_ids=prompts_ids, setup=setup)

    def _report(self, trees: TreeList, outcome: Outcome, records: Sequence[SweepRecord], here: Environment) -> None:
        """What was done, on stderr; what it shows, on stdout."""
        done = (
            f"{outcome.num_finished} points measured, {outcome.num_skipped} were there, {len(outcome.failures)} failed"
        )
        more = f"; {trees.num_skipped} combinations make no tree" if trees.num_skipped else ""
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"{done}{more}. Results: {self.output}", style="dim", markup=False)
        for record in outcome.failures[:3]:
            console.print(f"failed: {_name(record)}: {record.error}", style="red", markup=False)
        if elsewhere := sum(_differs(record.environment, here) for record in records):
            console.print(
                f"{elsewhere} of these points are of another revision, version or machine: times do not compare.",
                style="yellow",
            )
        print_comparisons(records, Console(highlight=False))


def _run(
    points: Sequence[Point],
    workloads: dict[str, Workload],
    bench: Bench,
    num_requests: int,
    results: ResultsFile | None,
) -> Outcome:
    """With a bar that counts requests, so that the time left is told within a point too."""
    with tqdm(
        total=len(points) * num_requests, unit=" requests", smoothing=0.1, disable=None if is_first_process() else True
    ) as bar:

        def measure(point: Point, workload: Workload) -> SweepRecord:
            bar.set_description(f"{point.dataset} {point.tree} x{point.batch_size}")
            before = bar.n
            record = bench.measure(point, workload, lambda: bar.update(1))
            bar.update(num_requests - (bar.n - before))  # those of a point that failed
            return record

        def skip() -> None:
            bar.total = (bar.total or 0) - num_requests
            bar.refresh()

        return run_sweep(points, workloads, measure, results, skip)


@contextmanager
def _results(path: str) -> Iterator[ResultsFile | None]:
    """The open results file in the first process, None in the others."""
    if not is_first_process():
        yield None
        return
    with open_results(Path(path)) as results:
        if results.num_bytes_removed:
            print(f"{path}: removed a last line that had not been written to its end.", file=sys.stderr)
        yield results


def _name(record: SweepRecord) -> str:
    rate = "" if record.arrival_rate is None else f" at {record.arrival_rate:g}/s"
    return f"{record.dataset} {record.tree} {record.drafter} x{record.batch_size}{rate}"


def _differs(one: Environment, other: Environment) -> bool:
    return (one.versions, one.git_revision, one.device_name, one.num_threads) != (
        other.versions,
        other.git_revision,
        other.device_name,
        other.num_threads,
    )
