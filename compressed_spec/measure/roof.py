"""The least that a plain token can take: the bytes that it must read, over the memory's measured bandwidth."""

from dataclasses import dataclass

import torch

from compressed_spec.layout import StateSpec
from compressed_spec.measure.timing import Summary, seconds, summarize
from compressed_spec.models.deepseek_v4.model import DeepseekV4

BUFFER_BYTES = 256 * 2**20  # more than any processor's caches hold


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """Bytes that decoding one token reads: of weights, and of state."""

    weights: int
    state: int

    @property
    def total(self) -> int:
        return self.weights + self.state


def token_bytes(model: DeepseekV4, context: int) -> TokenBytes:
    """What a plain token after `context` others reads, each byte once.

    Of the weights: all of the target but the rows of embedding and hash tables, and the experts, that one token does
    not use, and the indexer's queries while every entry is chosen anyway. Of the state, see `state_bytes`.
    """
    config, spec = model.config, model.state_spec()
    topk = {comp.index_topk: (context + 1) // comp.ratio for comp in spec.compressions if comp.index_topk}
    scoring = any(visible > k for k, visible in topk.items())
    weights = 0
    for name, tensor in model.state_dict().items():
        if name.startswith("mtp."):
            continue
        if name == "embed.weight" or name.endswith(".tid2eid"):
            weights += tensor[0].nbytes
        elif ".ffn.experts." in name:
            weights += tensor.nbytes * config.num_experts_per_tok // config.n_routed_experts
        elif scoring or not name.endswith((".indexer.wq_b.weight", ".indexer.weights_proj.weight")):
            weights += tensor.nbytes
    return TokenBytes(weights=weights, state=state_bytes(spec, context))


def state_bytes(spec: StateSpec, context: int) -> int:
    """Bytes of rows that a node after `context` committed tokens reads, itself included.

    Its window; the entries that it attends to; the index keys that it scores; and a share of the window that its
    compressors pool once in `ratio` tokens.
    """
    item, wide = spec.dtype.itemsize, spec.buffer_dtype.itemsize
    total = spec.num_layers * min(context + 1, spec.sliding_window) * spec.head_dim * item
    for comp in spec.compressions:
        visible = (context + 1) // comp.ratio
        chosen = min(visible, comp.index_topk) if comp.index_topk else visible
        scored = visible if visible > chosen else 0
        pooled = 2 * (comp.entry_dim + comp.index_dim) * (2 if comp.overlap else 1) * comp.span * wide // comp.ratio
        total += comp.num_layers * ((chosen * comp.entry_dim + scored * comp.index_dim) * item + pooled)
    return total


def bandwidth(device: torch.device, repeats: int) -> Summary:
    """Bytes a second that summing a large buffer reads, with torch's threads."""
    buffer = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    buffer.sum()
    return summarize([buffer.nbytes / seconds(lambda: buffer.sum().item()) for _ in range(repeats)])
