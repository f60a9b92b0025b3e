"""When a text ends for another reason than a token or its length: transformers' stopping criteria, token by token.

L = tokens of a text, prompt included
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from compressed_spec.decode import StopCheck

StoppingCriteria = Callable[[torch.Tensor, Any], bool | torch.Tensor]


def criteria_check(
    criteria: StoppingCriteria, prompt_ids: Sequence[int], device: torch.device | str = "cpu"
) -> StopCheck:
    """One request's stop check out of a transformers `StoppingCriteriaList`, or any f(ids [1, L], scores) -> done.

    The criteria see the text as it stands after each token of a round, as if tokens had come one at a time; scores are
    None. They are not asked about tokens after the one at which they end the text.

    Raises ValueError if `criteria` cannot be called, and from the check if their answer is not one truth value.
    """
    if not callable(criteria):
        raise ValueError("stopping_criteria must be callable; wrap a list in transformers' StoppingCriteriaList.")

    def check(output_ids: Sequence[int], token_ids: Sequence[int]) -> int | None:
        before = len(prompt_ids) + len(output_ids)
        text_1L = torch.tensor([[*prompt_ids, *output_ids, *token_ids]], dtype=torch.int64, device=device)
        for count in range(1, len(token_ids) + 1):
            if _is_done(criteria(text_1L[:, : before + count], None)):
                return count
        return None

    return check


def _is_done(answer: bool | torch.Tensor) -> bool:
    if isinstance(answer, torch.Tensor) and answer.numel() != 1:
        raise ValueError(
            f"Stopping criteria must answer with one truth value for one text, got shape {tuple(answer.shape)}."
        )
    return bool(answer)
