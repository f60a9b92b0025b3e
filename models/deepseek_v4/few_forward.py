"""The forward of a round of few nodes: pieces that may be compiled, and what each of them is given.

T = nodes, M = residual streams, D = model width
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from compressed_spec.cache import Scratch
from compressed_spec.kernels.commit import Moves, commit_rows
from compressed_spec.layer_scratch import LayerScratch
from compressed_spec.models.deepseek_v4.attention import AttentionRound
from compressed_spec.models.deepseek_v4.block import Block
from compressed_spec.models.deepseek_v4.compressor import CompressionRound
from compressed_spec.models.deepseek_v4.few import written_rows
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.pieces import (
    BlockHidden,
    HeadRows,
    HeadStep,
    Layer,
    Opened,
    Opening,
    Output,
    RowMoves,
)
from compressed_spec.models.deepseek_v4.rope import Rotation
from compressed_spec.partial import LayerStreams
from compressed_spec.rows import RowPlan
from compressed_spec.target import DraftBlock, DraftStep, StepDraft

_NOWHERE = LayerScratch(pools={}, rows={})  # each layer has rows of its own
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Up to how much the forward in pieces is the faster one. Beyond, experts are grouped, and keys scored as ranges.

    nodes: of a round, all sequences together. keys: that the indexer gathers a layer, all nodes together.
    """

    nodes: int
    keys: int


@dataclass(slots=True, kw_only=True)
class Piece:
    """A piece, and what runs it: itself, until there is a compiled one."""

    function: nn.Module
    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A layer, how it compresses, and its pools, each with the layer's index in it."""

    block: Block
    layer: int
    kind: str | None
    pools: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, model: DeepseekV4, layer: int) -> "_Place":
        block = model.layers[layer]
        assert isinstance(block, Block)
        pools = tuple(block.attn.pools("window_kv").items())
        return cls(block=block, layer=layer, kind=model.kinds[layer], pools=pools)


