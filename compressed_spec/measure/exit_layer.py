"""Where to exit early: how often each layer, read through the output head, agrees with the whole model.

T = tokens of a text, V = vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compressed_spec.cache import Scratch
from compressed_spec.generate import generate
from compressed_spec.measure.planning.speedup import expected_tokens
from compressed_spec.rows import make_plan
from compressed_spec.target import TargetModel
from compressed_spec.tree import TokenTree

MOST_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitLayer:
    """What drafting with the first `layer` of `num_layers` layers gives.

    acceptance: probability that a draft after a right prefix is accepted.
    """

    layer: int
    num_layers: int
    acceptance: float

    def speedup(self, num_steps: int) -> float:
        """Tokens a round of chains this long, over its time in plain rounds, if a layer takes as long for any tree.

        Each step takes the first layers once. Verification takes all: its first ones for the last draft alone.
        """
        return expected_tokens(self.acceptance, num_steps) / (1 + num_steps * self.layer / self.num_layers)

    @property
    def num_steps(self) -> int:
        """The best number of steps, at most 8."""
        return max(range(1, MOST_STEPS + 1), key=self.speedup)


@torch.no_grad()
def exit_layers(
    model: TargetModel,
    prompts_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[ExitLayer]:
    """Every layer that a model can exit after, measured over texts that it writes after these prompts.

    temperature: of the texts. At 0, acceptance is how often the best tokens are the same; above, it is the mean overlap
    of the laws, which no verifier of chains exceeds. Raises ValueError as `generate` does, for no prompt, or for a
    model of one layer.
    """
    num_layers = model.state_spec().num_layers
    if num_layers < 2 or not prompts_ids:
        raise ValueError(f"Exit layers need a model of two layers or more, not {num_layers}, and at least one prompt.")
    outs = generate(
        model,
        prompts_ids,
        tree="off",
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_token_ids=[],
    )
    sums, count = torch.zeros(num_layers - 1, dtype=torch.float64), 0
    for prompt, out in zip(prompts_ids, outs, strict=True):
        laws = _laws(model, [*prompt, *out.token_ids[:-1]], len(out.token_ids), temperature)
        for layer, law_TV in enumerate(laws[:-1]):
            if temperature:
                sums[layer] += float(torch.minimum(law_TV, laws[-1]).sum())
            else:
                sums[layer] += float((law_TV.argmax(dim=-1) == laws[-1].argmax(dim=-1)).sum())
        count += len(out.token_ids)
    return [
        ExitLayer(layer=layer, num_layers=num_layers, acceptance=total / count)
        for layer, total in enumerate(sums.tolist(), start=1)
    ]


def _laws(model: TargetModel, text: Sequence[int], count: int, temperature: float) -> list[torch.Tensor]:
    """Laws `[T, V]` of the text's last `count` next tokens, one a layer; of the whole model last."""
    cache = model.new_cache(max_length=len(text), max_nodes=1, prefill_chunk=len(text), max_draft_nodes=1)
    plan = make_plan(cache.spec, cache.shape, [TokenTree.chain(text)], [0], [0], cache.device)
    scratch, after, laws = Scratch(cache, plan.slot_T), model.begin(plan), []
    for layer in range(1, cache.spec.num_layers + 1):
        after = model.advance(plan, scratch, after, layer)
        logits_TV = model.logits(after.newest[-count:]).double()
        laws.append(torch.softmax(logits_TV / (temperature or 1.0), dim=-1))
    return laws


def best_exit(layers: Sequence[ExitLayer]) -> ExitLayer:
    """The layer with the largest speed-up at its best number of steps; of equal ones the lowest."""
    return max(layers, key=lambda one: one.speedup(one.num_steps))
