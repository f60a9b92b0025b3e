"""Run every launcher at V4's dimensions on tensors without data, and check that what it launches is registered.

Run by test_check_kernels.py in a process of its own; prints how many launches there were.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from compressed_spec.kernels import (
    attention_triton,
    compress_triton,
    hyper_connection_triton,
    indexer_triton,
    norm_rope_triton,
)
from compressed_spec.kernels.triton_cases import all_cases
from compressed_spec.kernels.triton_compile import Case

BF16, FP32, I64, U8 = torch.bfloat16, torch.float32, torch.int64, torch.uint8
POINTERS = {BF16: "*bf16", FP32: "*fp32", I64: "*i64", U8: "*u8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel and the values of its arguments and options."""

    kernel: Any
    values: dict[str, Any]


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_model(heads: int, width: int) -> None:
    """What depends on the model's size."""
    q, kv, rows, sink = empty(3, heads, 512), empty(900, 512), empty(3, 128, dtype=I64), empty(heads, dtype=FP32)
    for pool in (kv, empty(900, 592, dtype=U8)):
        for processors in (1, 132):
            for entries in (None, pool):
                attention_triton.sparse_attention(
                    q, pool, rows, entries, empty(3, 700, dtype=I64), sink, 64, num_processors=processors
                )
    cos, weight = empty(3, 32, dtype=FP32), empty(512, dtype=FP32)
    norm_rope_triton.norm_rope(q, None, 1e-6, cos, cos)
    norm_rope_triton.norm_rope(empty(3, 1, 512), weight, 1e-6, cos, cos, out_NX=kv[:3])
    norm_rope_triton.norm_rope(empty(3, 1, 512), weight, 1e-6, cos, cos, out_NX=empty(3, 592, dtype=U8))
    norm_rope_triton.apply_rope(q, cos, cos)
    norm_rope_triton.rms_norm(empty(3, width), empty(width, dtype=FP32), 1e-6)

    streams, fn = empty(3, 4, width), empty(24, 4 * width, dtype=FP32)
    scale, base = empty(3, dtype=FP32), empty(24, dtype=FP32)
    mixed = hyper_connection_triton.mix_and_collapse(streams, fn, scale, base, iterations=20, eps=1e-6, norm_eps=1e-6)
    hyper_connection_triton.mix_weights(streams, fn, scale, base, iterations=20, eps=1e-6, norm_eps=1e-6)
    pre_TM = hyper_connection_triton.head_weights(streams, fn[:4], scale, base, eps=1e-6, norm_eps=1e-6)
    hyper_connection_triton.collapse(streams, pre_TM)
    hyper_connection_triton.expand(mixed.input_TD, streams, mixed.weights)


def launch_entries() -> None:
    """What does not: compressors and the indexer."""
    for tokens, entry, overlap in ((8, 512, True), (128, 512, False), (8, 128, True)):
        buffer, windows = empty(99, entry * (4 if overlap else 2), dtype=FP32), empty(2, tokens, dtype=I64)
        weight, cos, closing = empty(entry, dtype=FP32), empty(2, 32, dtype=FP32), empty(2, dtype=I64)
        compress_triton.pool_windows(buffer, windows, overlap=overlap)
        for out in (empty(99, entry), empty(99, 592, dtype=U8))[: 1 if entry == 128 else 2]:
            compress_triton.pool_entries(
                buffer, windows, weight, 1e-6, cos, cos, out, closing, overlap=overlap, dtype=BF16
            )
    q, weights, spans = empty(3, 64, 128, dtype=FP32), empty(3, 64, dtype=FP32), empty(2, 4, dtype=I64)
    extra, a_node = empty(3, 2, dtype=I64), empty(3, dtype=I64)
    scores = indexer_triton.index_scores(q, weights, empty(999, 128), spans, extra, 900)
    indexer_triton.select_entries(scores, 512)
    indexer_triton.select_rows(scores, 512, a_node, a_node, extra)


def fits(launch: Launch, case: Case) -> bool:
    """Whether the case compiles what the launch would, and assumes nothing of a number that is not so."""
    if case.kernel is not launch.kernel or launch.values.keys() != case.signature.keys() | case.constexprs.keys():
        return False
    for name, value in launch.values.items():
        kind = case.signature.get(name)
        if kind is None:
            fine = not isinstance(value, torch.Tensor) and value == case.constexprs[name]
        elif isinstance(value, torch.Tensor):
            fine = kind == POINTERS[value.dtype]
        elif isinstance(value, int):
            fine = kind[:3] in ("i32", "i64") and (":16" not in kind or value % 16 == 0)
        else:
            fine = isinstance(value, float) and kind == "fp32"
        if not fine:
            return False
    return True


def recorded() -> Iterator[Launch]:
    """Every launch, which is not carried out."""
    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(kernel=self, values=dict(zip(self.arg_names, args, strict=False)) | kwargs))

    JITFunction.run = record
    for heads, width in ((64, 4096), (128, 7168)):
        launch_model(heads, width)
    launch_entries()
    yield from launches


def main() -> None:
    cases, count = all_cases(), 0
    for launch in recorded():
        count += 1
        assert any(fits(launch, case) for case in cases), (launch.kernel.__name__, launch.values)
    print(count)


if __name__ == "__main__":
    main()