class FewForward:
    """A model's forward in pieces. `pieces` are those that have been needed so far, by name, layer and whether its
    indexer chooses."""

    def __init__(self, model: DeepseekV4, limits: Limits) -> None:
        self._model, self.limits = model, limits
        self._places = [_Place.of(model, layer) for layer in range(len(model.layers))]
        self._read_by_head = frozenset(model.layers_read_by_head)
        self.pieces: dict[tuple[str, int, bool], Piece] = {}

    def takes(self, plan: RowPlan) -> bool:
        num_nodes = len(plan.tokens_T)
        scored = [comp.num_visible for comp in plan.compressions.values() if comp.listed_TK is None]
        return self.takes_nodes(num_nodes) and num_nodes * max(scored, default=0) <= self.limits.keys

    def takes_nodes(self, num_nodes: int) -> bool:
        return num_nodes <= self.limits.nodes

    def forward(self, plan: RowPlan, scratch: Scratch) -> torch.Tensor:
        model = self._model
        opened, written = self._open(plan), written_rows(plan, scratch)
        begun = LayerStreams(num_layers=0, streams={-1: opened.streams_TMD})
        after = self._layers(plan, scratch, opened, written, begun, len(model.layers))
        if model.mtp_head is None:
            return model.finish(plan, scratch, after)
        inputs = [after.newest, plan.tokens_T, plan.position_T, plan.parent_stream_T]
        pools = ("pending_stream", "head_kv")
        inputs += [scratch.layer_rows(pool, 0) for pool in pools]
        inputs += [written[pool] for pool in pools]
        self._piece("head_rows").run(inputs)
        return after.newest

    def advance(self, plan: RowPlan, scratch: Scratch, before: LayerStreams, num_layers: int) -> LayerStreams:
        return self._layers(plan, scratch, self._open(plan), written_rows(plan, scratch), before, num_layers)

    def logits(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        return self._piece("logits").run([streams_TMD])[0]

    def draft_step(self, step: DraftStep, scratch: Scratch) -> StepDraft:
        first = scratch.first_row("head_kv") + step.first
        inputs = [step.streams_NMD, step.tokens_N, step.position_N, step.window_rows_NW]
        inputs += [scratch.layer_rows("head_kv", 0), torch.arange(first, first + len(step.tokens_N))]
        streams_NMD, logits_NV = self._piece("head_step").run(inputs)
        return StepDraft(streams_NMD=streams_NMD, logits_NV=logits_NV)

    def draft_hidden(self, tokens_N: torch.Tensor, block: DraftBlock, scratch: Scratch) -> torch.Tensor:
        head = self._model.dspark_head
        assert head is not None, "this model has no DSpark head"
        first = scratch.first_row("head_kv")
        inputs = [tokens_N, block.position_N, block.rows_NW, torch.arange(first, first + len(tokens_N))]
        inputs += [scratch.layer_rows("head_kv", stage) for stage in range(len(head.stages))]
        return self._piece("block_hidden").run(inputs)[0]

    def move_rows(self, pools: Sequence[torch.Tensor], lane_of: Sequence[int], moves: Moves) -> None:
        if not self.takes_nodes(moves.source_MN.shape[1]):
            return commit_rows(pools, lane_of, moves)
        lane_P = torch.tensor(lane_of)
        source_PN, target_PN = (rows_MN.index_select(0, lane_P) for rows_MN in (moves.source_MN, moves.target_MN))
        self._piece("row_moves").run([source_PN, target_PN, *pools])

    def _open(self, plan: RowPlan) -> Opened:
        positions = [comp.entry_position_C for comp in plan.compressions.values()]
        return Opening.opened(self._piece("opening").run([plan.tokens_T, plan.position_T, *positions]))

    def _layers(
        self,
        plan: RowPlan,
        scratch: Scratch,
        opened: Opened,
        written: dict[str, torch.Tensor],
        before: LayerStreams,
        num_layers: int,
    ) -> LayerStreams:
        rounds: dict[str | None, AttentionRound] = {None: _round(opened.main, plan, None)}
        for (name, comp), entries in zip(plan.compressions.items(), opened.entries, strict=True):
            rounds[name] = _round(opened.compress, plan, CompressionRound(plan=comp, entries=entries))
        kept = {layer: streams for layer, streams in before.streams.items() if layer in self._read_by_head}
        streams_TMD, shared = before.newest, dict[str | None, list[torch.Tensor]]()
        for place in self._places[before.num_layers : num_layers]:
            here, kind = rounds[place.kind], place.kind
            piece = self._layer_piece(place, here)
            if kind not in shared:
                assert isinstance(piece.function, Layer)
                shared[kind] = [*(written[pool] for pool, _ in place.pools), *piece.function.fields.take(here)]
            pools = [scratch.layer_rows(pool, index) for pool, index in place.pools]
            streams_TMD = piece.run([streams_TMD, plan.tokens_T, *pools, *shared[kind]])[0]
            if place.layer in self._read_by_head:
                kept[place.layer] = streams_TMD
        return LayerStreams(num_layers=num_layers, streams=kept | {num_layers - 1: streams_TMD})

    def _layer_piece(self, place: _Place, here: AttentionRound) -> Piece:
        key = ("layer", place.layer, here.chooses)
        if key not in self.pieces:
            self._add(key, Layer(place.block, [pool for pool, _ in place.pools], here))
        return self.pieces[key]

    def _piece(self, name: str) -> Piece:
        key = (name, 0, False)
        if key not in self.pieces:
            self._add(key, self._function(name))
        return self.pieces[key]

    def _add(self, key: tuple[str, int, bool], function: nn.Module) -> None:
        def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            outputs: list[torch.Tensor] = function(*inputs)
            return outputs

        self.pieces[key] = Piece(function=function, run=run)

    def _function(self, name: str) -> nn.Module:
        model, head = self._model, self._model.mtp_head
        main, compress = model.get_buffer("rope_main"), model.get_buffer("rope_compress")
        if name == "opening":
            return Opening(model.embed, model.config.hc_mult, main, compress)
        if name == "logits":
            return Output(model, model.norm, model.head)
        if name == "row_moves":
            return RowMoves()
        if name == "block_hidden":
            assert model.dspark_head is not None, "this model has no DSpark head"
            return BlockHidden(model.dspark_head, model.embed, main)
        assert head is not None, "this model has no MTP head"
        if name == "head_rows":
            return HeadRows(head, model.embed, main)
        assert name == "head_step", name
        return HeadStep(head, model.embed, main, model.head)


def _round(rotation: Rotation, plan: RowPlan, compression: CompressionRound | None) -> AttentionRound:
    return AttentionRound(
        rotation=rotation,
        window_rows_TW=plan.window_rows_TW,
        scratch=_NOWHERE,
        kv_pool="window_kv",
        first=0,
        compression=compression,
    )
