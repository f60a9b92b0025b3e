"""DeepSeek-V4 over flat nodes and row lists.

T = nodes, V = vocabulary, M = residual streams, D = model width, N = draft nodes, B = batch rows, S = places of a block
"""

from collections import Counter

import torch
from torch import nn

from compressed_spec.cache import Cache, Scratch
from compressed_spec.device_trees import DeviceRounds
from compressed_spec.kernels.commit import MoveRows
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.layout import Compression, StateSpec
from compressed_spec.models.deepseek_v4.attention import AttentionRound
from compressed_spec.models.deepseek_v4.block import Block
from compressed_spec.models.deepseek_v4.compressor import CompressionRound, compression_of
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.dspark import DSparkHead
from compressed_spec.models.deepseek_v4.embedding import VocabularyEmbedding
from compressed_spec.models.deepseek_v4.few import FewNodes
from compressed_spec.models.deepseek_v4.layer_path import LayerPath
from compressed_spec.models.deepseek_v4.modules import HyperConnected, Linear, Norm, Precision
from compressed_spec.models.deepseek_v4.mtp import MTPHead
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.parallel_plan import check_size
from compressed_spec.models.deepseek_v4.rope import rope_frequencies, rotation
from compressed_spec.models.deepseek_v4.state import check_packable, state_spec
from compressed_spec.parallel import ALONE, ParallelGroup
from compressed_spec.partial import LayerStreams
from compressed_spec.rows import RowPlan
from compressed_spec.target import BlockDraft, DraftBlock, DraftStep, StepDraft, TargetModel


