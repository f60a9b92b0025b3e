"""From a checkpoint folder or hub id to a model that decodes."""

import warnings
from importlib.resources import files
from pathlib import Path

import torch

from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.layout import CacheShape
from compressed_spec.memory import check_fits
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint, open_checkpoint
from compressed_spec.models.deepseek_v4.compiled import compile_few, has_compiler
from compressed_spec.models.deepseek_v4.kernel_choice import takes_triton
from compressed_spec.models.deepseek_v4.kernel_path import KernelPath
from compressed_spec.models.deepseek_v4.layer_ops import triton_ops
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.quantized import torch_kernels, triton_kernels
from compressed_spec.models.deepseek_v4.weights import load_weights
from compressed_spec.parallel import ALONE, ParallelGroup

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = ("auto", "fp8")
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
    kernels: str = "auto",
    kv_dtype: str = "auto",
    group: ParallelGroup = ALONE,
    room_for: CacheShape | None = None,
) -> DeepseekV4:
    """Load a DeepSeek-V4 checkpoint: a local folder, a hub id, or "demo" for the bundled one. Needs no tokenizer.

    dtype: "float32", "float64", "bfloat16" or "float16", of matrices, activations and KV; stored FP8 and FP4 weights
    are dequantised to it. progress: show a bar on stderr.
    numerics: "fast", or "invariant" for tokens, logits and state that are bit for bit the same with speculation or
    without, in any tree, batch and prefill chunk, on a CPU with a fixed number of threads, in one process.
    compile: give rounds of few nodes a compiled forward, for a CPU: several times faster on small models, after a
    minute or two of compiling (a second once it is on disk, see `ahead.cache_folder`). Warns and does without where
    there is no C++ compiler.
    keep_quantized: leave stored FP8 and FP4 weights as they are, to be decoded by the products: a quarter to a half of
    the memory, and on a GPU as much less to read. Not with invariant numerics, and in one process.
    kernels: what carries out layers and commits: "torch", "triton" (a GPU, or Triton's interpreter where
    TRITON_INTERPRET=1 is set; not in float64, nor with invariant numerics), or "auto", Triton's wherever there is a GPU
    and the dtype is not float64.
    kv_dtype: "auto", in `dtype`, or "fp8": KV and compressed entries packed as E4M3, with scales, but for their rotated
    channels, which stay bfloat16: about half of bfloat16's memory, rounded as the checkpoint was trained for.
    group: the processes that share the model (see `launch.join`); each calls this with the same arguments but for its
    own device, and gets its part. room_for: a cache that shall fit beside the weights.
    Raises ValueError, naming the tensor or key and the remedy, for whatever is wrong with the checkpoint, and, before
    any weight is read, for what does not fit the device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"Unknown dtype {dtype!r}: use one of {', '.join(DTYPES)}.")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"Unknown kv_dtype {kv_dtype!r}: use one of {', '.join(KV_DTYPES)}.")
    numerics_named(numerics)
    if numerics == "invariant" and torch.device(device).type != "cpu":
        raise ValueError(f"Invariant numerics hold on a CPU only, not on {device}: use numerics='fast' there.")
    if keep_quantized and (numerics == "invariant" or group.size > 1):
        raise ValueError("keep_quantized is for fast numerics and one process: leave it out, or the other options.")
    if numerics == "invariant" and group.size > 1:
        raise ValueError("Invariant numerics hold in one process only: use numerics='fast' with several.")
    with group.together():
        _check_device(device)
    triton = takes_triton(kernels, device=torch.device(device), dtype=DTYPES[dtype], numerics=numerics)
    fp8_rows, stored = kv_dtype == "fp8", keep_quantized or kv_dtype == "fp8"
    if compile and (triton or stored or numerics != "fast" or torch.device(device).type != "cpu" or group.size > 1):
        raise ValueError(
            "compile=True is for fast numerics on a CPU without Triton, dequantised weights and KV, and one process: "
            "leave it out, or the other options."
        )
    with group.together():
        checkpoint = open_checkpoint(checkpoint_folder(path_or_repo_id))
        model = empty_model(checkpoint, dtype=DTYPES[dtype], numerics=numerics, fp8_rows=fp8_rows, group=group)
        weights = checkpoint.tensors if keep_quantized else model.state_dict()
        _check_fits(model, sum(tensor.nbytes for tensor in weights.values()), room_for, torch.device(device))
    group.check_same("the checkpoint", (checkpoint.config, checkpoint.draft_head, checkpoint.tensors, dtype, kv_dtype))
    quantized = (triton_kernels if triton else torch_kernels)() if keep_quantized else None
    with group.together():
        load_weights(
            model,
            checkpoint,
            device=torch.device(device),
            progress=progress,
            quantized=quantized,
            group=group,
        )
    model = model.to(device).eval().requires_grad_(False)
    model.path = KernelPath(model, triton_ops()) if triton else None
    if compile and has_compiler():
        compile_few(model, progress=progress)
    elif compile:
        warnings.warn("There is no C++ compiler here (set CXX), so the model is not compiled.", stacklevel=2)
    return model


def empty_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    numerics: str = "fast",
    fp8_rows: bool = False,
    group: ParallelGroup = ALONE,
) -> DeepseekV4:
    """A process's part of a checkpoint's model without its values, on the meta device."""
    with torch.device("meta"):
        return DeepseekV4(
            checkpoint.config,
            draft_head=checkpoint.draft_head,
            num_draft_layers=checkpoint.num_draft_layers,
            dtype=dtype,
            numerics=numerics,
            fp8_rows=fp8_rows,
            group=group,
        )


def _check_fits(model: DeepseekV4, weights: int, room_for: CacheShape | None, device: torch.device) -> None:
    check_fits("A model", weights, device, "take a narrower dtype or more processes")
    if room_for is not None:
        cache = room_for.nbytes(model.state_spec())
        check_fits("A model with its cache", weights + cache, device, "take fewer sequences or shorter ones")


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"Device {str(device)!r} cannot be used ({reason}): use 'cpu', or one that is here.") from None


def checkpoint_folder(path_or_repo_id: str | Path) -> str | Path:
    """The bundled checkpoint's folder for "demo", anything else as it is."""
    return DEMO if str(path_or_repo_id) == "demo" else path_or_repo_id
