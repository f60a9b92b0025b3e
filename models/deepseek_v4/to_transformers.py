"""transformers' own model over the weights of a loaded one: a peer to compare logits, texts and speed with."""

from pathlib import Path

import torch
from transformers import DeepseekV4Config as TransformersConfig
from transformers import DeepseekV4ForCausalLM, PreTrainedModel
from transformers.utils import logging

from compressed_spec.models.deepseek_v4.checkpoint import some_of
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import transformers_name


def to_transformers(model: DeepseekV4, folder: str | Path) -> PreTrainedModel:
    """A `DeepseekV4ForCausalLM` of this model's weights and the config.json in `folder`, as transformers reads it.

    Weights come from here, and not from the checkpoint, because transformers spreads the scales of FP8 blocks evenly
    over a matrix and so misreads those whose sides are no multiples of 128. Storage is shared where both keep a tensor
    in the same dtype. The draft head is left out, for transformers has none.

    Raises ValueError if transformers cannot make a model of this config, or its tensors have other names.
    """
    stacks = (".experts.w13", ".experts.w2")
    state = {
        transformers_name(f"{name}.weight" if name.endswith(stacks) else name): tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("mtp.")
    }
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        config = TransformersConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):  # the weights are dequantised already
            del config.quantization_config
        theirs = DeepseekV4ForCausalLM.from_pretrained(
            None, config=config, state_dict=state, dtype=model.embed.weight.dtype
        )
    except Exception as error:  # a KeyError for a compression ratio that it does not know, among others
        raise ValueError(
            f"transformers cannot make a model of {Path(folder) / 'config.json'} ({type(error).__name__}: {error})."
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    # What it does not find it would leave random, with a warning.
    odd = theirs.state_dict().keys() ^ state.keys()
    if odd:
        raise ValueError(f"transformers names its tensors differently: {some_of(tuple(sorted(odd)))}.")
    peer: PreTrainedModel = theirs.to(model.device).eval().requires_grad_(False)
    return peer


@torch.no_grad()
def logits_difference(ours_TV: torch.Tensor, theirs_TV: torch.Tensor) -> float:
    """The 0.9 quantile over rows of the largest difference in a row, as a part of the largest logit.

    A quantile, because the indexer and the router choose by rank: where two scores are nearly equal, rounding alone can
    turn a choice, and then one row differs visibly although all weights are right.
    """
    difference_T = (ours_TV.float() - theirs_TV.float()).abs().amax(dim=-1)
    return float(difference_T.quantile(0.9) / theirs_TV.float().abs().max())
