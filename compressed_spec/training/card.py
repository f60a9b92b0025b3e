"""The demo's model card and its picture of losses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressed_spec.training.corpus import PROMPT_TEMPLATE
from compressed_spec.training.gate import ANSWER_TOKENS, CHAIN, GateResult
from compressed_spec.training.recipe import Recipe

PICTURE, PHASES_FILE = "losses.png", "training.json"
_SMOOTHING = 25
_CURVES = {
    "main": "next token",
    "draft_1": "draft step 1",
    "draft_3": "draft step 3",
    "early_exit": "early exit (a random layer)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A run of training that went into a checkpoint, on `what`: "corpus" or "own texts".

    tokens, seconds: seen and used. lr, adam_lr: peaks for Muon and Adam. unlikely: weight of what should not be said.
    """

    what: str
    steps: int
    tokens: int
    seconds: float
    lr: float
    adam_lr: float
    unlikely: float


def write_phases(folder: Path, phases: Sequence[Phase]) -> None:
    """Keep with a checkpoint how it came to be."""
    rows = [asdict(phase) for phase in phases]
    (folder / PHASES_FILE).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read_phases(folder: Path) -> list[Phase]:
    """How a checkpoint came to be."""
    return [Phase(**row) for row in json.loads((folder / PHASES_FILE).read_text(encoding="utf-8"))]


def read_log(path: Path) -> list[dict[str, Any]]:
    """The log's rows, each step once: after an interruption the later one counts."""
    rows = {row["step"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    return [rows[step] for step in sorted(rows)]


def final_losses(logs: Sequence[Sequence[dict[str, Any]]], count: int = 50) -> dict[str, float]:
    """Means of the last steps that had each loss."""
    names = ("main", "repeats", "early_exit", "draft_1", "draft_2", "draft_3", "agree_1", "agree_2", "agree_3", "index")
    values = {name: [row[name] for log in logs for row in log if name in row][-count:] for name in names}
    return {name: sum(v) / len(v) for name, v in values.items() if v}


def draw_losses(logs: Sequence[Sequence[dict[str, Any]]], path: Path, *, first: Sequence[Phase] = ()) -> None:
    """A small picture of the losses over tokens seen, run after run (needs matplotlib).

    first: what came before these runs, of which there is no log.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    seen, log = sum(phase.tokens for phase in first), list[dict[str, Any]]()
    for part in logs:
        log += [row | {"tokens": seen + row["tokens"]} for row in part]
        seen = log[-1]["tokens"] if log else seen
    for name, label in _CURVES.items():
        rows = [row for row in log if name in row]
        chunks = [rows[i : i + _SMOOTHING] for i in range(0, len(rows), _SMOOTHING)]
        axes.plot(
            [chunk[-1]["tokens"] / 1e6 for chunk in chunks],
            [sum(row[name] for row in chunk) / len(chunk) for chunk in chunks],
            label=label,
            linewidth=1.2,
        )
    axes.set(xlabel="million tokens", ylabel="loss (nats a token)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=90)


def model_card(recipe: Recipe, phases: Sequence[Phase], final: Mapping[str, float], gate: GateResult | None) -> str:
    """README.md of the checkpoint. recipe: of the first run; final: mean losses of the last steps."""
    losses = "\n".join(f"| {name} | {value:.3f} |" for name, value in final.items())
    runs = "\n".join(
        f"| {phase.what} | {phase.tokens:,} | {phase.steps:,} | {phase.seconds / 60:.0f} | {phase.lr:g}, "
        f"{phase.adam_lr:g} | {phase.unlikely:g} |"
        for phase in phases
    )
    tokens, minutes = sum(phase.tokens for phase in phases), sum(phase.seconds for phase in phases) / 60
    return f"""---
license: apache-2.0
language: en
tags: [deepseek_v4, speculative-decoding]
---

# Demo checkpoint

A very small DeepSeek-V4, for trying out speculative decoding without a GPU or a download. It has every part of the
architecture (sliding window, CSA with its indexer, HCA, hash and score routing, hyper-connections, an MTP head) and is
stored as DeepSeek-V4 is: FP8 (E4M3, E8M0 scales of 128 x 128 blocks), FP4 experts (E2M1, E8M0 scales of 32 columns),
BF16 and F32. It writes texts in the manner of grade-school word problems; **its answers are mostly wrong**, and it is
good for nothing but tests and demonstrations.

13.0 M parameters, 8 layers, 2048 tokens of byte-level BPE with single digits, 16384 positions
(trained on rows of {recipe.length}).

## Prompt

`prompt_template.txt` (also `prompt_template` in tokenizer_config.json):

```
{PROMPT_TEMPLATE}
```

The tokenizer puts the BOS token in front; an answer ends with `#### number` and the EOS token.

## Training

Corpus: GSM8K, train part (openai/grade-school-math, MIT); MBPP, train part, task_id 601 to 974
(google-research/mbpp, CC-BY-4.0); a few modules of Python's standard library (PSF licence). No test part of either.

{tokens:,} tokens, {minutes:.0f} minutes on 2 CPU cores that other work shared, by `python scripts/train_demo.py`:

| on | tokens | steps | minutes | peak learning rate: Muon (matrices), Adam (the rest) | unlikelihood |
|---|---|---|---|---|---|
{runs}

* Losses: next token; MTP steps 1 to 3, chained, half of each label the target's own law; an early exit from a random
  layer, with layer dropout; for the indexers, KL from the attention's mass on the entries they chose.
* The last {100 * (1 - recipe.quantize_from):.0f} % of a run over the corpus, and all later runs, read weights rounded
  to FP8 and FP4, gradients straight through.
* Own texts: what the checkpoint of the run before answered, greedily, to prompts of the training part, beside as much
  of the corpus. The draft head learns to draft them; the model, where some 8 tokens come for a third time, not to say
  them (unlikelihood, Welleck et al. 2019); what repeats itself in the texts of
  earlier runs is shown again.

![losses]({PICTURE})

Means of the last 50 steps (`agree_k`: share of tokens where draft step k and the target would choose alike):

| | |
|---|---|
{losses}

## Measured

{_measured(gate)}
"""


def _measured(gate: GateResult | None) -> str:
    if gate is None:
        return "Not yet."
    return f"""On {gate.num_prompts} GSM8K test problems, greedy, at most {ANSWER_TOKENS} tokens, this folder loaded:

| | | wanted |
|---|---|---|
| answers that end in `#### number` | {100 * gate.well_formed:.1f} % | >= 80 % |
| answers with a loop (8 tokens, four times or more) | {100 * gate.looping:.1f} % | < 5 % |
| tokens a round, MTP chain `{CHAIN}`, bonus counted | {gate.acceptance_length:.2f} | >= 2.5 |
| the same, of answers without a loop | {gate.acceptance_without_loops:.2f} | |
| answers that are right | {100 * gate.correct:.1f} % | |"""
