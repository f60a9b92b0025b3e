"""A whole round without the host: plan, forward, the target's tokens, the walk, the commit. Nothing is read back.

T = nodes, B = trees, A = longest path
"""

import torch

from compressed_spec.cache import Cache
from compressed_spec.device_trees import DeviceTrees, RoundInputs, RoundOutputs
from compressed_spec.kernels.commit import ENTRIES, RING, SINGLE, Lane, lane_table
from compressed_spec.layout import Addressing, StateSpec, pool_specs
from compressed_spec.models.deepseek_v4.device_forward import DeviceForward
from compressed_spec.models.deepseek_v4.device_plan import DevicePlan, make_device_plan

_KINDS = {Addressing.RING: RING, Addressing.ENTRIES: ENTRIES, Addressing.SINGLE: SINGLE}


class DeviceRound:
    """Rounds over one cache. From then on the committed lengths of its rows are `lengths_B`, on the device, and the
    cache's own are out of date.
    """

    def __init__(self, forward: DeviceForward) -> None:
        from compressed_spec.kernels.commit_triton import pool_table

        self._forward, self.cache = forward, forward.cache
        self.lengths_B = torch.tensor(self.cache.lengths, dtype=torch.int64, device=self.cache.device)
        lanes = [_lane(self.cache, name) for name in self.cache.pools]
        different = list(dict.fromkeys(lanes))
        self._lanes_M5 = lane_table(different, self.cache.device)
        self._pools = pool_table(list(self.cache.pools.values()), [different.index(lane) for lane in lanes])

    @property
    def spec(self) -> StateSpec:
        return self.cache.spec

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def __call__(self, trees: DeviceTrees, inputs: RoundInputs, most_length: int) -> RoundOutputs:
        """Verify the trees and commit what the target accepts. most_length: no row is longer."""
        from compressed_spec.kernels.coupled_triton import coupled_tokens, walk_trees

        plan = self.plan(trees, inputs, most_length)
        logits_TV = self._forward.logits(self._forward(plan))
        chosen_T = coupled_tokens(
            logits_TV,
            inputs.temperature_T,
            logits_TV.amax(-1).to(torch.float64),
            inputs.seeds_T,
            plan.position_T + 1,
        )
        walk = walk_trees(
            chosen_T,
            inputs.tokens_T,
            trees.parents_T,
            trees.first_B1,
            longest=trees.longest,
            most_nodes=trees.most_nodes,
        )
        path_BA = walk.path_BA.masked_fill(inputs.rows_B.unsqueeze(1) < 0, -1)
        count_B = walk.count_B.masked_fill(inputs.rows_B < 0, 0)
        self.commit(plan, trees, path_BA)
        self.lengths_B.index_add_(0, inputs.rows_B.clamp(min=0), count_B)
        return RoundOutputs(
            path_BA=path_BA,
            token_BA=inputs.tokens_T[path_BA.clamp(min=0)],
            count_B=count_B,
            next_token_B=walk.next_token_B,
            logits_TV=logits_TV,
        )

    def plan(self, trees: DeviceTrees, inputs: RoundInputs, most_length: int) -> DevicePlan:
        """The plan of the next round."""
        sequence_T = inputs.rows_B.clamp(min=0)[trees.tree_T]
        return make_device_plan(
            self.cache.spec, self.cache.shape, trees, inputs.tokens_T, sequence_T, self.lengths_B, most_length
        )

    def commit(self, plan: DevicePlan, trees: DeviceTrees, path_BA: torch.Tensor) -> None:
        """Make the rows of these paths persistent; the lengths are the caller's."""
        from compressed_spec.kernels.commit_triton import commit_moves, commit_rows

        self.cache.next_ticket()
        moves = commit_moves(path_BA, plan.position_T, plan.sequence_T, trees.slot_T, self._lanes_M5)
        commit_rows(self._pools, moves)


def _lane(cache: Cache, name: str) -> Lane:
    pool = next(pool for pool in pool_specs(cache.spec, cache.shape.max_length) if pool.name == name)
    return Lane(
        kind=_KINDS[pool.addressing],
        per_sequence=pool.per_sequence,
        shift=pool.shift,
        ratio=pool.compression.ratio if pool.compression else 1,
        num_persistent=cache.num_persistent(name),
    )
