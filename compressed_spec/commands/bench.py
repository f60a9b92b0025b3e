"""`compressed-spec bench`: how fast a checkpoint decodes here, against transformers, and where the time goes."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console

from compressed_spec.measure import identity
from compressed_spec.measure.bench_options import CHAINS, TREES, BenchOptions
from compressed_spec.measure.prompts import BUNDLED, Texts, random_texts, read_texts
from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint
from compressed_spec.models.deepseek_v4.load import checkpoint_folder, load_model
from compressed_spec.text import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCommand:
    """Measure decoding in one run: transformers, plain, best chain and best tree in turns. Ends with one JSON line."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint: a folder, a hub id, or "demo"."""
    against: Literal["transformers"] = "transformers"
    """What to compare with, over the same weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and KV, on both sides."""
    numerics: Literal["fast", "invariant"] = "fast"
    """How our side computes."""
    compile: bool = True
    """Fuse our side's small operations first: two minutes of compiling."""
    threads: int | None = None
    """torch's threads, on both sides; by default as torch has them."""
    context: int = 512
    """Tokens of every prompt."""
    long_context: int = 8192
    """Tokens of context at which a token is timed against that."""
    max_new_tokens: int = 128
    """Most tokens a text."""
    num_prompts: int = 4
    """Prompts that are measured; two others choose the shapes."""
    repeats: int = 5
    """Turns of every timing."""
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    """Prompts decoded together."""
    chains: tuple[str, ...] = CHAINS
    """Chains to choose from, sN_k1_dD."""
    trees: tuple[str, ...] = TREES
    """Trees to choose from, sN_kK_dD."""
    drafter: str = "auto"
    """Who drafts, see `generate`."""
    random_weights: bool = False
    """The checkpoint's weights are random: what its head accepts means nothing, so ratios of speculation are null."""
    prompts: Path | None = None
    """JSONL: objects with "question" and "answer", or "prompt" and "completion"; bundled problems by default."""
    json: bool = False
    """Print the JSON line only."""

    def run(self) -> None:
        """Measure and print. Raises ValueError for a fault of the user's."""
        options = BenchOptions(
            context=self.context,
            long_context=self.long_context,
            max_new_tokens=self.max_new_tokens,
            num_prompts=self.num_prompts,
            repeats=self.repeats,
            batch_sizes=self.batch_sizes,
            chains=self.chains,
            trees=self.trees,
            drafter=self.drafter,
            random_weights=self.random_weights,
        )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}.")
        # Imported here: transformers' model takes a second, which the other commands need not wait for.
        from compressed_spec.measure.bench import run_bench

        folder = open_checkpoint(checkpoint_folder(self.model)).folder
        texts = self._texts(folder)
        threads = torch.get_num_threads()
        try:
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            model = load_model(
                folder,
                dtype=self.dtype,
                numerics=self.numerics,
                compile=self.compile and self.numerics == "fast",
                progress=not self.json,
            )
            if texts is None:
                texts = random_texts(model.vocab_size, model.eos_token_ids)
            report = run_bench(model, folder, texts, options, self._say)
            found = report.as_dict(self._identity(folder))
        finally:
            torch.set_num_threads(threads)
        if not self.json:
            report.print(Console(highlight=False))
        print(json.dumps(found, allow_nan=False))

    def _texts(self, folder: Path) -> Texts | None:
        """What to continue; None, for random tokens, without a tokenizer."""
        if (folder / "tokenizer.json").is_file():
            return read_texts(self.prompts or BUNDLED, folder, load_tokenizer(folder))
        if self.prompts is not None:
            raise ValueError(f"{folder} has no tokenizer.json: leave out --prompts, for random tokens instead.")
        return None

    def _identity(self, folder: Path) -> dict[str, object]:
        return {
            "model": self.model,
            "checkpoint_sha256": identity.checkpoint_hash(folder),
            "against": self.against,
            "dtype": self.dtype,
            "numerics": self.numerics,
            "compiled": self.compile and self.numerics == "fast",
            "prompts": None if self.prompts is None else str(self.prompts),
            "threads": torch.get_num_threads(),
            "environment": identity.thread_settings(),
            "versions": identity.versions(),
            "machine": identity.machine(),
            "argv": identity.command_line(),
            "git_revision": identity.git_revision(),
        }

    def _say(self, step: str) -> None:
        if not self.json:
            print(f"bench: {step}", file=sys.stderr, flush=True)
