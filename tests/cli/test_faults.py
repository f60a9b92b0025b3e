"""Every fault of the user's is one sentence on stderr and exit code 2."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressed_spec import generate, load_model
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint

INDEX = "model.safetensors.index.json"


def assert_refused(ran: Any, *parts: str, out: str = "") -> str:
    """One sentence on stderr that names all `parts`, exit code 2 and nothing printed; returns the sentence."""
    assert ran.code == 2, ran
    assert ran.out == out
    assert 1 <= len(ran.err.splitlines()) <= 6
    assert "Traceback" not in ran.err
    assert ran.err.startswith("compressed-spec: ")
    for part in parts:
        assert part in ran.err, ran.err
    return str(ran.err).removeprefix("compressed-spec: ").strip()


# Faulty checkpoints


def edit_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value != "drop"}))


def edit_tensors(folder: Path, name: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the shard that holds `name`, and the index with it."""
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"][name]
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file)
    others = {key: value for key, value in index["weight_map"].items() if value != file}
    index["weight_map"] = others | dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps(index))


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, name, lambda tensors: tensors.pop(name))


def add(folder: Path) -> None:
    edit_tensors(folder, "norm.weight", lambda tensors: tensors.update(surprise=torch.zeros(3)))


def reshape(folder: Path) -> None:
    edit_tensors(
        folder, "norm.weight", lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"][:-1].clone()})
    )


def truncate(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])


def remove_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no_folder": (shutil.rmtree, ("copy does not exist", "give a checkpoint folder or a Hugging Face repo id")),
    "no_weights": (remove_weights, ("holds no weights", INDEX)),
    "no_config": (lambda f: (f / "config.json").unlink(), ("config.json does not exist", "a whole checkpoint")),
    "broken_config": (lambda f: (f / "config.json").write_text("{"), ("config.json is not valid JSON", "again")),
    "list_config": (lambda f: (f / "config.json").write_text("[]"), ("config.json must hold a JSON object",)),
    "missing_key": (lambda f: edit_config(f, hidden_size="drop"), ("hidden_size is missing from config.json", "add")),
    "mistyped_key": (lambda f: edit_config(f, hidden_size="64"), ("hidden_size", "'64'")),
    "contradiction": (lambda f: edit_config(f, o_groups=3), ("o_groups is 3", "must divide num_attention_heads = 4")),
    "ratios": (lambda f: edit_config(f, compress_ratios=[4]), ("compress_ratios has 1 entries", "add the rest")),
    "V3": (lambda f: edit_config(f, model_type="deepseek_v3"), ("model_type is 'deepseek_v3'", "only 'deepseek_v4'")),
    "V4.1": (
        lambda f: edit_config(f, model_type="deepseek_v41"),
        ("DeepSeek-V4.1 is a different architecture", "use a checkpoint whose model_type is 'deepseek_v4'"),
    ),
    "missing_tensor": (remove("norm.weight"), ("norm.weight is missing", "from the same checkpoint")),
    "missing_scale": (remove("layers.1.attn.wq_a.scale"), ("layers.1.attn.wq_a.weight", "its scale is missing")),
    "extra_tensor": (add, ("surprise is not a tensor of this architecture",)),
    "mis-shaped_tensor": (reshape, ("norm.weight has shape [63] instead of [64]",)),
    "truncated_shard": (truncate, ("model-00001-of-", "is truncated", "download it again")),
    "missing_shard": (lambda f: min(f.glob("*.safetensors")).unlink(), ("model-00001-of-", "missing", "download it")),
    "empty_index": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), (INDEX, "lists no tensors")),
    "broken_index": (lambda f: (f / INDEX).write_text("?"), (INDEX, "is not valid JSON")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_T21_a_faulty_checkpoint(run: Callable[..., Any], copy: Path, fault: str) -> None:
    """The command line says what `load_model` raises, and blames neither the tokenizer nor anything else."""
    damage, parts = FAULTS[fault]
    damage(copy)
    sentence = assert_refused(run("generate", copy, "--prompt", "hi"), *parts)
    with pytest.raises(ValueError) as error:
        load_model(copy)
    assert " ".join(sentence.split()) == " ".join(str(error.value).split())


@pytest.mark.parametrize("fault", FAULTS)
def test_inspect_lists_the_faults_of_tensors_and_refuses_the_rest(
    run: Callable[..., Any], copy: Path, fault: str
) -> None:
    FAULTS[fault][0](copy)
    ran = run("inspect", copy, "--json")
    problems = json.loads(ran.out)["problems"] if ran.out else []
    assert bool(problems) == (fault.endswith(("tensor", "scale", "shard")))
    sentence = assert_refused(ran, str(copy), out=ran.out) if problems else assert_refused(ran)
    assert all(part in " ".join([sentence, *problems]) for part in FAULTS[fault][1] if "same checkpoint" not in part)


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), ("has no tokenizer.json", "put the model's tokenizer there")),
        (lambda f: (f / "tokenizer.json").write_text("{"), ("The tokenizer in", "download it again")),
    ],
)
def test_a_faulty_tokenizer(
    run: Callable[..., Any], copy: Path, damage: Callable[[Path], object], parts: tuple[str, ...]
) -> None:
    """Text needs one; token ids in Python do not."""
    damage(copy)
    assert_refused(run("generate", copy, "--prompt", "hi"), *parts)
    assert len(generate(load_model(copy, progress=False), [[5, 6]], max_new_tokens=3)[0].token_ids) == 3


