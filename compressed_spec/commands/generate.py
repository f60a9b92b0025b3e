"""`compressed-spec generate`: continue prompts from a terminal."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from compressed_spec.chat import render_chat
from compressed_spec.decode import Decoder
from compressed_spec.generate import Usage, make_decoder, make_requests
from compressed_spec.launch import Process, Run, join
from compressed_spec.layout import CacheShape
from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint
from compressed_spec.models.deepseek_v4.load import checkpoint_folder, load_model
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.shaping import parse_shape
from compressed_spec.stats import RequestStats
from compressed_spec.target import DEFAULT_CHUNK
from compressed_spec.text import TextChunk, TextDecoder, load_tokenizer

STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCommand:
    """Continue prompts by tree speculation. The text is that of plain decoding, whatever the tree."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint: a folder, a hub id, or "demo"."""
    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="-")] = None
    """"-" reads the prompt from standard input."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A prompt; repeat for several."""
    prompt_file: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A file that holds a prompt ("-" = standard input); repeat for several."""
    tree: str = "s3_k2_d6"
    """"off", sN_kK_dD (draft steps, children a node, nodes), "auto", "dynamic", static:FILE or optimal_dD:FILE."""
    drafter: str = "auto"
    """"auto" (the checkpoint's own head, else n-gram), "mtp", "dspark", "early-exit" or "early-exit:LAYER", "ngram",
    "suffix", or the import path of your own class, such as package.module:Class."""
    verifier: str = "auto"
    """How drafts are accepted above temperature 0: "auto", "coupled", "target", or, for drafts drawn from the head's
    law, "leviathan", "block" (chains) and "traversal"."""
    max_new_tokens: int = 128
    """Most tokens a prompt."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the most probable tokens of this mass."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens of at least this part of the best one's probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that occurred are less likely."""
    seed: int = 0
    """Of the sampling noise; prompt i derives its own seed."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End the text before this string; repeat for several."""
    batch_size: int = 8
    """Prompts decoded together."""
    chat: bool = False
    """Each prompt is a user's message, in the tokenizer's chat template or DeepSeek-V4's own format."""
    system: str | None = None
    """System message of the chat."""
    thinking: bool = False
    """Let the chat model reason first."""
    reasoning_effort: Literal["low", "high", "max"] | None = None
    """How long it may reason."""
    chat_revision: Literal["v4", "0731"] = "v4"
    """Which checkpoint's chat format: V4-Flash / V4-Pro, or V4-Flash-0731."""
    device: str = "cpu"
    """Where to run, such as "cpu" or "cuda"; under torchrun each process takes a GPU of its own."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Of weights, activations and KV."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Of KV and compressed entries: as --dtype, or packed, in about half of bfloat16's memory."""
    numerics: Literal["fast", "invariant"] = "fast"
    """"invariant": bit for bit the same with speculation or without (CPU)."""
    compile: bool = False
    """Fuse the model's small operations first (CPU): two minutes of compiling, then rounds several times faster."""
    json: bool = False
    """Print JSON only: one object a prompt and line."""
    stream: bool = False
    """Print text as it comes; one prompt only."""

    def run(self) -> None:
        """Load, decode, print. Raises ValueError for a fault of the user's."""
        if not self.chat and (self.system or self.thinking or self.reasoning_effort):
            raise ValueError("--system, --thinking and --reasoning-effort shape a chat: add --chat.")
        if self.reasoning_effort and not self.thinking:
            raise ValueError("--reasoning-effort says how long to reason: add --thinking.")
        parse_shape(self.tree)  # a typing mistake must not cost the minutes that loading takes
        process = Process.from_environment()
        with join(process, device=process.device(self.device)) as run:
            self._run(run)

    def _run(self, run: Run) -> None:
        prompts = run.group.decide(self._prompts)
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
        with run.group.together():
            # First the checkpoint: the tokenizer's reader stumbles over a bad config.json, and blames its own files.
            folder = run.once_per_node(self.model, lambda: str(open_checkpoint(checkpoint_folder(self.model)).folder))
            tokenizer = load_tokenizer(folder)
            texts = TextDecoder(tokenizer, len(prompts), self.stop)
            prompts_ids = [self._encode(tokenizer, prompt) for prompt in prompts]
        model = load_model(
            folder,
            device=run.process.device(self.device),
            dtype=self.dtype,
            numerics=self.numerics,
            kv_dtype=self.kv_dtype,
            compile=self.compile,
            progress=run.process.is_first,
            group=run.group,
            room_for=self._smallest_cache(prompts_ids),
        )
        requests = make_requests(
            model,
            prompts_ids,
            params,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            stop_checks=[texts.stop_check(i) for i in range(len(prompts))],
        )
        decoder = make_decoder(
            model,
            requests,
            tree=self.tree,
            drafter=self.drafter,
            verifier=self.verifier,
            batch_size=min(self.batch_size, len(requests)),
        )
        outputs = [_Output() for _ in prompts]
        for chunk in texts.chunks(decoder):
            outputs[chunk.request].add(chunk)
            if self.stream and run.process.is_first:
                print(chunk.text, end="", flush=True)
        if run.process.is_first:
            self._print(decoder, outputs)

    def _smallest_cache(self, prompts_ids: Sequence[Sequence[int]]) -> CacheShape:
        """What is needed whatever the tree; options that make no sense are refused when the real one is made."""
        rows = max(min(self.batch_size, len(prompts_ids)), 1)
        return CacheShape(
            batch_size=rows,
            max_length=max(max(map(len, prompts_ids)) + self.max_new_tokens - 1, 1),
            max_nodes=rows,
            prefill_chunk=DEFAULT_CHUNK,
            max_draft_nodes=rows,
        )

    def _print(self, decoder: Decoder, outputs: Sequence["_Output"]) -> None:
        if self.stream:
            print()
        times = decoder.clock.times()
        for number, output in enumerate(outputs):
            stats = decoder.stats[number].build(times)
            if self.json:
                usage = Usage(prompt_tokens=decoder.num_prompt_tokens[number], completion_tokens=len(output.token_ids))
                record = {**output.as_dict(), "usage": asdict(usage), "stats": asdict(stats)}
                print(json.dumps(record, ensure_ascii=False))
            elif not self.stream:
                print(output.text)
        if not self.json:
            _print_summary([decoder.stats[i].build(times) for i in range(len(outputs))], outputs)

    def _encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
        if not self.chat:
            ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]  # how long it may be is the model's to say
            if not ids:
                raise ValueError(f"The prompt {prompt!r} has no tokens: give some text.")
            return ids
        messages = [{"role": "user", "content": prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return render_chat(
            tokenizer,
            messages,
            thinking=self.thinking,
            reasoning_effort=self.reasoning_effort,
            revision=self.chat_revision,
        )

    def _prompts(self) -> list[str]:
        prompts = list(self.prompt)
        if self.source not in (None, STDIN):
            raise ValueError(f"{self.source!r} is not an option: give a prompt as --prompt TEXT, or '-' to read it.")
        files = [*self.prompt_file, *([STDIN] if self.source else [])]
        if files.count(STDIN) > 1:
            raise ValueError("Standard input can be read once: name '-' a single time.")
        prompts += [_read(name) for name in files]
        if any("\ud800" <= letter <= "\udfff" for prompt in prompts for letter in prompt):  # how Python keeps odd bytes
            raise ValueError("A --prompt is not UTF-8 text: convert it.")
        if not prompts:
            raise ValueError("No prompt: give --prompt TEXT, --prompt-file FILE, or '-' for standard input.")
        if self.stream and (self.json or len(prompts) > 1):
            raise ValueError("--stream prints one prompt's text as it comes: leave out --json and further prompts.")
        return prompts


def _read(name: str) -> str:
    what = "Standard input" if name == STDIN else f"The prompt file {name}"
    try:
        return (sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()).decode()
    except OSError as error:
        raise ValueError(f"{what} cannot be read ({error.strerror}): name a text file.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8 text (byte {error.start} is wrong): convert it.") from error


@dataclass(slots=True, kw_only=True)
class _Output:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, chunk: TextChunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.finish_reason = chunk.finish_reason

    def as_dict(self) -> dict[str, object]:
        return {"text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason}


def _print_summary(stats: Sequence[RequestStats], outputs: Sequence[_Output]) -> None:
    tokens = sum(len(output.token_ids) for output in outputs)
    rounds, rounds_off = sum(one.num_rounds for one in stats), sum(one.num_rounds_off for one in stats)
    seconds = stats[0].times.total
    Console(stderr=True, highlight=False).print(
        f"{tokens} tokens in {rounds} rounds and {seconds:.2f} s ({tokens / seconds:.1f} tokens/s); acceptance length "
        + ", ".join(f"{one.acceptance_length:.2f}" for one in stats)
        + (f"; {rounds_off} rounds without speculation" if rounds_off else ""),
        style="dim",
    )
