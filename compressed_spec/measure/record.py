"""What a sweep writes down: one `SweepRecord` a point, one JSON line a record.

Metrics that vLLM's serving benchmark reports carry its names and units; times are of the caller's clock, so a token
counts when the engine hands it over.
"""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

SCHEMA = "compressed_spec.sweep/1"
NO_DRAFTER = "none"  # the drafter of a point without speculation
ACCEPTANCE_DEFINITION = (
    "acceptance_length: tokens emitted a round, the bonus token counted, pooled over requests, without the prefill's "
    "token and without last rounds that the text's end truncated; per_pos: by depth in the tree, unconditional (over "
    "all rounds)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every point of a sweep shares; a point is compared only with points of the same setup.

    model: as the user named it. checkpoint_hash, tokenizer_hash: "sha256:..." of the content, or "sha256-sampled:..."
    where a checkpoint is too large to be read whole. num_requests: a point. max_new_tokens: a request's most. seed: of
    the noise and of the arrivals. prompt_format: "template" (the checkpoint's own), "chat" or "raw"; prompt_template:
    its text, if it has one. stop_rule: what ends a text. cache_policy: how rows are given out. dtype: of weights,
    activations and KV; weights: the dtypes of the stored tensors. numerics: "fast" or "invariant". compiled: whether
    the model's pieces were. arrivals: how
    requests come at an arrival rate ("poisson", "uniform"). request_timeout: seconds from its arrival after which a
    request is given up, None for never. warmup_tokens: decoded a request before a point is timed. num_processes: that
    decode together.
    """

    model: str
    checkpoint_hash: str
    tokenizer_hash: str
    num_requests: int
    max_new_tokens: int
    seed: int
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    verifier: str
    stop_rule: str
    cache_policy: str
    prompt_format: str
    prompt_template: str | None
    dtype: str
    weights: tuple[str, ...]
    numerics: str
    compiled: bool
    device: str
    arrivals: str
    request_timeout: float | None
    warmup_tokens: int
    num_processes: int
    acceptance_definition: str = ACCEPTANCE_DEFINITION


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What ran a point. git_revision ends in "-dirty" if files differ from it; None outside a repository.

    versions: package -> version. num_threads: torch's. device_name: of the accelerator, or the processor's.
    memory_bytes: of the device. argv: the command.
    """

    versions: dict[str, str]
    git_revision: str | None
    platform: str
    cpu: str
    num_cores: int
    num_threads: int
    device_name: str
    memory_bytes: int
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request of a point; a failed one has an error and what it had reached.

    index: of its prompt in the dataset as used, 0 first. prompt_id, category: the dataset's, if it has them.
    finish_reason: "stop", "length", "timeout" or "error". arrival: seconds after the point's start. ttft_ms: arrival to
    the first token; e2el_ms: to the last; None if it never came. prefill_seconds, decode_seconds: its equal shares of
    the time of the steps that it took part in; over all requests they sum to the point's duration without idling.
    whole_rounds, whole_tokens: rounds that count for the acceptance length, and the tokens that they emitted.
    output_hash: sha256 of the token ids. correct: exact match, where the dataset has answers. well_formed: the form
    that the dataset asks for, if any. looping: some 8-gram comes four times or more.
    """

    index: int
    prompt_id: str
    category: str | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    error: str | None
    arrival: float
    ttft_ms: float | None
    e2el_ms: float | None
    prefill_seconds: float
    decode_seconds: float
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    whole_rounds: int
    whole_tokens: int
    output_hash: str
    correct: bool | None
    well_formed: bool | None
    looping: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Of final output tokens; drafted tokens that were rejected count nowhere.

    duration: seconds of wall time, first arrival to last token. completed, failed, timed_out: requests; tokens of all
    of them count. *_throughput: per second of duration. decode_throughput: tokens after each request's first, per
    second of the steps that admitted no request (nor idled). mean_concurrency: requests under way, over the duration.
    """

    duration: float
    completed: int
    failed: int
    timed_out: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    decode_throughput: float
    max_concurrent_requests: int
    mean_concurrency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Milliseconds over requests (ttft, tpot, e2el) or chunks (itl); None without a sample.

    ttft: arrival to first token. tpot: per token after the first, a request's mean. itl: between a request's chunks, as
    a client that reads a stream sees them; a chunk holds every token of a round. e2el: arrival to last token.
    """

    mean_ttft_ms: float | None
    median_ttft_ms: float | None
    std_ttft_ms: float | None
    p90_ttft_ms: float | None
    p95_ttft_ms: float | None
    p99_ttft_ms: float | None
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    std_tpot_ms: float | None
    p90_tpot_ms: float | None
    p95_tpot_ms: float | None
    p99_tpot_ms: float | None
    mean_itl_ms: float | None
    median_itl_ms: float | None
    std_itl_ms: float | None
    p90_itl_ms: float | None
    p95_itl_ms: float | None
    p99_itl_ms: float | None
    mean_e2el_ms: float | None
    median_e2el_ms: float | None
    std_e2el_ms: float | None
    p90_e2el_ms: float | None
    p95_e2el_ms: float | None
    p99_e2el_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBucket:
    """Rounds that began at output tokens start .. start + 31 of their texts, and the tokens that they emitted."""

    start: int
    num_rounds: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRecord:
    """What drafting gave, over all requests; `ACCEPTANCE_DEFINITION` says how it is counted.

    mean_request_acceptance_length: mean of the requests' own. draft_acceptance_rate: accepted over drafted tokens.
    candidates_per_round: drafted tokens verified a round, root not counted. num_accepted_tokens_per_pos: rounds that
    emitted a draft at depth 1, 2, ...; acceptance_rate_per_pos: the same over all rounds;
    conditional_acceptance_rate_per_pos: over the rounds that emitted one at the depth before. accepted_histogram:
    rounds that emitted 0, 1, 2, ... drafted tokens. by_output_position: along the texts.
    """

    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_length: float
    mean_request_acceptance_length: float
    draft_acceptance_rate: float
    candidates_per_round: float
    num_accepted_tokens_per_pos: tuple[int, ...]
    acceptance_rate_per_pos: tuple[float, ...]
    conditional_acceptance_rate_per_pos: tuple[float, ...]
    accepted_histogram: tuple[int, ...]
    by_output_position: tuple[PositionBucket, ...]
    num_rounds_off: int
    num_draft_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a point by stage; they sum to its duration. idle: no request was there (open loop)."""

    prefill: float
    draft: float
    verify: float
    sample: float
    commit: float
    idle: float
    other: float

    @property
    def total(self) -> float:
        return self.prefill + self.draft + self.verify + self.sample + self.commit + self.idle + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """Bytes. peak: the most during the point, weights, draft head and branch state included.

    peak_of: "device" (the allocator's), "process" (resident, since the point began) or "process-lifetime".
    weights: all tensors of the model; draft_head: those of the draft head among them. cache: pools, scratch included.
    """

    peak: int
    peak_of: str
    weights: int
    draft_head: int
    cache: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Shares of the requests that were answered; None where the dataset does not define it.

    accuracy: exact match. format_rate: the form asked for (`#### number`; code that parses). completion_rate: ended by
    themselves rather than by length or time. loop_rate: degenerate repetition.
    """

    accuracy: float | None
    format_rate: float | None
    completion_rate: float
    loop_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a point measured."""

    throughput: Throughput
    latency: Latency
    acceptance: AcceptanceRecord
    stages: StageSeconds
    memory: MemoryRecord
    quality: Quality
    requests: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """One point of a sweep: a line of the results file.

    point_id: hash of the point and its setup, the same on every run. tree: canonical name. drafter: as asked for, or
    `NO_DRAFTER` where the tree is "off"; drafter_used: what "auto" came to. tree_file_hash: of the file that the tree's
    name points to, if it does. batch_size: closed loop, requests always
    under way; open loop, the most. arrival_rate: requests a second, None for the closed loop. repeat: 0 first.
    prompts_hash: of the prompts' token ids. started_at: UTC, ISO 8601. error: why the point failed; results is None
    then.
    """

    schema: str
    point_id: str
    tree: str
    drafter: str
    batch_size: int
    temperature: float
    dataset: str
    arrival_rate: float | None
    repeat: int
    drafter_used: str | None
    tree_file_hash: str | None
    prompts_hash: str
    setup: Setup
    environment: Environment
    started_at: str
    error: str | None
    results: Results | None

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "SweepRecord":
        """The record of a line. Raises ValueError for what is none of this schema."""
        try:
            raw = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"It is not JSON ({error}).") from error
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError(f'It is no sweep record: one has "schema": "{SCHEMA}".')
        try:
            record: SweepRecord = _build(cls, raw)
        except (KeyError, TypeError) as error:
            raise ValueError(f"It lacks or misplaces fields of a sweep record ({error!r}).") from error
        return record


def _build(kind: Any, raw: Any) -> Any:
    """What `asdict` and JSON made of a value of type `kind`, undone."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if raw is None else _build(arguments[0], raw)
    if origin is tuple:
        return tuple(_build(arguments[0], item) for item in raw)
    if is_dataclass(kind):
        if not isinstance(raw, Mapping):
            raise TypeError(f"{kind} is an object")
        return typing.cast(type, kind)(**{f.name: _build(f.type, raw[f.name]) for f in fields(kind)})
    return raw
