"""One point of a sweep: what it is, and measuring it."""

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from compressed_spec.decode import Decoder, Request, check_request
from compressed_spec.drafting import make_drafter
from compressed_spec.generate import collect, make_decoder, make_requests, prepare_decoder
from compressed_spec.measure.datasets import Dataset
from compressed_spec.measure.load import Load, Run, Timeline, arrival_times
from compressed_spec.measure.memory import PeakMemory
from compressed_spec.measure.processes import from_first
from compressed_spec.measure.quality import Judgement, judge
from compressed_spec.measure.record import (
    NO_DRAFTER,
    SCHEMA,
    Environment,
    MemoryRecord,
    RequestRecord,
    Results,
    Setup,
    SweepRecord,
)
from compressed_spec.measure.summary import acceptance, latency, quality, request_record, throughput
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.shaping import AutoTree, parse_shape
from compressed_spec.stats import StatsBuilder
from compressed_spec.target import TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a sweep varies. arrival_rate: requests a second, None for the closed loop at `batch_size`."""

    tree: str
    drafter: str
    batch_size: int
    temperature: float
    dataset: str
    arrival_rate: float | None
    repeat: int

    @property
    def tree_file_hash(self) -> str | None:
        """Of the file in a name like static:FILE. Raises OSError if it is gone."""
        path = self.tree.partition(":")[2]
        return f"sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}" if path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A data set's prompts as a model gets them, and the setup that goes with them."""

    dataset: Dataset
    prompts_ids: tuple[tuple[int, ...], ...]
    setup: Setup

    @property
    def prompts_hash(self) -> str:
        """Of the token ids."""
        return "sha256:" + hashlib.sha256(json.dumps(self.prompts_ids).encode()).hexdigest()

    def point_id(self, point: Point) -> str:
        """The same for the same point on every run; how the user spelled the model's path does not matter."""
        setup = {name: value for name, value in asdict(self.setup).items() if name != "model"}
        identity = {"schema": SCHEMA, **asdict(point), "prompts_hash": self.prompts_hash, "setup": setup}
        identity["tree_file_hash"] = point.tree_file_hash
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What points are measured with; `ignore_eos` lets every text run to its full length."""

    model: TargetModel
    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    ignore_eos: bool

    def measure(self, point: Point, workload: Workload, on_finish: Callable[[], object] = lambda: None) -> SweepRecord:
        """Run a point. Whatever it raises, short of an interrupt, ends up in the record's `error`."""
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        results = error = drafter_used = None
        try:
            if point.drafter != NO_DRAFTER:
                drafter_used = type(make_drafter(point.drafter, self.model)).__name__
            results = self._results(point, workload, on_finish)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        if error is not None:  # outside the handler, whose traceback would keep a failed point's cache alive
            _free_memory(self.model.device)
        return SweepRecord(
            schema=SCHEMA,
            point_id=workload.point_id(point),
            **asdict(point),
            drafter_used=drafter_used,
            tree_file_hash=point.tree_file_hash,
            prompts_hash=workload.prompts_hash,
            setup=workload.setup,
            environment=self.environment,
            started_at=started_at,
            error=error,
            results=results,
        )

    def _results(self, point: Point, workload: Workload, on_finish: Callable[[], object]) -> Results:
        setup = workload.setup
        requests = self._requests(point, workload)
        refusals = [self._refusal(request) for request in requests]
        usable = [request for request, refusal in zip(requests, refusals, strict=True) if refusal is None]
        if not usable:
            raise ValueError(f"No request of {len(requests)} can run, the first because: {refusals[0]}")
        self._warm_up(point, usable, setup)
        watch = PeakMemory(self.model.device)
        decoder = prepare_decoder(
            self.model,
            usable,
            tree=point.tree,
            drafter="auto" if point.drafter == NO_DRAFTER else point.drafter,
            verifier=setup.verifier,
            batch_size=point.batch_size,
        )
        rate = point.arrival_rate
        arrivals = None if rate is None else arrival_times(len(requests), rate, setup.arrivals, setup.seed)
        run = Load(
            decoder,
            requests,
            concurrency=point.batch_size if arrivals is None else None,
            arrivals=arrivals,
            request_timeout=setup.request_timeout,
            agree=from_first,
            on_finish=on_finish,
        ).run()
        records = self._records(workload, decoder, run)
        return Results(
            throughput=throughput(run, records),
            latency=latency(run.timelines, records),
            acceptance=acceptance(decoder, run.timelines, records),
            stages=run.stages,
            memory=self._memory(watch, decoder),
            quality=quality(records),
            requests=tuple(records),
        )

    def _requests(self, point: Point, workload: Workload) -> list[Request]:
        setup = workload.setup
        return make_requests(
            self.model,
            workload.prompts_ids,
            SamplingParams(
                temperature=point.temperature,
                top_p=setup.top_p,
                top_k=setup.top_k,
                min_p=setup.min_p,
                repetition_penalty=setup.repetition_penalty,
            ),
            max_new_tokens=setup.max_new_tokens,
            seed=setup.seed,
            stop_token_ids=[] if self.ignore_eos else None,
        )

    def _refusal(self, request: Request) -> str | None:
        try:
            check_request(self.model, request)
        except ValueError as error:
            return str(error)
        return None

    def _warm_up(self, point: Point, requests: Sequence[Request], setup: Setup) -> None:
        """Compile and fault in whatever the point needs; not with its own drafter, which might remember the texts."""
        if not setup.warmup_tokens or isinstance(parse_shape(point.tree), AutoTree):  # "auto" times the model anyway
            return
        few = make_requests(
            self.model,
            [request.prompt_ids for request in requests[: point.batch_size]],
            requests[0].params,
            max_new_tokens=min(setup.warmup_tokens, setup.max_new_tokens),
            seed=setup.seed,
            stop_token_ids=[],
        )
        drafter = "auto" if point.drafter == NO_DRAFTER else point.drafter
        collect(
            make_decoder(
                self.model, few, tree=point.tree, drafter=drafter, verifier=setup.verifier, batch_size=point.batch_size
            ),
            len(few),
        )

    def _records(self, workload: Workload, decoder: Decoder, run: Run) -> list[RequestRecord]:
        records = []
        for index, (prompt, ids, timeline) in enumerate(
            zip(workload.dataset.prompts, workload.prompts_ids, run.timelines, strict=True)
        ):
            records.append(
                request_record(
                    index,
                    prompt.id,
                    prompt.category,
                    len(ids),
                    timeline,
                    StatsBuilder() if timeline.number is None else decoder.stats[timeline.number],
                    self._judgement(workload, index, timeline),
                )
            )
        return records

    def _judgement(self, workload: Workload, index: int, timeline: Timeline) -> Judgement:
        tokens = timeline.token_ids
        if timeline.error is not None:
            return Judgement(correct=None, well_formed=None, looping=False)
        if self.ignore_eos:  # what comes after the end is no part of the answer
            ends = [i for i, token in enumerate(tokens) if token in self.model.eos_token_ids]
            tokens = tokens[: ends[0] + 1] if ends else tokens
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return judge(workload.dataset.task, workload.dataset.prompts[index], text, tokens)

    def _memory(self, watch: PeakMemory, decoder: Decoder) -> MemoryRecord:
        peak = watch.peak()
        sizes = {name: tensor.nbytes for name, tensor in self.model.state_dict().items()}
        return MemoryRecord(
            peak=peak.num_bytes,
            peak_of=peak.of,
            weights=sum(sizes.values()),
            draft_head=sum(size for name, size in sizes.items() if name.startswith("mtp.")),
            cache=decoder.cache.nbytes,
        )


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
