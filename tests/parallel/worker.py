"""One process of a run: what it must answer like a process alone, as JSON from the first one."""

import argparse
import json
import zlib
from typing import Any

import torch
import torch.distributed as dist

from compressed_spec import generate, load_model
from compressed_spec.launch import Process, join
from compressed_spec.models.deepseek_v4.kernel_path import KernelPath
from compressed_spec.models.deepseek_v4.layer_ops import torch_ops
from compressed_spec.parallel import PeerError
from compressed_spec.testing.parallel import logits_of, text_of, ways
from compressed_spec.tree import TokenTree


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--kernel-path", action="store_true")
    args = parser.parse_args()
    process = Process.from_environment()
    results: dict[str, Any] = {}
    with join(process, device="cpu", group_size=args.group_size) as run:
        for folder in args.folders:
            model = load_model(folder, group=run.group, progress=False)
            model.path = KernelPath(model, torch_ops()) if args.kernel_path else None
            logits_TV = logits_of(model)
            run.group.check_same_bits("the logits", [logits_TV])
            texts: dict[str, Any] = {}
            for name, (_, options) in ways(model, every=args.every).items():
                try:
                    texts[name] = text_of(model, options)
                except ValueError as refusal:
                    texts[name] = str(refusal)
                run.group.check_same(name, texts[name])
            results[folder] = {"logits": logits_TV.tolist(), "texts": texts}
        replicas: list[Any] = [None] * process.world_size
        dist.all_gather_object(replicas, (run.replica, run.group.rank, zlib.crc32(json.dumps(results).encode())))
        results["replicas"] = replicas
        results["asked"] = asked_once(model)
        results["different"] = disagreement(model)
    if process.is_first:
        print(json.dumps(results))


def asked_once(model: Any) -> list[str]:
    """What users hand in is asked on the first process alone, so that it may be as moody as it likes."""

    def moody(history: object, logits_V: torch.Tensor) -> torch.Tensor:
        assert model.group.is_first
        return logits_V

    def failing(history: object, logits_V: torch.Tensor) -> torch.Tensor:
        raise KeyError("a processor's own")

    generate(model, [[3, 4]], max_new_tokens=3, logits_processor=moody)
    try:
        generate(model, [[3, 4]], max_new_tokens=3, logits_processor=failing)
    except (KeyError, PeerError) as error:
        mine = f"{type(error).__name__}: {error}"
    return [mine, *(text for text in gathered(model, mine) if text != mine)]


def gathered(model: Any, text: str) -> list[str]:
    """Every process's text, by way of as many tensors."""
    codes = torch.zeros(256, dtype=torch.int64)
    codes[: len(text.encode()[:256])] = torch.tensor(list(text.encode()[:256]))
    rows = model.group.all_gather(codes).unflatten(0, (model.group.size, -1)).tolist()
    return [bytes(code for code in row if code).decode() for row in rows]


def disagreement(model: Any) -> dict[str, str]:
    """Processes that are about to process different nodes, or whose streams differ, all stop in that round."""
    found = {}
    cache = model.new_cache(max_length=32)
    model.prefill(cache, [[3, 4, 5]])
    token = 6 if model.group.is_first else 7
    try:
        model.verify(cache, [TokenTree(tokens=[token], parents=[-1])])
    except PeerError as error:
        found["nodes"] = str(error)
    model.layers[0].attn.wkv.weight *= 1.0 if model.group.is_first else 1.01
    try:
        model.verify(cache, [TokenTree(tokens=[6], parents=[-1])])
    except PeerError as error:
        found["state"] = str(error)
    return found


if __name__ == "__main__":
    main()
