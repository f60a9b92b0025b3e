"""A model over the weights of a loaded transformers model, without a second copy of them."""

import torch
from transformers import DeepseekV4ForCausalLM, PreTrainedModel

from compressed_spec.models.deepseek_v4.checkpoint import some_of
from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind, Layout, upstream_name


def share_parameters(hf_model: PreTrainedModel) -> DeepseekV4:
    """This package's model over the storage of a transformers `DeepseekV4ForCausalLM`. It has no draft head.

    The dtype is that of `lm_head`. Tensors that are kept wider here than there are the only ones copied: beside 16-bit
    weights the gates of the routers and the projections of the compressors (0.35 of V4-Flash's 284 billion weights).
    Changes of the other model's weights show through shared tensors but not through copied ones, so share anew then:
    it takes about 10 ms a layer.

    Raises ValueError for another architecture, weights that are quantised, adapted, offloaded or on several devices,
    or a config that cannot be run exactly.
    """
    if not isinstance(hf_model, DeepseekV4ForCausalLM):
        raise ValueError(f"Only a DeepseekV4ForCausalLM can be decoded here, not a {type(hf_model).__name__}.")
    config = parse_config(hf_model.config.to_dict())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in hf_model.state_dict().items():
        # A plain tensor: neither sharded (DTensor) nor quantised by a subclass.
        if type(tensor) is not torch.Tensor or tensor.is_meta:
            raise ValueError(f"{name} is offloaded, sharded or quantised: load the model whole, on one device.")
        upstream = upstream_name(name, Layout.TRANSFORMERS)
        tensors[upstream.removesuffix(".weight") if ".experts.w" in upstream else upstream] = tensor
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"The weights lie on {len(devices)} devices: load the model on one.")
    dtype = hf_model.lm_head.weight.dtype
    with torch.device("meta"):
        model = DeepseekV4(config, draft_head=DraftHeadKind.NONE, dtype=dtype)
    targets = model.state_dict()
    odd = targets.keys() ^ tensors.keys()
    odd |= {name for name in targets.keys() & tensors.keys() if targets[name].shape != tensors[name].shape}
    if odd:
        raise ValueError(
            f"Not the plain weights of this architecture: {some_of(tuple(sorted(odd)))}; "
            "merge adapters, and load with dequantised weights."
        )
    shared = {name: tensor.to(targets[name].dtype) for name, tensor in tensors.items()}
    model.load_state_dict(shared, strict=True, assign=True)
    return model.to(devices.pop()).eval().requires_grad_(False)
