"""From a checkpoint folder or hub id to a model that decodes."""

import warnings
from importlib.resources import files
from pathlib import Path

import torch

from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint
from compressed_spec.models.deepseek_v4.compiled import compile_pieces, has_compiler
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.weights import load_weights

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEMO = Path(str(files("compressed_spec"))) / "assets" / "demo"


def load_model(
    path_or_repo_id: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    numerics: str = "fast",
    compile: bool = False,
    progress: bool = True,
    keep_quantized: bool = False,
) -> DeepseekV4:
    """Load a DeepSeek-V4 checkpoint: a local folder, a hub id, or "demo" for the bundled one. Needs no tokenizer.

    dtype: "float32", "float64", "bfloat16" or "float16", of matrices, activations and KV; stored FP8 and FP4 weights
    are dequantised to it. progress: show a bar on stderr.
    numerics: "fast", or "invariant" for tokens, logits and state that are bit for bit the same with speculation or
    without, in any tree, batch and prefill chunk, on a CPU with a fixed number of threads.
    compile: fuse the small operations with torch.compile, for a CPU: several times faster on small models, after a
    minute of compiling (some 15 s once the compiler's cache on disk has it). Warns and does without where there is no
    C++ compiler.
    keep_quantized: leave stored FP8 and FP4 weights as they are, to be decoded by the products: a quarter to a half of
    the memory, and on a GPU as much less to read. Not with invariant numerics.
    Raises ValueError, naming the tensor or key and the remedy, for whatever is wrong with the checkpoint.
    """
    if dtype not in DTYPES:
        raise ValueError(f"Unknown dtype {dtype!r}: use one of {', '.join(DTYPES)}.")
    numerics_named(numerics)
    if numerics == "invariant" and torch.device(device).type != "cpu":
        raise ValueError(f"Invariant numerics hold on a CPU only, not on {device}: use numerics='fast' there.")
    if compile and (numerics != "fast" or torch.device(device).type != "cpu"):
        raise ValueError("compile=True is for fast numerics on a CPU: leave it out, or the other options.")
    if compile and keep_quantized:
        raise ValueError("compile=True needs dequantised weights: leave out keep_quantized.")
    if numerics == "invariant" and keep_quantized:
        raise ValueError("Invariant numerics need dequantised weights: leave out keep_quantized.")
    _check_device(device)
    checkpoint = open_checkpoint(checkpoint_folder(path_or_repo_id))
    with torch.device("meta"):
        model = DeepseekV4(
            checkpoint.config,
            draft_head=checkpoint.draft_head,
            num_draft_layers=checkpoint.num_draft_layers,
            dtype=DTYPES[dtype],
            numerics=numerics,
        )
    load_weights(model, checkpoint, device=torch.device(device), progress=progress, keep_quantized=keep_quantized)
    model = model.to(device).eval().requires_grad_(False)
    if compile and has_compiler():
        compile_pieces(model)
    elif compile:
        warnings.warn("There is no C++ compiler here (set CXX), so the model is not compiled.", stacklevel=2)
    return model


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"Device {str(device)!r} cannot be used ({reason}): use 'cpu', or one that is here.") from None


def checkpoint_folder(path_or_repo_id: str | Path) -> str | Path:
    """The bundled checkpoint's folder for "demo", anything else as it is."""
    return DEMO if str(path_or_repo_id) == "demo" else path_or_repo_id