def test_a_dspark_checkpoint_drafts_with_its_own_head(run: Callable[..., Any], tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, draft_head="dspark", compress_ratios=(0, 4))
    arguments = ["generate", folder, "--prompt", "a b a b", "--max-new-tokens", 8, "--json"]
    plain, tree = (run(*arguments, "--tree", tree) for tree in ("off", "s3_k2_d6"))
    assert json.loads(plain.out)["token_ids"] == json.loads(tree.out)["token_ids"]
    assert json.loads(tree.out)["stats"]["num_draft_tokens"] > 0
    assert_refused(run(*arguments, "--drafter", "mtp"), "no MTP head: use drafter='dspark', or 'auto'")


# Faulty arguments


REFUSALS: list[tuple[list[str], tuple[str, ...]]] = [
    (["--tree", "wide"], ("Unknown tree 'wide'", "or sN_kK_dD (draft steps")),
    (["--tree", ""], ("Unknown tree ''",)),
    (["--tree", "s3_k1_d5"], ("'s3_k1_d5' is a chain of 3 drafts", "write s3_k1_d4")),
    (["--tree", "s0_k2_d3"], ("'s0_k2_d3'", "raise s and k to 1 or more")),
    (["--tree", "s3_k0_d4"], ("'s3_k0_d4'", "raise s and k to 1 or more")),
    (["--tree", "s1_k2_d9"], ("'s1_k2_d9' asks for 9 nodes", "between 2 and 3", "change d")),
    (["--tree", "s3_k2_d1"], ("'s3_k2_d1' asks for 1 nodes", "change d")),
    (["--drafter", "eagle"], ("Unknown drafter 'eagle'", "use 'auto', 'mtp', 'dspark', 'early-exit', 'ngram'")),
    (["--verifier", "typical"], ("Unknown verifier 'typical'", "'coupled', 'target'")),
    (["--verifier", "leviathan", "--temperature", "1"], ("'leviathan' takes chains only", "use 'traversal', or k1")),
    (["--verifier", "block", "--drafter", "ngram", "--tree", "s3_k1_d4"], ("'block'", "use 'coupled' or 'target'")),
    (["--max-new-tokens", "0"], ("max_new_tokens must be an int of at least 1, got 0",)),
    (["--max-new-tokens", "9000"], ("9000 new ones", "the model's 512 positions", "lower max_new_tokens")),
    (["--max-new-tokens", "many"], ("--max-new-tokens: not a whole number: 'many'",)),
    (["--temperature", "-1"], ("temperature must be a finite number of at least 0, got -1.0",)),
    (["--temperature", "nan"], ("temperature must be a finite number",)),
    (["--temperature", "hot"], ("--temperature: not a number: 'hot'",)),
    (["--top-p", "0"], ("top_p must be a number in (0, 1], got 0.0",)),
    (["--top-k", "-1"], ("top_k must be an int of at least 0, got -1",)),
    (["--top-k", "1.5"], ("--top-k: not a whole number: '1.5'",)),
    (["--min-p", "2"], ("min_p must be a number in [0, 1], got 2.0",)),
    (["--repetition-penalty", "0"], ("repetition_penalty must be a number above 0",)),
    (["--seed", "x"], ("--seed: not a whole number: 'x'",)),
    (["--batch-size", "0"], ("batch_size must be at least 1, got 0",)),
    (["--stop", ""], ("stop_strings", "leave it out")),
    (["--stream", "--json"], ("--stream", "leave out --json")),
    (["--stream", "--prompt", "two"], ("--stream", "further prompts")),
    (["--system", "x"], ("--system", "add --chat")),
    (["--thinking"], ("--thinking", "add --chat")),
    (["--reasoning-effort", "max"], ("--reasoning-effort", "add --chat")),
    (["--chat", "--reasoning-effort", "max"], ("--reasoning-effort", "add --thinking")),
    (["--device", "warp"], ("Device 'warp' cannot be used", "use 'cpu'")),
    (["--device", "cuda:99"], ("Device 'cuda:99' cannot be used", "use 'cpu'")),
    (["--dtype", "float8"], ("'float8'", "float32", "bfloat16")),
    (["--prompt"], ("Missing value for argument '--prompt'",)),
    (["--bogus"], ("Unrecognized options: --bogus", "--help")),
    (["--prompt", ""], ("The prompt '' has no tokens: give some text",)),
    (["--prompt", "\udcff"], ("not UTF-8 text",)),
    (["--prompt", "hello " * 200], ("A prompt of 800 tokens", "the model's 512 positions", "shorten the prompt")),
    (["--prompt-file", "/nowhere.txt"], ("/nowhere.txt cannot be read (No such file", "name a text file")),
    (["--prompt-file", "."], ("The prompt file . cannot be read (Is a directory)",)),
    (["-", "--prompt-file", "-"], ("Standard input can be read once",)),
    (["stray"], ("'stray' is not an option", "--prompt TEXT")),
]


