"""Seconds of verifying and of drafting, part by part: the slower of moving a part's bytes and computing its products.

Parts run one after the other. Nodes choose experts and index entries independently and evenly, which is an upper bound
(nodes of a tree resemble each other); ranks are balanced, which is a lower one.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from compressed_spec.measure.planning.devices import Device
from compressed_spec.measure.planning.storage import Part, Rate, Storage, Weight, check_split, model_weights
from compressed_spec.models.deepseek_v4.config import AttentionKind, DeepseekV4Config, LayerSpec
from compressed_spec.models.deepseek_v4.names import DRAFT_LAYER, DraftHeadKind
from compressed_spec.shaping.costs import CostModel

# Kernels of a fused implementation. An assumption: what a good engine launches, not a count of this one.
_BLOCK_KERNELS = {AttentionKind.SLIDING: 24, AttentionKind.HCA: 28, AttentionKind.CSA: 38}
_ROUND_KERNELS = 40  # metadata, embedding, head, sampling, commit
_DRAFT_KERNELS = 12  # of a draft step, beside its block: inputs, head, choice of children
# Passes of a block over a node's streams, heads, expert inputs and expert widths, where each operation is a kernel;
# fused ones pass over the streams alone.
_STREAM_PASSES, _HEAD_PASSES, _INPUT_PASSES, _EXPERT_PASSES = 12, 12, 4, 8
_FUSED_PASSES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model as it is stored and shared. kv_bytes: of an element of the history; num_ranks: devices."""

    config: DeepseekV4Config
    storage: Storage
    draft_head: DraftHeadKind
    num_draft_layers: int
    num_ranks: int = 1
    kv_bytes: int = 2

    def weights(self) -> list[Weight]:
        """Every parameter."""
        return model_weights(self.config, self.storage, self.draft_head, self.num_draft_layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each rank."""
        return sum(weight.per_rank(self.num_ranks) for weight in self.weights())


def distinct(count: int, chosen: int, num_nodes: float) -> float:
    """How many of `count` things are expected to be chosen by at least one node, each choosing `chosen` evenly."""
    return count * (1 - (1 - min(chosen, count) / count) ** num_nodes) if count else 0.0


def _cost_model(config: DeepseekV4Config, device: Device) -> CostModel | None:
    found = device.overhead
    if found is None:
        return None
    if found.num_layers != config.num_hidden_layers:
        raise ValueError(
            f"The device {device.name} was measured for a model of {found.num_layers} layers, not "
            f"{config.num_hidden_layers}: measure it again for this one."
        )
    experts = partial(distinct, config.n_routed_experts, config.num_experts_per_tok)
    return CostModel(verify=found.verify, draft=found.draft, num_experts=experts)


Seconds = Mapping[Part, float]


class Roofline:
    """Predicted seconds of a model on a device.

    Raises ValueError if so many ranks cannot share the model, or if the device was measured for another.
    """

    def __init__(self, model: PlannedModel, device: Device) -> None:
        check_split(model.config, model.num_ranks)
        self.model, self.device = model, device
        self._overhead = _cost_model(model.config, device)
        self._blocks: dict[str, list[Weight]] = defaultdict(list)
        for weight in model.weights():
            self._blocks[weight.block].append(weight)
        # Layers of one kind cost the same.
        self._layers: list[tuple[LayerSpec, str, int]] = []
        for spec, count in Counter(model.config.layers).items():
            self._layers.append((spec, f"layers.{model.config.layers.index(spec)}", count))

    def verify(self, num_rows: int, num_nodes: int, context: int) -> Seconds:
        """Of one verification: `num_nodes` nodes of all rows together, after `context` tokens each; commit included."""
        sums: dict[Part, float] = defaultdict(float)
        for spec, block, count in self._layers:
            self._block(sums, spec, block, num_rows, num_nodes, context, count)
        self._head(sums, "", num_nodes)
        self._message(sums, num_nodes * self.model.config.hidden_size * 2)  # the embedding's
        if self.model.draft_head is DraftHeadKind.MTP:  # the rows that its head reads later
            self._matrices(sums, "mtp.0", num_nodes, {Part.DRAFT_INPUT})
        self._launch(sums, sum(count * _BLOCK_KERNELS[spec.kind] for spec, _, count in self._layers) + _ROUND_KERNELS)
        if self._overhead is not None:
            sums[Part.LAUNCHES] += self._overhead.verify_seconds(num_rows, num_nodes, context)
        return dict(sums)

    def draft(self, num_rows: int, widths: Sequence[int], context: int) -> Seconds:
        """Of drafting with the model's own head: `widths[i]` nodes a row in step i. Nothing without a head.

        A DSpark head drafts its block in one pass; the steps then add what is known of the tokens.
        """
        sums: dict[Part, float] = defaultdict(float)
        head = self.model.draft_head
        if head is DraftHeadKind.NONE or not widths:
            return dict(sums)
        if head is DraftHeadKind.DSPARK:
            self._draft_block(sums, num_rows, widths, context)
        else:
            for width in widths:
                nodes = num_rows * width
                self._matrices(sums, "mtp.0", nodes, {Part.DRAFT_INPUT})
                self._block(sums, DRAFT_LAYER, "mtp.0", num_rows, nodes, context, 1)
                self._head(sums, "mtp.0", nodes)
                self._launch(sums, _BLOCK_KERNELS[AttentionKind.SLIDING] + _DRAFT_KERNELS)
        if self._overhead is not None:
            sums[Part.LAUNCHES] += self._overhead.draft_seconds(num_rows, len(widths), max(widths[1:], default=1))
        return dict(sums)

    def _draft_block(self, sums: dict[Part, float], num_rows: int, widths: Sequence[int], context: int) -> None:
        config, stages = self.model.config, self.model.num_draft_layers
        assert config.dspark is not None
        nodes, last = num_rows * config.dspark.block_size, f"mtp.{stages - 1}"
        for stage in range(stages):
            self._block(sums, DRAFT_LAYER, f"mtp.{stage}", num_rows, nodes, context, 1)
        self._matrices(sums, "mtp.0", num_rows, {Part.DRAFT_INPUT})
        self._head(sums, last, nodes)
        for width in widths:
            self._matrices(sums, last, num_rows * width, {Part.MARKOV})
        self._launch(sums, stages * _BLOCK_KERNELS[AttentionKind.SLIDING] + _DRAFT_KERNELS * (1 + len(widths)))

    def _block(
        self,
        sums: dict[Part, float],
        spec: LayerSpec,
        block: str,
        num_rows: int,
        num_nodes: int,
        context: int,
        count: int,
    ) -> None:
        """`count` decoder blocks of one kind."""
        config, one = self.model.config, defaultdict[Part, float](float)
        dense = {Part.HYPER, Part.ATTENTION, Part.COMPRESSOR, Part.INDEXER, Part.ROUTER, Part.SHARED}
        self._matrices(one, block, num_nodes, dense)
        self._experts(one, block, num_nodes)
        self._activations(one, num_nodes)
        self._history(one, Part.WINDOW, num_rows, num_nodes, min(context, config.sliding_window), config.sliding_window)
        if spec.kind is not AttentionKind.SLIDING:
            entries = context // spec.ratio
            listed = min(entries, config.index_topk) if spec.kind is AttentionKind.CSA else entries
            self._history(one, Part.ENTRIES, num_rows, num_nodes, entries, listed)
            if spec.kind is AttentionKind.CSA and entries > config.index_topk:
                self._index(one, num_rows, num_nodes, entries)
        for _ in range(2):  # attention's and the experts' sums
            self._message(one, num_nodes * config.hidden_size * 4)
        for part, seconds in one.items():
            sums[part] += count * seconds

    def _matrices(self, sums: dict[Part, float], block: str, num_nodes: int, parts: set[Part]) -> None:
        ranks = self.model.num_ranks
        for weight in self._blocks[block]:
            if weight.part in parts and weight.is_matrix:
                elements = weight.num_elements / (ranks if weight.split else 1)
                self._work(sums, weight.part, weight.per_rank(ranks), 2 * num_nodes * elements, weight.rate)

    def _experts(self, sums: dict[Part, float], block: str, num_nodes: int) -> None:
        config, ranks = self.model.config, self.model.num_ranks
        share = distinct(config.n_routed_experts, config.num_experts_per_tok, num_nodes) / config.n_routed_experts
        chosen = config.num_experts_per_tok / config.n_routed_experts
        for weight in self._blocks[block]:
            if weight.part is Part.EXPERTS:
                flops = 2 * num_nodes * chosen * weight.num_elements / ranks
                self._work(sums, Part.EXPERTS, share * weight.per_rank(ranks), flops, weight.rate)

    def _activations(self, sums: dict[Part, float], num_nodes: int) -> None:
        """What a block does between its products."""
        config, device = self.model.config, self.device
        node_bytes, streams = num_nodes * self.model.kv_bytes, config.hc_mult * config.hidden_size
        if not device.pass_bandwidth:
            self._work(sums, Part.ACTIVATIONS, _FUSED_PASSES * node_bytes * streams, 0.0, Rate.FP32)
            return
        chosen = config.num_experts_per_tok
        passes = _STREAM_PASSES * streams + _HEAD_PASSES * config.num_attention_heads * config.head_dim
        passes += chosen * (_INPUT_PASSES * config.hidden_size + _EXPERT_PASSES * config.moe_intermediate_size)
        sums[Part.ACTIVATIONS] += node_bytes * passes / device.pass_bandwidth

    def _head(self, sums: dict[Part, float], block: str, num_nodes: int) -> None:
        """Streams to logits: the block's own collapse, the model's vocabulary head."""
        config, ranks = self.model.config, self.model.num_ranks
        self._matrices(sums, "", num_nodes, {Part.HEAD})
        if block == "":
            self._matrices(sums, block, num_nodes, {Part.HYPER})
        logits_bytes = num_nodes * config.vocab_size * 4
        self._work(sums, Part.HEAD, 3 * logits_bytes / ranks, 0.0, Rate.FP32)  # written, and read twice
        self._message(sums, logits_bytes / 2)  # gathered, not reduced: half the traffic

    def _history(
        self, sums: dict[Part, float], part: Part, num_rows: int, num_nodes: int, there: int, listed: int
    ) -> None:
        """Attention of each node to `listed` rows out of `there`."""
        config, device, listed = self.model.config, self.device, min(there, listed)
        row_bytes = config.head_dim * self.model.kv_bytes
        flops = 4 * num_nodes * listed * config.head_dim * config.num_attention_heads / self.model.num_ranks
        if device.gather_bandwidth:
            sums[part] += num_nodes * listed * row_bytes / device.gather_bandwidth
        else:
            read = num_rows * distinct(there, listed, num_nodes / num_rows)
            self._work(sums, part, read * row_bytes, flops, Rate.BF16)

    def _index(self, sums: dict[Part, float], num_rows: int, num_nodes: int, entries: int) -> None:
        """Scoring of every entry by every node, and the choice among them."""
        config, ranks = self.model.config, self.model.num_ranks
        key_bytes = num_rows * entries * config.index_head_dim * self.model.kv_bytes
        flops = 2 * num_nodes * entries * config.index_n_heads * config.index_head_dim / ranks
        score_bytes = num_nodes * entries * 4
        passes = 3.0
        if self.device.gather_bandwidth:  # scores of all heads pass through memory, twice
            passes += 4 * config.index_n_heads
        self._work(sums, Part.INDEXER, key_bytes + passes * score_bytes, flops, Rate.BF16)
        self._message(sums, score_bytes)

    def _work(self, sums: dict[Part, float], part: Part, num_bytes: float, flops: float, rate: Rate) -> None:
        sums[part] += self.device.seconds(num_bytes, flops, rate)

    def _message(self, sums: dict[Part, float], num_bytes: float) -> None:
        """One all-reduce between the ranks: each sends and receives this twice, less its own part."""
        ranks, device = self.model.num_ranks, self.device
        if ranks > 1:
            sums[Part.ALL_REDUCE] += device.link_seconds + 2 * (ranks - 1) / ranks * num_bytes / device.link_bandwidth

    def _launch(self, sums: dict[Part, float], count: int) -> None:
        if self._overhead is None:
            sums[Part.LAUNCHES] += count * self.device.launch_seconds
