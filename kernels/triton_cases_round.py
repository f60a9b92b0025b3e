"""Configurations of the kernels that carry a round: the row plan, the target's tokens, the walk and the commit."""

from collections.abc import Iterator, Sequence

from compressed_spec.kernels.commit_triton import MOVE_BLOCK, WORD_BLOCK, commit_moves_kernel, commit_rows_kernel
from compressed_spec.kernels.coupled_triton import (
    best_tokens_config,
    best_tokens_kernel,
    join_tokens_kernel,
    walk_kernel,
)
from compressed_spec.kernels.row_plan_triton import (
    COLUMN_BLOCK,
    NODE_BLOCK,
    closing_rows_kernel,
    entry_rows_kernel,
    node_table_kernel,
    window_rows_kernel,
)
from compressed_spec.kernels.triton_compile import Case

VOCAB = 129280
WINDOW = 128
MOST_NODES = 1024  # of a round: 64 trees of 16


def round_cases() -> tuple[Case, ...]:
    """All of them."""
    return (*_plan(), *_tokens(), *_commit())


def _types(pointers: Sequence[str], numbers: Sequence[str]) -> dict[str, str]:
    """All of int64 pointers and int32 numbers."""
    return dict.fromkeys(pointers, "*i64") | dict.fromkeys(numbers, "i32")


def _plan() -> Iterator[Case]:
    nodes = ["p_sequence", "p_start", "p_position", "p_ancestors"]
    yield Case(
        name="row_plan/nodes",
        kernel=node_table_kernel,
        signature=_types(
            [*nodes, "p_parents", "p_lengths", "p_slot", "p_stream"], ["num_nodes", "deepest", "batch_size"]
        ),
        constexprs={"BLOCK": NODE_BLOCK},
    )
    yield Case(
        name="row_plan/window",
        kernel=window_rows_kernel,
        signature=_types([*nodes, "p_rows"], ["deepest", "window", "batch_size"]),
        constexprs={"BLOCK": WINDOW},
    )
    for span in (8, 128):
        yield Case(
            name=f"row_plan/closing/span{span}",
            kernel=closing_rows_kernel,
            signature=_types(
                [*nodes, "p_slot", "p_pool_rows", "p_closing_slot", "p_entry_position"],
                ["num_nodes", "deepest", "ratio", "span", "batch_size"],
            ),
            constexprs={"NODES": MOST_NODES, "BLOCK": span},
        )
    yield Case(
        name="row_plan/entries",
        kernel=entry_rows_kernel,
        signature=_types(
            [*nodes, "p_phase", "p_base", "p_count", "p_visible", "p_extra", "p_listed"],
            ["deepest", "ratio", "per_sequence", "batch_size", "num_extra", "num_listed"],
        ),
        constexprs={"EXTRA": 4, "BLOCK": COLUMN_BLOCK},
    )


def _tokens() -> Iterator[Case]:
    config = best_tokens_config(VOCAB)
    float64 = dict.fromkeys(("p_temperature", "p_top", "p_value"), "*fp64")
    for scores in ("*fp32", "*fp64"):
        yield Case(
            name=f"coupled/best/{scores[1:]}",
            kernel=best_tokens_kernel,
            signature=_types(["p_seed", "p_position", "p_token"], []) | float64 | {"p_scores": scores},
            constexprs={"V": VOCAB, **config},
        )
    yield Case(
        name="coupled/join",
        kernel=join_tokens_kernel,
        signature={"p_value": "*fp64", "p_token": "*i64", "p_chosen": "*i64"},
        constexprs={"SPLITS": config["SPLITS"], "BLOCK": 64},
    )
    yield Case(
        name="coupled/walk",
        kernel=walk_kernel,
        signature=_types(["p_chosen", "p_tokens", "p_parents", "p_first", "p_path", "p_count", "p_next"], ["longest"]),
        constexprs={"NODES": 64},
    )


def _commit() -> Iterator[Case]:
    yield Case(
        name="commit/moves",
        kernel=commit_moves_kernel,
        signature=_types(
            ["p_path", "p_position", "p_sequence", "p_slot", "p_lanes", "p_source", "p_target"],
            ["num_entries", "longest"],
        ),
        constexprs={"BLOCK": MOVE_BLOCK},
    )
    yield Case(
        name="commit/rows",
        kernel=commit_rows_kernel,
        signature=_types(["p_pools", "p_source", "p_target"], ["num_entries"]),
        constexprs={"BLOCK": WORD_BLOCK},
    )