@pytest.mark.parametrize(("arguments", "parts"), REFUSALS, ids=lambda value: "-".join(value)[:40])
def test_T36_a_faulty_argument(
    run: Callable[..., Any], tiny: Path, arguments: list[str], parts: tuple[str, ...]
) -> None:
    assert_refused(run("generate", tiny, "--prompt", "hi", *arguments), *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ("generate, inspect",)),
        (["frob"], ("Unrecognized options: frob",)),
        (["generate"], ("MODEL", "Checkpoint: a folder")),
        (["inspect"], ("MODEL",)),
        (["inspect", "/nowhere"], ("/nowhere does not exist",)),
        (["inspect", "/nowhere", "--stream"], ("--stream",)),
        (["generate", "/nowhere"], ("No prompt: give --prompt TEXT",)),
        (["generate", "/nowhere", "--prompt", "hi"], ("/nowhere does not exist: give a checkpoint folder",)),
    ],
    ids=lambda value: "-".join(value)[:40],
)
def test_T36_a_faulty_command(run: Callable[..., Any], arguments: list[str], parts: tuple[str, ...]) -> None:
    assert_refused(run(*arguments), *parts)


@pytest.mark.parametrize("size", ["--batch-size", "--max-length", "--max-nodes"])
def test_T36_inspect_refuses_a_cache_of_nothing(run: Callable[..., Any], tiny: Path, size: str) -> None:
    assert_refused(run("inspect", tiny, size, 0), "of at least 1, got 0")


def test_T36_a_head_that_is_not_there(run: Callable[..., Any], tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, draft_head="none", compress_ratios=(0, 4))
    for drafter, head in (("mtp", "MTP"), ("dspark", "DSpark")):
        refused = run("generate", folder, "--prompt", "a", "--drafter", drafter)
        assert_refused(refused, f"has no {head} head: use drafter='ngram', or 'auto'")


def test_T36_a_prompt_that_is_not_text(
    run: Callable[..., Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff")
    assert_refused(run("generate", tiny, "--prompt-file", tmp_path / "binary"), "binary is not UTF-8 text (byte 2")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert_refused(run("generate", tiny, "-"), "Standard input is not UTF-8 text")


def test_T36_several_processes(run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun each would load the whole model and print."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert_refused(run("generate", tiny, "--prompt", "a"), "WORLD_SIZE is 8 but RANK is not set: start the processes")
    for name, value in (("RANK", "9"), ("LOCAL_RANK", "0"), ("GROUP_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert_refused(run("generate", tiny, "--prompt", "a"), "RANK is 9 but WORLD_SIZE 8")
    monkeypatch.setenv("RANK", "0")
    assert_refused(run("generate", tiny, "--prompt", "a"), "MASTER_ADDR or MASTER_PORT is not set")


def test_T36_the_other_processes_keep_quiet(
    run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all of them find wrong, one says."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1"), ("GROUP_RANK", "0")):
        monkeypatch.setenv(name, value)
    for arguments in (["generate", tiny, "--prompt", "a", "--tree", "oak"], ["generate"], ["frob"]):
        ran = run(*arguments)
        assert (ran.code, ran.out, ran.err) == (2, "", "")
    ran = run("inspect", tiny)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert run("--help").out == ""


def test_T36_descriptions_that_are_not_enough(run: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    config = tiny / "config.json"
    assert_refused(run("inspect"), "Give either a MODEL or a --config")
    assert_refused(run("inspect", tiny, "--config", config), "Give either a MODEL or a --config")
    assert_refused(run("inspect", tiny, "--manifest", config), "--manifest lists the tensors of a checkpoint")
    assert_refused(run("inspect", "--config", config, "--manifest", tmp_path / "no"), "no cannot be read")
    assert_refused(run("inspect", "--config", tmp_path / "no"), "no does not exist")
    assert_refused(run("inspect", tiny, "--memory", 80), "add --tp")
    assert_refused(run("inspect", tiny, "--tp", 3), "3 processes cannot share this model evenly", "use one of 1, 2.")
    assert_refused(run("inspect", tiny, "--tp", 0), "0 processes cannot share")
