"""How far a verification's logits are from those of one token at a time, measured.

Both are the same numbers on paper. On a machine, sums over several nodes may be taken in another order, which matters
to the text only where the two best tokens are nearly equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from compressed_spec.target import TargetModel
from compressed_spec.topology import tree_around
from compressed_spec.tree import TokenTree, parse_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A position (index in prompt + continuation of the token being chosen) where the two choose differently.

    margin: between the two best logits, one token at a time. difference: largest of that row.
    """

    position: int
    margin: float
    difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """`num_rows` rows of logits compared.

    max_difference: largest |logit(verify) - logit(one token at a time)|. scale: largest |logit|. min_margin: smallest
    distance between the two best logits of a row, one token at a time. flips: rows whose best token differs.
    """

    num_rows: int
    max_difference: float
    scale: float
    min_margin: float
    flips: tuple[Flip, ...]


def verify_report(
    model: TargetModel, prompt_ids: Sequence[int], num_tokens: int, *, tree: str = "s3_k2_d6"
) -> VerifyReport:
    """Continue a prompt greedily, one token at a time, then verify the same `num_tokens` in trees, and compare.

    Each round verifies the continuation among siblings of other tokens, in a tree of the shape `tree`, and commits it
    as far as the tree reaches; a flip does not change what is verified next. Raises ValueError for "off", an unknown
    shape, fewer than one token, or a prompt that the model cannot take.
    """
    shape = parse_tree(tree)
    if shape is None:
        raise ValueError(
            "Tree 'off' verifies one token at a time: name a shape such as 's3_k2_d6' to compare with that."
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}.")
    cache = model.new_cache(batch_size=2, max_length=len(prompt_ids) + num_tokens, max_nodes=shape.num_nodes)
    text = [int(model.prefill(cache, [prompt_ids])[0].argmax())]
    cache.fork(0, 1)

    references = []
    for _ in range(num_tokens):
        verify = model.verify(cache, [TokenTree(tokens=text[-1:], parents=[-1])], rows=[0])
        cache.commit(verify, [[0]])
        references.append(verify.logits[0])
        text.append(int(verify.logits[0].argmax()))

    differences: list[float] = []
    margins: list[float] = []
    flips: list[Flip] = []
    while len(differences) < num_tokens:
        done = len(differences)
        candidates = tree_around(text[done], text[done + 1 : num_tokens], shape, model.vocab_size)
        verify = model.verify(cache, [candidates], rows=[1])
        path = candidates.path_to(len(candidates) - 1)
        cache.commit(verify, [path])
        for node in path:
            expected_V, actual_V = references[len(differences)], verify.logits[node]
            best = expected_V.topk(2).values
            differences.append(float((actual_V - expected_V).abs().max()))
            margins.append(float(best[0] - best[1]))
            if int(actual_V.argmax()) != int(expected_V.argmax()):
                position = len(prompt_ids) + len(differences)
                flips.append(Flip(position=position, margin=margins[-1], difference=differences[-1]))
    return VerifyReport(
        num_rows=num_tokens,
        max_difference=max(differences),
        scale=max(float(logits_V.abs().max()) for logits_V in references),
        min_margin=min(margins),
        flips=tuple(flips),
    )
