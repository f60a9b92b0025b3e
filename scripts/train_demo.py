"""Train the bundled demo checkpoint: `python scripts/train_demo.py --data ../shared/data --minutes 75`."""

from pathlib import Path

import torch
import tyro

from compressed_spec.training.corpus import encode, read_corpus, train_tokenizer
from compressed_spec.training.loop import Budget, Trainer, load_tokenizer, tokenizer_in
from compressed_spec.training.recipe import VOCAB_SIZE, Recipe, demo_config


def main(
    *,
    data: Path = Path("../shared/data"),
    work_dir: Path = Path("/tmp/compressed_spec_demo"),
    minutes: float = 75.0,
    steps: int | None = None,
    seed: int = 0,
    processes: int = 2,
    compile: bool = True,
) -> None:
    """Train, resuming where WORK_DIR left off.

    Args:
        data: folder with gsm8k_train.jsonl and mbpp.jsonl.
        work_dir: keeps the tokenizer, the training state and the log of losses.
        minutes: length of the whole run; the learning rate ends with it.
        steps: length in steps instead of minutes (reproducible).
        seed: of weights, order and choices.
        processes: of one thread each; on shared cores faster than threads, which wait for each other.
        compile: fuse with torch.compile (needs a C++ compiler).
    """
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")  # bfloat16 products where the CPU has them
    documents = read_corpus(data)
    work_dir.mkdir(parents=True, exist_ok=True)
    if not tokenizer_in(work_dir).exists():
        train_tokenizer(documents, VOCAB_SIZE).save(str(tokenizer_in(work_dir)))
    encoded = encode(documents, load_tokenizer(work_dir))
    budget = Budget(minutes=minutes if steps is None else None, steps=steps)
    trainer = Trainer(
        demo_config(), encoded, Recipe(seed=seed), budget, work_dir, processes=processes, compile=compile
    )
    trainer.run()
    trainer.close()


if __name__ == "__main__":
    tyro.cli(main)
