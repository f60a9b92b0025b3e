"""Every configuration of every Triton kernel that ships, for `scripts/check_kernels.py` to compile.

One function an op, each taking what its launcher would decide from the launcher's own file. Dimensions are those of
V4-Flash and V4-Pro.
"""

from compressed_spec.kernels.norm_rope_triton import norm_rope_config, norm_rope_kernel
from compressed_spec.kernels.triton_cases_round import round_cases
from compressed_spec.kernels.triton_cases_weights import weight_cases
from compressed_spec.kernels.triton_compile import Case


def all_cases() -> tuple[Case, ...]:
    """All of them; a new op appends its own line."""
    return (*norm_rope_cases(), *weight_cases(), *round_cases())


def norm_rope_cases() -> tuple[Case, ...]:
    """Query heads (no weight), K = V rows, and norms of the model's width."""
    signature = {
        "p_x": "*bf16",
        "p_out": "*bf16",
        "num_rows": "i32",
        "num_heads": "i32",
        "stride_xt": "i64:16",
        "stride_xh": "i64:16",
        "eps": "fp32",
    }
    rotation = {"p_cos": "*fp32", "p_sin": "*fp32"}
    return (
        Case(
            name="norm_rope/query",
            kernel=norm_rope_kernel,
            signature=signature | rotation,
            constexprs={"p_weight": None, "D": 512, "P": 32, "NORM": True, **norm_rope_config(512)},
        ),
        Case(
            name="norm_rope/kv",
            kernel=norm_rope_kernel,
            signature=signature | rotation | {"p_weight": "*fp32"},
            constexprs={"D": 512, "P": 32, "NORM": True, **norm_rope_config(512)},
        ),
        *(
            Case(
                name=f"norm_rope/width{width}",
                kernel=norm_rope_kernel,
                signature=signature | {"p_weight": "*fp32"},
                constexprs={"p_cos": None, "p_sin": None, "D": width, "P": 0, "NORM": True, **norm_rope_config(width)},
            )
            for width in (1024, 1536, 4096, 7168)
        ),
    )
