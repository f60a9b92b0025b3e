"""What the demo is trained on: next tokens, chained draft steps, an early exit, and the indexers.

B = rows, L = tokens a row, T = B L, D = model width, V = vocabulary
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from compressed_spec.training.corpus import Batch
from compressed_spec.training.dense import DenseForward, Passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one update trains.

    micro_batches: whose gradients it adds up. select: whether the indexers' choice counts. quantize: whether weights
    are read as they will be stored. draft_steps: chained steps of the draft head. exit_layer: None for no early exit.
    skip: layers dropped.
    """

    micro_batches: int
    select: bool
    quantize: bool
    draft_steps: int
    exit_layer: int | None
    skip: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """`draft` by chain step; `teacher` is how much of a draft label is the target's own law and not the corpus;
    `unlikely` is of what the model should not repeat."""

    draft: tuple[float, ...] = (0.3, 0.2, 0.15)
    teacher: float = 0.5
    early_exit: float = 0.1
    index: float = 0.1
    unlikely: float = 6.0


@dataclass(slots=True, kw_only=True)
class Losses:
    """The sum to differentiate, its parts, and the forward that it came from."""

    total: torch.Tensor
    parts: dict[str, float]
    passed: Passed


_ALMOST_SURE = -1e-6  # log probability; of more, the logarithm of the rest is lost in float32


def next_token_loss(
    x_TD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_T: torch.Tensor,
    weights_T: torch.Tensor,
    unlikely_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted mean cross entropy; the unlikelihood `-log(1 - p)` of labels that should not be said (Welleck et al.,
    2019, arXiv:1908.04319), over the same norm; and log probabilities `[T, V]` (cut from the graph)."""
    log_TV = F.linear(x_TD, head_VD).log_softmax(-1)
    picked_T = log_TV.gather(1, labels_T.unsqueeze(1)).squeeze(1)
    norm = weights_T.sum().clamp(min=len(labels_T) / 4)  # where hardly anything is to be said, not much counts
    other_T = torch.log(-torch.expm1(picked_T.clamp(max=_ALMOST_SURE)))
    return -(picked_T * weights_T).sum() / norm, -(other_T * unlikely_T).sum() / norm, log_TV.detach()


def draft_loss(
    x_TD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_T: torch.Tensor,
    weights_T: torch.Tensor,
    teacher_TV: torch.Tensor,
    mix: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean cross entropy with a mix of the corpus and the target's law (log probabilities), and the share of
    tokens where both would choose alike."""
    log_TV = F.linear(x_TD, head_VD).log_softmax(-1)
    picked_T = log_TV.gather(1, labels_T.unsqueeze(1)).squeeze(1)
    taught_T = (teacher_TV.exp() * log_TV).sum(-1)
    norm = weights_T.sum().clamp(min=1e-6)
    same_T = (log_TV.detach().argmax(-1) == teacher_TV.argmax(-1)).to(weights_T.dtype)
    loss = -(((1 - mix) * picked_T + mix * taught_T) * weights_T).sum() / norm
    return loss, (same_T * weights_T).sum() / norm


class LossFunction:
    """All losses of one batch."""

    def __init__(self, forward: DenseForward, weights: LossWeights, *, compile: bool = False) -> None:
        self.forward, self.weights = forward, weights
        wrap: Callable[[Any], Any] = torch.compile(dynamic=False, fullgraph=True) if compile else lambda f: f
        self._next, self._draft = wrap(next_token_loss), wrap(draft_loss)

    def __call__(self, batch: Batch, stage: Stage) -> Losses:
        length, forward = self.forward.length, self.forward
        head_VD = forward.weights["head.weight"]

        def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
            return tensor[:, by : by + length].clone()

        labels_T, weights_T = shifted(batch.tokens, 1).flatten(), shifted(batch.weights, 1).flatten()
        unlikely_T = shifted(batch.unlikely, 1).flatten()
        passed = forward(shifted(batch.tokens, 0), select=stage.select, skip=stage.skip)
        main, repeats, teacher_TV = self._next(
            forward.hidden(passed.streams[-1]), head_VD, labels_T, weights_T, unlikely_T
        )
        total = main + self.weights.unlikely * repeats + self.weights.index * passed.index_loss
        named = {"main": main, "repeats": repeats, "index": passed.index_loss}
        parts = {name: float(loss.detach()) for name, loss in named.items()}
        if stage.exit_layer is not None:
            hidden_TD = forward.hidden(passed.streams[stage.exit_layer])
            early, _, _ = self._next(hidden_TD, head_VD, labels_T, weights_T, torch.zeros_like(unlikely_T))
            total = total + self.weights.early_exit * early
            parts["early_exit"] = float(early.detach())
        if stage.draft_steps:
            told = [shifted(batch.tokens, step + 1) for step in range(stage.draft_steps)]
            for step, streams_TMD in enumerate(forward.draft(passed.streams[-1], told, passed), start=1):
                # Chain t is judged by the target `step` tokens on, which a row's last tokens do not have.
                draft_weights_BL = shifted(batch.draft_weights, step + 1)
                draft_weights_BL[:, length - step :] = 0.0
                loss, agreed = self._draft(
                    forward.hidden(streams_TMD, "mtp.0."),
                    head_VD,
                    shifted(batch.tokens, step + 1).flatten(),
                    draft_weights_BL.flatten(),
                    teacher_TV.roll(-step, 0),
                    self.weights.teacher,
                )
                total = total + self.weights.draft[step - 1] * loss
                parts[f"draft_{step}"] = float(loss.detach())
                parts[f"agree_{step}"] = float(agreed)
        return Losses(total=total, parts=parts, passed=passed)
