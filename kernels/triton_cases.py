"""Every configuration of every Triton kernel that ships, for `scripts/check_kernels.py` to compile.

One function an op, each taking what its launcher decides from the launcher's own file. Dimensions are those of
V4-Flash and V4-Pro.
"""

import torch
import triton
import triton.language as tl

from compressed_spec.kernels import attention_triton as attention
from compressed_spec.kernels import compress_triton as compress
from compressed_spec.kernels import hyper_connection_triton as hyper
from compressed_spec.kernels import indexer_triton as indexer
from compressed_spec.kernels import norm_rope_triton as norm_rope
from compressed_spec.kernels.fp8_rows import GROUP
from compressed_spec.kernels.triton_cases_round import round_cases
from compressed_spec.kernels.triton_cases_weights import weight_cases
from compressed_spec.kernels.triton_compile import Case


def all_cases() -> tuple[Case, ...]:
    """All of them; a new op appends its own line."""
    return (
        *norm_rope_cases(),
        *attention_cases(),
        *hyper_connection_cases(),
        *weight_cases(),
        *round_cases(),
        *compress_cases(),
        *indexer_cases(),
    )


def norm_rope_cases() -> tuple[Case, ...]:
    """Query heads (no weight), K = V rows plain and in FP8, the output's rotation, and norms of the model's widths."""
    signature = {
        "p_x": "*bf16",
        "p_out": "*bf16",
        "num_rows": "i32",
        "num_heads": "i32",
        "stride_xt": "i64:16",
        "stride_xh": "i64:16",
        "stride_out": "i64:16",
        "eps": "fp32",
    }
    weight = {"p_weight": "*fp32"}
    rotation = {"p_cos": "*fp32", "p_sin": "*fp32"}
    head: dict[str, object] = {"D": 512, "P": 32, "NORM": True, "FP8_GROUP": 0, **norm_rope.norm_rope_config(512)}
    unweighted: dict[str, object] = {"p_weight": None}
    unrotated: dict[str, object] = {"p_cos": None, "p_sin": None, "P": 0}
    cases: dict[str, tuple[dict[str, str], dict[str, object]]] = {
        "query": (signature | rotation, head | unweighted),
        "kv": (signature | rotation | weight, head),
        "kv_fp8": (signature | rotation | weight | {"p_out": "*u8"}, head | {"FP8_GROUP": GROUP}),
        "undo": (signature | rotation, head | unweighted | {"NORM": False}),
        **{
            f"width{width}": (
                signature | weight,
                head | unrotated | {"D": width, **norm_rope.norm_rope_config(width)},
            )
            for width in (128, 1024, 1536, 4096, 7168)
        },
    }
    return tuple(
        Case(name=f"norm_rope/{name}", kernel=norm_rope.norm_rope_kernel, signature=types, constexprs=constexprs)
        for name, (types, constexprs) in cases.items()
    )


def attention_cases() -> tuple[Case, ...]:
    """64 heads (Flash), 128 (Pro), fewer (their shards), in half precision, and float32; over FP8 rows as well."""
    cases = []
    for dtype, torch_dtype, heads, fp8 in (
        ("bf16", torch.bfloat16, 64, False),
        ("bf16", torch.bfloat16, 128, False),
        ("bf16", torch.bfloat16, 16, False),
        ("fp16", torch.float16, 64, False),
        ("fp32", torch.float32, 64, False),
        ("bf16", torch.bfloat16, 64, True),
        ("bf16", torch.bfloat16, 128, True),
        ("bf16", torch.bfloat16, 16, True),
    ):
        uncut, cut = (
            attention.attention_config(heads, 512, torch_dtype, split=split, fp8=fp8) for split in (False, True)
        )
        pool = "u8" if fp8 else dtype
        common = {
            "p_q": f"*{dtype}",
            "p_window": f"*{pool}",
            "p_window_rows": "*i64",
            "p_compressed": f"*{pool}",
            "p_compressed_rows": "*i64",
            "p_sink": "*fp32",
            "window_length": "i32:16",
            "compressed_length": "i32",
            "tiles_a_run": "i32",
            "stride_q": "i64:16",
            "stride_window": "i64:16",
            "stride_compressed": "i64:16",
            "scale": "fp32",
        }
        shape = {"H": heads, "D": 512, "P": 32 if fp8 else 0, "FP8_GROUP": GROUP if fp8 else 0}
        shape["BLOCK_P"] = 64 if fp8 else 0
        whole = (common | {"p_out": f"*{dtype}"}, shape | uncut.kernel | {"p_mass": None, "SPLIT": False})
        split = (common | {"p_out": "*fp32", "p_mass": "*fp32"}, shape | cut.kernel | {"SPLIT": True})
        cases += [
            Case(
                name=f"attention/{dtype}{'_fp8' if fp8 else ''}_heads{heads}_{name}",
                kernel=attention.sparse_attention_kernel,
                signature=types,
                constexprs=values,
                tensor_cores=dtype != "fp32",
            )
            for name, (types, values) in (("whole", whole), ("split", split))
        ]
    cases.append(
        Case(
            name="attention/combine",
            kernel=attention.combine_runs_kernel,
            signature={"p_part": "*fp32", "p_mass": "*fp32", "p_out": "*bf16", "num_rows": "i32:16", "num_runs": "i32"},
            constexprs={"D": 512, **attention.attention_config(64, 512, torch.bfloat16, split=True).combine},
        )
    )
    return tuple(cases)


