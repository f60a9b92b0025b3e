"""Plain sampling, said a second time and as simply as can be: what every way of decoding must agree with.

V = vocabulary
"""

from collections.abc import Callable, Sequence

import torch

from compressed_spec.noise import gumbel_noise, seed_tensor
from compressed_spec.testing.models import Reference

Process = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]


def plain_law(
    logits_V: torch.Tensor, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Probabilities `[V]` after temperature, top-k, top-p and min-p in this order; filters assume no ties."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).double()
    p_V = torch.softmax(logits_V.double() / temperature, dim=-1)
    best_first = p_V.argsort(descending=True).tolist()
    if top_k:
        p_V[best_first[top_k:]] = 0
        p_V /= p_V.sum()
    mass_before = 0.0
    for token in best_first:
        mass = float(p_V[token])
        if mass_before >= top_p:
            p_V[token] = 0
        mass_before += mass
    p_V[p_V < min_p * p_V.max()] = 0
    return p_V / p_V.sum()


def plain_text(
    reference: Reference,
    prompt_ids: Sequence[int],
    count: int,
    *,
    seed: int = 0,
    process: Process | None = None,
    **law: float,
) -> list[int]:
    """`count` tokens, one forward each: argmax of log p plus the request's noise (without it at temperature 0).

    process(prompt, new tokens, logits) gives the scores that `plain_law`, with the options `law`, turns into p.
    """
    prompt, new = list(prompt_ids), list[int]()
    while len(new) < count:
        scores_V = reference.after(prompt + new).logits_V
        if process is not None:
            scores_V = process(prompt, new, scores_V.clone())
        log_p_V = plain_law(scores_V, **law).log()  # type: ignore[arg-type]
        position = torch.tensor([len(prompt) + len(new)])
        noise_V = gumbel_noise(seed_tensor([seed]), position, len(log_p_V))[0]
        new.append(int((log_p_V + noise_V).argmax()))
    return new
