"""What the demo must reach on problems it was not trained on: whole answers, no loops, drafts that are accepted."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from compressed_spec.generate import generate
from compressed_spec.models.deepseek_v4.load import load_model
from compressed_spec.text import load_tokenizer

ANSWER_TOKENS = 300
CHAIN = "s3_k1_d4"
_FINAL = re.compile(r"#### -?[\d,]+(\.\d+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Shares of greedy answers that end in `#### number`, hold a degenerate loop, or are right; tokens a round.

    acceptance_without_loops: tokens a round of the answers that do not loop, because loops are easy to draft.
    """

    num_prompts: int
    well_formed: float
    looping: float
    correct: float
    acceptance_length: float
    acceptance_without_loops: float

    @property
    def passed(self) -> bool:
        return self.well_formed >= 0.8 and self.looping < 0.05 and self.acceptance_length >= 2.5


def is_well_formed(text: str) -> bool:
    """Whether an answer ends in a line `#### number`."""
    return _FINAL.search(text.strip().rsplit("\n", 1)[-1]) is not None


def has_loop(token_ids: Sequence[int], size: int = 8, times: int = 4) -> bool:
    """Whether some `size` tokens in a row come `times` times or more."""
    grams = Counter(tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1))
    return max(grams.values(), default=0) >= times


def measure_gate(folder: Path, prompts: Sequence[str], answers: Sequence[str], *, progress: bool = True) -> GateResult:
    """Answer GSM8K prompts with the checkpoint in `folder`, greedily, drafting with an MTP chain.

    answers: the reference answers, `#### n` at their end. Raises ValueError for no prompts.
    """
    if not prompts:
        raise ValueError("The gate needs at least one prompt: give some.")
    model, tokenizer = load_model(folder, progress=False), load_tokenizer(folder)
    prompts_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    well_formed = looping = correct = tokens = rounds = sound_tokens = sound_rounds = 0
    batch = 8
    for start in tqdm(range(0, len(prompts), batch), desc="answering", disable=None if progress else True):
        results = generate(
            model,
            prompts_ids[start : start + batch],
            tree=CHAIN,
            drafter="mtp",
            max_new_tokens=ANSWER_TOKENS,
            batch_size=batch,
        )
        for result, answer in zip(results, answers[start : start + batch], strict=True):
            text = tokenizer.decode(result.token_ids, skip_special_tokens=True).strip()
            finished = result.finish_reason == "stop" and is_well_formed(text)
            well_formed += finished
            loops = has_loop(result.token_ids)
            looping += loops
            correct += finished and text.rsplit("#### ", 1)[-1] == answer.rsplit("#### ", 1)[-1].strip()
            tokens += len(result.token_ids) - 1  # the first one comes from the prefill
            rounds += result.stats.num_rounds
            if not loops:
                sound_tokens += len(result.token_ids) - 1
                sound_rounds += result.stats.num_rounds
    count = len(prompts)
    return GateResult(
        num_prompts=count,
        well_formed=well_formed / count,
        looping=looping / count,
        correct=correct / count,
        acceptance_length=tokens / max(rounds, 1),
        acceptance_without_loops=sound_tokens / max(sound_rounds, 1),
    )