def hyper_connection_cases() -> tuple[Case, ...]:
    """Four streams of 4096 (Flash) and 7168 (Pro)."""
    cases = []
    for width in (4096, 7168):
        streams = {"M": 4, "D": width, "BLOCK_M": 4, **hyper.STREAMS}
        weights = dict.fromkeys(("p_part", "p_scale", "p_base", "p_pre", "p_post", "p_comb"), "*fp32")
        weights |= {"p_x": "*bf16", "num_parts": "i32", "eps": "fp32", "norm_eps": "fp32"}
        for site, outputs, iterations in (("block", 24, 20), ("head", 4, 0)):
            mix = {"MIX": iterations > 0, "ITERATIONS": iterations, **streams}
            cases += [
                Case(
                    name=f"hyper_connection/project_{site}{width}",
                    kernel=hyper.project_streams_kernel,
                    signature={
                        "p_x": "*bf16",
                        "p_fn": "*fp32",
                        "p_part": "*fp32",
                        "num_nodes": "i32",
                        "inner": "i32:16",
                        "blocks_a_part": "i32",
                    },
                    constexprs={"F": outputs, "BLOCK_F": max(16, triton.next_power_of_2(outputs)), **hyper.PROJECT},
                    tensor_cores=True,
                ),
                Case(
                    name=f"hyper_connection/mix_{site}{width}",
                    kernel=hyper.mix_streams_kernel,
                    signature=weights,
                    constexprs=mix | {"p_out": None},
                ),
            ]
        cases.append(
            Case(
                name=f"hyper_connection/mix_collapse{width}",
                kernel=hyper.mix_streams_kernel,
                signature=weights | {"p_out": "*bf16"},
                constexprs={"MIX": True, "ITERATIONS": 20, **streams},
            )
        )
        cases += [
            Case(
                name=f"hyper_connection/collapse{width}",
                kernel=hyper.collapse_kernel,
                signature={"p_x": "*bf16", "p_pre": "*fp32", "p_out": "*bf16"},
                constexprs=streams,
            ),
            Case(
                name=f"hyper_connection/expand{width}",
                kernel=hyper.expand_kernel,
                signature={"p_y": "*bf16", "p_x": "*bf16", "p_post": "*fp32", "p_comb": "*fp32", "p_out": "*bf16"},
                constexprs=streams,
            ),
        ]
    return tuple(cases)


def compress_cases() -> tuple[Case, ...]:
    """Entries of CSA, HCA and the indexer, as they are written; and pooling alone."""
    signature = {
        "p_buffer": "*fp32",
        "p_rows": "*i64",
        "p_out": "*bf16",
        "stride_buffer": "i64:16",
        "stride_out": "i64:16",
        "eps": "fp32",
    }
    finish = {"p_weight": "*fp32", "p_cos": "*fp32", "p_sin": "*fp32", "p_out_rows": "*i64"}
    packed = {"p_out": "*u8"}
    cases = []
    for name, width, tokens, overlap in (("csa", 512, 8, True), ("hca", 512, 128, False), ("index", 128, 8, True)):
        shape = {"K": tokens, "E": width, "OVERLAP": overlap, **compress.pool_config(width)}
        entries = shape | {"P": 32, "DTYPE": tl.bfloat16, "FP8_GROUP": 0}
        pooled = shape | {"P": 0, "DTYPE": tl.float32, "FP8_GROUP": 0} | dict.fromkeys(finish)
        forms = {
            "entries": (signature | finish, entries),
            "pool": (signature | {"p_out": "*fp32"}, pooled),
            "entries_fp8": (signature | finish | packed, entries | {"FP8_GROUP": GROUP}),
        }
        cases += [
            Case(
                name=f"compress/{name}_{form}", kernel=compress.pool_windows_kernel, signature=types, constexprs=values
            )
            for form, (types, values) in forms.items()
            if name != "index" or form != "entries_fp8"
        ]
    return tuple(cases)


def indexer_cases() -> tuple[Case, ...]:
    """64 heads of 128, queries in float32 as the model has them; the choice as indices and as rows."""
    scores = [
        Case(
            name=f"indexer/scores_{dtype}",
            kernel=indexer.index_scores_kernel,
            signature={
                "p_q": "*fp32",
                "p_weights": "*fp32",
                "p_keys": f"*{dtype}",
                "p_spans": "*i64",
                "p_extra": "*i64",
                "p_scores": "*fp32",
                "num_extra": "i32",
                "num_entries": "i32",
                "stride_keys": "i64:16",
            },
            constexprs={"H": 64, "WIDTH": 128, **indexer.index_config(64, 128, torch_dtype)},
            tensor_cores=dtype != "fp32",
        )
        for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    ]
    signature = {"p_scores": "*fp32", "p_out": "*i64", "num_entries": "i32", "num_chosen": "i32:16", "num_extra": "i32"}
    plan = {"p_base": "*i64", "p_count": "*i64", "p_extra": "*i64"}
    select = [
        Case(
            name=f"indexer/select_{name}",
            kernel=indexer.select_entries_kernel,
            signature=types,
            constexprs={"ROWS": name == "rows", **indexer.SELECT, **values},
        )
        for name, types, values in (
            ("entries", signature, dict.fromkeys(plan)),
            ("rows", signature | plan, {}),
        )
    ]
    return (*scores, *select)
