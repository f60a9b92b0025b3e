"""What is compared: transformers' `generate`, and ours with some tree, each timed from the inside.

B = batch rows, L = tokens of a prompt
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from compressed_spec.generate import collect, make_decoder, make_requests
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.to_transformers import to_transformers
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.stats import RequestStats
from compressed_spec.target import TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Prompts continued greedily, and the seconds that it took.

    prefill_seconds: until the first tokens were there. decode_seconds: from there to the last. total_seconds: of the
    whole call. stats: of each request, where the side counts them.
    """

    texts: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    stats: tuple[RequestStats, ...] = ()

    @property
    def num_decoded(self) -> int:
        """Tokens that `decode_seconds` made: all but the first of each text, which come with the prefill."""
        return sum(map(len, self.texts)) - len(self.texts)


class Side(Protocol):
    """One way of decoding."""

    def decode(self, prompts_ids: Sequence[Sequence[int]], max_new_tokens: int, *, stop: bool) -> Decoded:
        """Continue prompts together, one batch row each. stop: end a text at the checkpoint's EOS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OurSide:
    """`generate` of this package."""

    model: TargetModel
    tree: str
    drafter: str = "auto"

    def decode(self, prompts_ids: Sequence[Sequence[int]], max_new_tokens: int, *, stop: bool) -> Decoded:
        begin = time.perf_counter()
        requests = make_requests(
            self.model,
            prompts_ids,
            SamplingParams(),
            max_new_tokens=max_new_tokens,
            stop_token_ids=None if stop else [],
        )
        decoder = make_decoder(
            self.model,
            requests,
            tree=self.tree,
            drafter=self.drafter,
            verifier="auto",
            batch_size=len(requests),
        )
        outs = collect(decoder, len(requests))
        total = time.perf_counter() - begin
        times = outs[0].stats.times
        return Decoded(
            texts=[out.token_ids for out in outs],
            prefill_seconds=times.prefill,
            decode_seconds=times.total - times.prefill,
            total_seconds=total,
            stats=tuple(out.stats for out in outs),
        )


@dataclass(slots=True, kw_only=True)
class _Stopwatch(BaseStreamer):  # type: ignore[misc]  # transformers carries no types
    """Hears of each token as `generate` finds it: when the first and the last one came."""

    moments: list[float] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSide:
    """transformers' `generate` with its own cache. Prompts of one call must be of equal length: no row is padded."""

    model: PreTrainedModel
    eos_token_ids: tuple[int, ...]

    def decode(self, prompts_ids: Sequence[Sequence[int]], max_new_tokens: int, *, stop: bool) -> Decoded:
        watch = _Stopwatch()
        begin = time.perf_counter()
        ids_BL = torch.tensor([list(prompt) for prompt in prompts_ids], device=self.model.device)
        sequences = self.model.generate(
            ids_BL,
            attention_mask=torch.ones_like(ids_BL),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(self.eos_token_ids) if stop else None,
            pad_token_id=0,
            streamer=watch,
        )
        total = time.perf_counter() - begin
        first, last = watch.moments[1], watch.moments[-1]  # the prompt itself is put before them
        texts = [self._text(row, stop=stop) for row in sequences[:, ids_BL.shape[1] :].tolist()]
        return Decoded(texts=texts, prefill_seconds=first - begin, decode_seconds=last - first, total_seconds=total)

    def _text(self, row: list[int], *, stop: bool) -> list[int]:
        """A row up to its own EOS; what follows is padding."""
        ends = [i for i, token in enumerate(row) if token in self.eos_token_ids] if stop else []
        return row[: ends[0] + 1] if ends else row


def transformers_side(model: DeepseekV4, folder: str | Path) -> TransformersSide:
    """transformers over this model's weights. Raises ValueError as `to_transformers` does."""
    peer = to_transformers(model, folder)
    peer.generation_config = GenerationConfig()  # the checkpoint's would bring EOS back where no stop is asked for
    return TransformersSide(model=peer, eos_token_ids=model.eos_token_ids)