class DeepseekV4(TargetModel, HyperConnected):
    """The whole model, or one process's part of it; parameters carry the upstream names, with experts stacked.

    draft_head, num_draft_layers: which head it has (`mtp`), and blocks of it (MTP: one). dtype: of matrices,
    activations and KV. numerics: "fast", or "invariant" (see `kernels.numerics`). fp8_rows: keep KV and entries packed
    (see `kernels.fp8_rows`). group: the processes that share it (see `parallel_plan`). Raises ValueError for a DSpark
    head without the dspark_* keys in the config, for rows that cannot be packed, and for a number of processes that
    cannot share it.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        draft_head: DraftHeadKind,
        num_draft_layers: int = 1,
        dtype: torch.dtype,
        numerics: str = "fast",
        fp8_rows: bool = False,
        group: ParallelGroup = ALONE,
    ) -> None:
        check_size(config, group.size)
        if fp8_rows:
            check_packable(config)
        super().__init__(config, Precision(dtype=dtype, numerics=numerics_named(numerics), fp8_rows=fp8_rows))
        self.draft_head, self.group = draft_head, group
        self.vocab_size, self.max_position_embeddings = config.vocab_size, config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.embed = VocabularyEmbedding(config.vocab_size, config.hidden_size, dtype, group)
        seen: Counter[Compression | None] = Counter()
        layers = []
        for index, spec in enumerate(config.layers):
            kind = compression_of(config, spec)
            layers.append(Block(config, spec, index, seen[kind], self.precision, group))
            seen[kind] += 1
        self.layers = nn.ModuleList(layers)
        kinds = [compression_of(config, spec) for spec in config.layers]
        self.kinds = tuple(None if kind is None else kind.name for kind in kinds)
        self.few: FewNodes | None = None  # for small rounds, where there is one
        self.path: LayerPath | None = None  # for all rounds, where there is one
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, self.precision)
        self.head = Linear(config.hidden_size, group.part(config.vocab_size), self.precision)
        self.add_site("head")
        self.mtp = nn.ModuleList()
        if draft_head is DraftHeadKind.MTP:
            self.mtp = nn.ModuleList([MTPHead(config, self.precision, group)])
        elif draft_head is DraftHeadKind.DSPARK:
            self.mtp = DSparkHead(config, num_draft_layers, self.precision, group)
        for name, compress in (("main", False), ("compress", True)):
            frequencies = rope_frequencies(config, compress=compress, dtype=self.precision.wide)
            self.register_buffer(f"rope_{name}", frequencies, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def mtp_head(self) -> MTPHead | None:
        head = self.mtp[0] if len(self.mtp) else None
        return head if isinstance(head, MTPHead) else None

    @property
    def dspark_head(self) -> DSparkHead | None:
        return self.mtp if isinstance(self.mtp, DSparkHead) else None

    @property
    def own_drafter(self) -> str | None:
        return None if self.draft_head is DraftHeadKind.NONE else self.draft_head.value

    @property
    def draft_block_size(self) -> int:
        head = self.dspark_head
        return 0 if head is None else head.settings.block_size

    def state_spec(self) -> StateSpec:
        return state_spec(
            self.config, draft_head=self.draft_head, num_draft_layers=len(self.mtp), precision=self.precision
        )

    def row_mover(self) -> MoveRows | None:
        if self.path is not None:
            return self.path.row_mover()
        return None if self.few is None else self.few.move_rows

    def device_rounds(self, cache: Cache) -> DeviceRounds | None:
        return None if self.path is None else self.path.rounds(cache)

    @property
    def layers_read_by_head(self) -> tuple[int, ...]:
        """Layers whose streams the draft head reads."""
        return () if self.dspark_head is None else self.dspark_head.settings.target_layer_ids

    def forward(self, plan: RowPlan, scratch: Scratch) -> torch.Tensor:
        if self.few is not None and scratch.in_place and self.few.takes(plan):
            return self.few.forward(plan, scratch)
        return self.finish(plan, scratch, self.advance(plan, scratch, self.begin(plan), len(self.layers)))

    def begin(self, plan: RowPlan) -> LayerStreams:
        streams_TMD = self.embed(plan.tokens_T).unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        return LayerStreams(num_layers=0, streams={-1: streams_TMD.contiguous()})

    def advance(self, plan: RowPlan, scratch: Scratch, before: LayerStreams, num_layers: int) -> LayerStreams:
        if self.path is not None and scratch.in_place:
            return self.path.advance(plan, scratch, before, num_layers)
        if self.few is not None and scratch.in_place and self.few.takes(plan):
            return self.few.advance(plan, scratch, before, num_layers)
        main = rotation(self.get_buffer("rope_main"), plan.position_T)
        compress_frequencies = self.get_buffer("rope_compress")
        compress = rotation(compress_frequencies, plan.position_T)
        rounds = {
            name: CompressionRound(plan=comp, entries=rotation(compress_frequencies, comp.entry_position_C))
            for name, comp in plan.compressions.items()
        }
        read_by_head = self.layers_read_by_head
        kept = {layer: streams for layer, streams in before.streams.items() if layer in read_by_head}
        streams_TMD = before.newest
        for layer in range(before.num_layers, num_layers):
            block, kind = self.layers[layer], self.kinds[layer]
            assert isinstance(block, Block)
            here = AttentionRound(
                rotation=main if kind is None else compress,
                window_rows_TW=plan.window_rows_TW,
                scratch=scratch,
                kv_pool="window_kv",
                first=0,
                compression=None if kind is None else rounds[kind],
            )
            streams_TMD = block(streams_TMD, plan.tokens_T, here)
            if layer in read_by_head:
                kept[layer] = streams_TMD
        return LayerStreams(num_layers=num_layers, streams=kept | {num_layers - 1: streams_TMD})

    def finish(self, plan: RowPlan, scratch: Scratch, after: LayerStreams) -> torch.Tensor:
        if self.path is not None and scratch.in_place:
            self.path.finish(plan, scratch, after)
            return after.newest
        streams_TMD, mtp, dspark = after.newest, self.mtp_head, self.dspark_head
        if dspark is not None:
            main = rotation(self.get_buffer("rope_main"), plan.position_T)
            for stage, rows_TD in enumerate(dspark.kv_rows(after.streams, main)):
                scratch.write("head_kv", stage, rows_TD)
        if mtp is not None:
            rows_RD = scratch.write("pending_stream", 0, streams_TMD.flatten(1))
            previous_TMD = rows_RD[plan.parent_stream_T].unflatten(-1, (self.config.hc_mult, -1))
            before = rotation(self.get_buffer("rope_main"), plan.position_T - 1)
            scratch.write("head_kv", 0, mtp.kv_rows(previous_TMD, self.embed(plan.tokens_T), before))
        return streams_TMD

    def logits(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        if self.few is not None and self.few.takes_nodes(len(streams_TMD)):
            return self.few.logits(streams_TMD)
        return self._project(self.norm(self.collapse_head(streams_TMD)))

    def _project(self, x_TD: torch.Tensor) -> torch.Tensor:
        logits_TV: torch.Tensor = self.head(x_TD)
        return self.group.all_gather(logits_TV.to(self.precision.wide))

    def num_experts(self, num_nodes: float) -> float:
        # As if nodes were routed independently and evenly: an upper bound, since a tree's nodes resemble each other.
        missed: float = (1 - self.config.num_experts_per_tok / self.config.n_routed_experts) ** num_nodes
        return self.config.n_routed_experts * (1 - missed)

    def draft_step(self, step: DraftStep, scratch: Scratch) -> StepDraft:
        if self.few is not None and self.few.takes_nodes(len(step.tokens_N)):
            return self.few.draft_step(step, scratch)
        head = self.mtp_head
        assert head is not None, "this model has no MTP head"
        if self.path is not None:
            streams_NMD = self.path.draft_step(step, scratch)
        else:
            streams_NMD = self._head_streams(head, step, scratch)
        logits_NV = self._project(head.norm(head.collapse_head(streams_NMD)))
        return StepDraft(streams_NMD=streams_NMD, logits_NV=logits_NV)

    def _head_streams(self, head: MTPHead, step: DraftStep, scratch: Scratch) -> torch.Tensor:
        here = AttentionRound(
            rotation=rotation(self.get_buffer("rope_main"), step.position_N),
            window_rows_TW=step.window_rows_NW,
            scratch=scratch,
            kv_pool="head_kv",
            first=step.first,
            compression=None,
        )
        return head.step(step.streams_NMD, self.embed(step.tokens_N), step.tokens_N, here)

    def draft_block(self, block: DraftBlock, scratch: Scratch) -> BlockDraft:
        head = self.dspark_head
        assert head is not None, "this model has no DSpark head"
        tokens_BS = block.roots_B.new_full((len(block.roots_B), self.draft_block_size), head.settings.noise_token_id)
        tokens_BS[:, 0] = block.roots_B
        tokens_N = tokens_BS.flatten()
        here = AttentionRound(
            rotation=rotation(self.get_buffer("rope_main"), block.position_N),
            window_rows_TW=block.rows_NW,
            scratch=scratch,
            kv_pool="head_kv",
            first=0,
            compression=None,
        )
        if self.path is not None:
            hidden_ND = self.path.draft_hidden(tokens_N, block, scratch)
        elif self.few is not None and self.few.takes_nodes(len(tokens_N)):
            hidden_ND = self.few.draft_hidden(tokens_N, block, scratch)
        else:
            hidden_ND = head.hidden(self.embed(tokens_N), tokens_N, here)
        logits_NV = self._project(head.stages[-1].norm(hidden_ND))
        places = (len(block.roots_B), -1)
        return BlockDraft(hidden_BSD=hidden_ND.unflatten(0, places), logits_BSV=logits_NV.unflatten(0, places))

    def draft_bias(self, tokens_N: torch.Tensor) -> torch.Tensor:
        head = self.dspark_head
        assert head is not None, "this model has no DSpark head"
        bias_NV: torch.Tensor = head.stages[-1].markov_head(tokens_N)
        return bias_NV.to(self.precision.wide)

    def draft_confidence(self, hidden_ND: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        head = self.dspark_head
        assert head is not None, "this model has no DSpark head"
        return head.confidence(hidden_ND, tokens_N)
