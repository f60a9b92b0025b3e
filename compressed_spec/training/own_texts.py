"""A model's own greedy answers, as documents that show it what it should not repeat.

Greedy text of a small model falls into loops, which no corpus shows it and more of a corpus does not mend (Welleck et
al., 2019, arXiv:1908.04319).
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from compressed_spec.generate import generate
from compressed_spec.models.deepseek_v4.load import load_model
from compressed_spec.training.corpus import Encoded

_BATCH = 32


def repeated(ids: Sequence[int], *, start: int, size: int = 8, times: int = 3) -> frozenset[int]:
    """Indices, from `start` on, of tokens in a run of `size` tokens that is there for the `times`-th time or more."""
    seen: dict[tuple[int, ...], int] = {}
    found: set[int] = set()
    for i in range(start, len(ids) - size + 1):
        gram = tuple(ids[i : i + size])
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] >= times:
            found.update(range(i, i + size))
    return frozenset(found)


def write_own_texts(
    folder: Path, documents: Sequence[Encoded], *, max_new_tokens: int, processes: int, compile: bool = False
) -> list[Encoded]:
    """What the checkpoint in `folder` answers, greedily, to the documents' prompts."""
    prompts = [document.ids[: document.prompt_length] for document in documents]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(_answers, folder, prompts[i::processes], max_new_tokens, compile) for i in range(processes)
        ]
        answers = {i + j * processes: ids for i, part in enumerate(parts) for j, ids in enumerate(part.result())}
    return [
        Encoded(
            ids=[*prompt, *answers[i]],
            prompt_length=len(prompt),
            own=True,
            repeated=repeated([*prompt, *answers[i]], start=len(prompt)),
        )
        for i, prompt in enumerate(prompts)
    ]


def _answers(folder: Path, prompts_ids: list[list[int]], max_new_tokens: int, compile: bool) -> list[list[int]]:
    torch.set_num_threads(1)
    model = load_model(folder, compile=compile, progress=False)
    results = generate(
        model,
        prompts_ids,
        tree="s3_k1_d4",
        drafter="mtp",
        max_new_tokens=max_new_tokens,
        batch_size=_BATCH,
    )
    return [result.token_ids for result in results]
