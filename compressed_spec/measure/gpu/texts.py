"""Texts of a small random model, by kernels and whole rounds and by plain torch: the way that users meet them."""

import torch

from compressed_spec.generate import generate
from compressed_spec.models.deepseek_v4.kernel_path import KernelPath
from compressed_spec.models.deepseek_v4.layer_ops import triton_ops
from compressed_spec.testing.models import random_model, random_text


def differing_texts(device: torch.device, *, max_new_tokens: int) -> dict[str, int]:
    """How many of three texts differ, for each way of decoding; float32, so that only a near tie could excuse one."""
    model = random_model((4, 8), dtype=torch.float32).to(device)
    prompts = [random_text(count, seed=count) for count in (15, 3, 30)]
    found = {}
    for tree in ("off", "s3_k2_d6"):
        for temperature in (0.0, 0.8):
            texts = []
            for path in (None, KernelPath(model, triton_ops())):
                model.path = path
                outs = generate(
                    model,
                    prompts,
                    tree=tree,
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    stop_token_ids=[],
                    batch_size=2,
                )
                texts.append([out.token_ids for out in outs])
            found[f"{tree} at temperature {temperature}"] = sum(a != b for a, b in zip(*texts, strict=True))
    return found
