"""What several processes that share a model must answer like one; and how to start them without torchrun.

V = vocabulary, T = nodes
"""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compressed_spec.generate import generate
from compressed_spec.target import TargetModel
from compressed_spec.tree import TokenTree

# A text by plain decoding, and every way to speculate that must give the same: options of `generate`.
_PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 7},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "min_p": 0.01, "seed": [3, 1, 4, 1]},
}
_TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "s3_k1_d4"},
    "tree": {"tree": "s3_k2_d6"},
    "dynamic": {"tree": "dynamic_s3_k2_d6"},
    "auto": {"tree": "auto_s2_k2_d4"},
    "early-exit": {"drafter": "early-exit:2", "tree": "s2_k2_d5"},
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
}
# Drafts that are drawn from the head: not the tokens of plain decoding, but the same in any number of processes.
_DRAWN: dict[str, dict[str, Any]] = {
    "leviathan": {"verifier": "leviathan", "tree": "s3_k1_d4"},
    "block": {"verifier": "block", "tree": "s3_k1_d4"},
    "traversal": {"verifier": "traversal", "tree": "s3_k2_d6"},
}
_FEW = ("greedy tree", "sampled tree", "traversal")
_ONCE = ("greedy auto", "greedy early-exit")  # whose drafts are not the head's


def ways(model: TargetModel, *, every: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name to (name of the plain text that it must equal, "" for its own in one process; options of `generate`).

    every: all of them, rather than a few that differ most.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for text, options in _PLAIN.items():
        for tree, more in _TREES.items():
            found[f"{text} {tree}"] = (text, options | more)
    for rule, options in _DRAWN.items():
        found[rule] = ("", options | {"temperature": 1.0, "seed": 5})
    few = _FEW if model.own_drafter == "dspark" else (*_FEW, *_ONCE)
    return found if every else {name: found[name] for name in few}


def prompts(vocab_size: int) -> list[list[int]]:
    """Of very different lengths."""
    return [
        [(7 * i + start) % vocab_size for i in range(count)] for start, count in ((3, 1), (5, 37), (11, 4), (2, 18))
    ]


def text_of(model: TargetModel, options: Mapping[str, Any]) -> list[list[int]]:
    """Token ids for all prompts, three in a batch while the fourth waits."""
    outs = generate(
        model, prompts(model.vocab_size), max_new_tokens=14, stop_token_ids=[], batch_size=3, **dict(options)
    )
    return [out.token_ids for out in outs]


def plain_texts(model: TargetModel) -> dict[str, list[list[int]]]:
    """The texts that speculation must reproduce."""
    return {name: text_of(model, options | {"tree": "off"}) for name, options in _PLAIN.items()}


def logits_of(model: TargetModel) -> torch.Tensor:
    """Logits of a ragged prefill, and of two trees after it, one of which closes windows: `[T, V]`."""
    cache = model.new_cache(batch_size=4, max_length=64, prefill_chunk=16)
    first_BV = model.prefill(cache, prompts(model.vocab_size))
    trees = [
        TokenTree(tokens=[4, 5, 6, 7, 8], parents=[-1, 0, 0, 1, 3]),
        TokenTree(tokens=[9, 8, 7, 6, 5, 4], parents=[-1, 0, 1, 1, 2, 4]),
    ]
    verify = model.verify(cache, trees, rows=[1, 3])
    cache.commit(verify, [[0, 1, 3], [0, 1, 2]])
    after = model.verify(cache, trees, rows=[3, 0])
    return torch.cat((first_BV, verify.logits, after.logits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def start(argv: Sequence[str], count: int, *, environment: Mapping[str, str]) -> list[subprocess.Popen[str]]:
    """`count` processes of one run on this machine, as torchrun starts them, but with nobody to look after them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    return [
        subprocess.Popen(
            argv,
            env={**os.environ, **environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], *, seconds: float) -> list[Ended]:
    """Wait for all of them; those still there after `seconds` are killed, and an AssertionError names them."""
    ended, late = [], []
    for rank, process in enumerate(processes):
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late.append(rank)
            process.kill()
            out, err = process.communicate()
        ended.append(Ended(code=process.returncode, out=out, err=err))
    assert not late, f"ranks {late} have not ended: {[one.err[-2000:] for one in ended]}"
    return ended
