"""`python -m compressed_spec.demo`: one model and prompt, decoded plainly, with a chain and with a tree."""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from compressed_spec.generate import make_decoder, make_requests
from compressed_spec.models.deepseek_v4.checkpoint import resolve_folder
from compressed_spec.models.deepseek_v4.load import DEMO, load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.stats import RequestStats
from compressed_spec.streaming import TextStream
from compressed_spec.text import TextChunk, TextDecoder, load_tokenizer

DRAFTED = "bold green"
PROMPT = (
    "Question: A baker makes 12 loaves of bread each morning and sells 9 of them. She gives the rest to her neighbors. "
    "How many loaves does she give away in 5 days?\nAnswer:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of decoding the prompt."""

    label: str
    tree: str
    chunks: list[TextChunk]
    stats: RequestStats

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def tokens_per_second(self) -> float:
        times = self.stats.times
        return (len(self.token_ids) - 1) / (times.total - times.prefill)


def main(argv: list[str] | None = None) -> None:
    """Show the demo; exits with 2 after a user's fault."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("model", nargs="?", help="checkpoint folder or hub id (default: the bundled model)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tree", default="s3_k2_d6", help="tree to show, sN_kK_dD")
    parser.add_argument("--chain", default="s3_k1_d4", help="chain to compare with")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            show(args, Path(scratch), Console(highlight=False))
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2)


def show(args: argparse.Namespace, scratch: Path, console: Console) -> None:
    """Decode three times and print the text, the drafted part of it marked, and a table."""
    folder = resolve_folder(args.model) if args.model else DEMO
    if not args.model and not (DEMO / "config.json").is_file():
        folder = make_tiny_checkpoint(scratch)
        console.print("A small DeepSeek-V4 checkpoint with random weights: its text is noise, its decoding is real.\n")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    ids = tokenizer(args.prompt)["input_ids"]
    runs = []
    for label, tree in (("off", "off"), ("chain", args.chain), ("tree", args.tree)):
        texts = TextDecoder(tokenizer, 1)
        params = SamplingParams(temperature=args.temperature)
        requests = make_requests(
            model, [ids], params, max_new_tokens=args.max_new_tokens, seed=args.seed, stop_checks=[texts.stop_check(0)]
        )
        _warm_up(model, ids, tree)
        decoder = make_decoder(model, requests, tree=tree, drafter="auto", verifier="auto", batch_size=1)
        chunks = list(texts.chunks(decoder))
        runs.append(Run(label=label, tree=tree, chunks=chunks, stats=decoder.stats[0].build(decoder.clock.times())))
    console.print(Text("Prompt", style="bold"))
    console.print(escape(args.prompt) + "\n")
    colours = console.color_system is not None
    mark = ("drafted and accepted", DRAFTED) if colours else "[drafted and accepted]"
    console.print(Text.assemble(("Text", "bold"), " (", mark, ", the rest is the model's own)"))
    console.print(_marked(runs[-1].chunks, tokenizer, colours=colours))
    console.print()
    console.print(_table(runs))
    same = all(run.token_ids == runs[0].token_ids for run in runs)
    console.print("All three texts are the same, token for token." if same else "The texts differ: please report this.")
    if not same:
        sys.exit(1)


def _warm_up(model: DeepseekV4, ids: list[int], tree: str) -> None:
    requests = make_requests(model, [ids], SamplingParams(), max_new_tokens=4, stop_token_ids=[])
    decoder = make_decoder(model, requests, tree=tree, drafter="auto", verifier="auto", batch_size=1)
    while decoder.has_work:
        decoder.step()


def _marked(chunks: list[TextChunk], tokenizer: PreTrainedTokenizerBase, *, colours: bool) -> Text:
    """The text with its drafted tokens marked, by brackets where there are no colours.

    Of a character made of several tokens, the last one counts.
    """
    stream, text = TextStream(tokenizer), Text()
    for chunk in chunks:
        drafted = "".join(stream.push(token) for token in chunk.token_ids[: chunk.num_accepted])
        if drafted:
            text.append(drafted if colours else f"[{drafted}]", style=DRAFTED)
        text.append(stream.push(chunk.token_ids[chunk.num_accepted :]))
    text.append(stream.flush())
    return text


def _table(runs: list[Run]) -> Table:
    table = Table("", "tree", "rounds", "tokens a round", "tokens/s", "against off")
    plain = runs[0].tokens_per_second
    for run in runs:
        table.add_row(
            run.label,
            run.tree,
            str(run.stats.num_rounds),
            f"{run.stats.acceptance_length:.2f}",
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_second / plain:.2f}x" if plain else "-",  # a text of one token is the prefill's
        )
    return table


if __name__ == "__main__":
    main()
