"""Train the bundled demo checkpoint: `python scripts/train_demo.py --data ../shared/data --minutes 75`."""

import json
from pathlib import Path

import torch
import tyro

from compressed_spec.models.deepseek_v4.load import DEMO
from compressed_spec.training.card import PICTURE, Run, draw_losses, final_losses, model_card, read_log
from compressed_spec.training.corpus import encode, read_corpus, read_gsm8k, train_tokenizer
from compressed_spec.training.export import export_checkpoint
from compressed_spec.training.gate import measure_gate
from compressed_spec.training.loop import LOG_FILE, Budget, Trainer, load_tokenizer, tokenizer_in
from compressed_spec.training.recipe import VOCAB_SIZE, Recipe, demo_config


def main(
    *,
    data: Path = Path("../shared/data"),
    work_dir: Path = Path("/tmp/compressed_spec_demo"),
    output: Path = DEMO,
    minutes: float = 75.0,
    steps: int | None = None,
    seed: int = 0,
    processes: int = 2,
    compile: bool = True,
    train: bool = True,
    gate_prompts: int = 100,
) -> None:
    """Train, resuming where WORK_DIR left off; then export to OUTPUT and measure what was exported.

    Args:
        data: folder with gsm8k_train.jsonl, mbpp.jsonl and, to measure, gsm8k_test.jsonl.
        work_dir: keeps the tokenizer, the training state and the log of losses.
        output: folder of the checkpoint.
        minutes: length of the whole run; the learning rate ends with it.
        steps: length in steps instead of minutes (reproducible).
        seed: of weights, order and choices.
        processes: of one thread each; on shared cores faster than threads, which wait for each other.
        compile: fuse with torch.compile (needs a C++ compiler).
        train: no: only export and measure what WORK_DIR holds.
        gate_prompts: test problems to measure on, 0 for none.
    """
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")  # bfloat16 products where the CPU has them
    documents = read_corpus(data)
    work_dir.mkdir(parents=True, exist_ok=True)
    if not tokenizer_in(work_dir).exists():
        train_tokenizer(documents, VOCAB_SIZE).save(str(tokenizer_in(work_dir)))
    tokenizer, config, recipe = load_tokenizer(work_dir), demo_config(), Recipe(seed=seed)
    trainer = Trainer(
        config,
        encode(documents, tokenizer),
        recipe,
        Budget(minutes=minutes if steps is None else None, steps=steps),
        work_dir,
        processes=processes if train else 1,
        compile=compile and train,
    )
    if train:
        trainer.run()
    trainer.close()

    torch.set_float32_matmul_precision("highest")
    log = read_log(work_dir / LOG_FILE)
    run = Run(
        num_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        steps=trainer.step,
        tokens=trainer.tokens_seen,
        seconds=trainer.seconds,
        final=final_losses(log),
    )
    export_checkpoint(trainer.model, config, tokenizer, output, model_card(recipe, run, None))
    draw_losses(log, output / PICTURE)
    if gate_prompts:
        problems = read_gsm8k(data / "gsm8k_test.jsonl")[:gate_prompts]
        gate = measure_gate(output, [p.prompt for p in problems], [p.completion for p in problems])
        (output / "README.md").write_text(model_card(recipe, run, gate), encoding="utf-8")
        print(json.dumps({name: getattr(gate, name) for name in gate.__slots__} | {"passed": gate.passed}))


if __name__ == "__main__":
    tyro.cli(main)
