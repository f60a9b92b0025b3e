"""Configurations of the kernels that read quantised weights, at V4-Flash's and V4-Pro's dimensions."""

from collections.abc import Iterator
from dataclasses import dataclass

import triton

from compressed_spec.kernels.expert_tiles_triton import expert_tiles_config, expert_tiles_kernel
from compressed_spec.kernels.fp8_linear_triton import fp8_linear_config, fp8_linear_kernel
from compressed_spec.kernels.route_triton import SWIGLU_BLOCK, route_kernel, swiglu_kernel
from compressed_spec.kernels.stored_experts import StoredFormat
from compressed_spec.kernels.stored_experts_triton import FORMATS, down_kernel, experts_config, gate_up_kernel
from compressed_spec.kernels.sum_parts_triton import SUM_BLOCK, sum_parts_kernel
from compressed_spec.kernels.triton_compile import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """A model's widths; linears: output, groups, input."""

    name: str
    hidden: int
    inner: int
    experts: int
    linears: tuple[tuple[int, int, int], ...]


MODELS = (
    Widths(
        name="flash",
        hidden=4096,
        inner=2048,
        experts=256,
        linears=((1024, 1, 4096), (32768, 1, 1024), (8192, 8, 4096), (4096, 1, 2048)),
    ),
    Widths(
        name="pro",
        hidden=7168,
        inner=3072,
        experts=384,
        linears=((512, 1, 7168), (65536, 1, 1536), (16384, 16, 4096), (7168, 1, 3072)),
    ),
)
NUM_CHOSEN = 6


def weight_cases() -> tuple[Case, ...]:
    """FP8 products, and experts in every format with the sorting before and the sum after them."""
    activation = Case(
        name="swiglu",
        kernel=swiglu_kernel,
        signature={"p_gate": "*bf16", "p_up": "*bf16", "p_out": "*bf16", "limit": "fp32", "num_elements": "i32"},
        constexprs={"BLOCK": SWIGLU_BLOCK},
    )
    return (activation, *(case for model in MODELS for case in (*_fp8(model), *_experts(model))))


def _fp8(model: Widths) -> Iterator[Case]:
    for rows in (16, 32, 64):
        for out, groups, width in model.linears:
            config = fp8_linear_config(rows, out // groups, groups, width, 128)
            for scale in ("*u8", "*fp32"):
                yield Case(
                    name=f"fp8_linear/{model.name}/{out}x{width}/rows{rows}/scale{scale[1:]}",
                    kernel=fp8_linear_kernel,
                    signature={
                        "p_x": "*bf16",
                        "p_words": "*u32",
                        "p_scale": scale,
                        "p_out": "*bf16" if config["SPLITS"] == 1 else "*fp32",
                        "num_rows": "i32",
                    },
                    constexprs={
                        "D": width,
                        "GROUP_OUT": out // groups,
                        "NUM_GROUPS": groups,
                        "BLOCK_OUT": 128,
                        "BLOCK_IN": 128,
                        **config,
                    },
                    tensor_cores=True,
                )


def _experts(model: Widths) -> Iterator[Case]:
    lists = {"p_order": "*i32", "p_expert": "*i32", "p_first": "*i32", "p_end": "*i32"}
    dims = {"D": model.hidden, "F": model.inner}
    for num_pairs in (48, 32 * model.experts):
        config = experts_config(num_pairs, model.experts, StoredFormat.FP4)
        yield Case(
            name=f"expert_tiles/{model.name}/rows{config['ROWS']}",
            kernel=expert_tiles_kernel,
            signature={"p_experts": "*i64", **lists, "num_pairs": "i32", "num_tiles": "i32"},
            constexprs=expert_tiles_config(model.experts, config["ROWS"]),
        )
        for name, scale, form in (
            ("fp4", "*u8", StoredFormat.FP4),
            ("fp8_e8m0", "*u8", StoredFormat.FP8),
            ("fp8_f32", "*fp32", StoredFormat.FP8),
            ("bf16", None, StoredFormat.PLAIN),
        ):
            block = 128 if form is StoredFormat.FP8 else 1
            config = experts_config(num_pairs, model.experts, form, block)
            values = dims | {"FORMAT": FORMATS[form], "BLOCK_OUT": block, "BLOCK_IN": block, **config}
            weights = {"p_stored": "*bf16" if scale is None else "*u32"} | ({} if scale is None else {"p_scale": scale})
            values |= {"p_scale": None} if scale is None else {}
            yield Case(
                name=f"{name}_experts/{model.name}/gate_up/rows{config['ROWS']}",
                kernel=gate_up_kernel,
                signature=lists
                | weights
                | {"p_x": "*bf16", "p_weights": "*fp32", "p_hidden": "*bf16", "limit": "fp32"},
                constexprs=values | {"num_chosen": NUM_CHOSEN},
                tensor_cores=True,
            )
            yield Case(
                name=f"{name}_experts/{model.name}/down/rows{config['ROWS']}",
                kernel=down_kernel,
                signature=lists | weights | {"p_hidden": "*bf16", "p_choice": "*fp32"},
                constexprs=values,
                tensor_cores=True,
            )
    routing = {"p_logits": "*fp32", "p_experts": "*i64", "p_weights": "*fp32", "p_tokens": "*i64", "scaling": "fp32"}
    blocks = {"E": model.experts, "K": NUM_CHOSEN, "BLOCK_E": triton.next_power_of_2(model.experts), "BLOCK_K": 8}
    for name, given, absent in (("score", {"p_bias": "*fp32"}, "p_table"), ("table", {"p_table": "*i64"}, "p_bias")):
        yield Case(
            name=f"route/{model.name}/{name}",
            kernel=route_kernel,
            signature=routing | given,
            constexprs=blocks | {absent: None},
        )
    yield Case(
        name=f"sum_parts/{model.name}",
        kernel=sum_parts_kernel,
        signature={"p_parts": "*fp32", "p_plus": "*bf16", "p_output": "*bf16"},
        constexprs={"num_parts": NUM_CHOSEN, "D": model.hidden, "BLOCK": SUM_BLOCK},
    )
