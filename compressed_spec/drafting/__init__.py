"""Ways to propose trees, and how users name them."""

from compressed_spec.drafting.base import Drafter, DraftPlan, DraftRequest, ScoredTree
from compressed_spec.drafting.dspark import DSparkDrafter
from compressed_spec.drafting.early_exit import EarlyExitDrafter
from compressed_spec.drafting.load import load_drafter
from compressed_spec.drafting.mtp import MTPDrafter
from compressed_spec.drafting.ngram import NgramDrafter
from compressed_spec.drafting.suffix import SuffixDrafter
from compressed_spec.target import TargetModel

__all__ = [
    "DSparkDrafter",
    "DraftPlan",
    "DraftRequest",
    "Drafter",
    "EarlyExitDrafter",
    "MTPDrafter",
    "NgramDrafter",
    "ScoredTree",
    "SuffixDrafter",
    "make_drafter",
]


def make_drafter(drafter: str | Drafter, model: TargetModel) -> Drafter:
    """The drafter of this name, or the object itself. "auto": the checkpoint's own head, else n-gram.

    "early-exit" exits a third of the way up, "early-exit:3" after layer 3.
    A name with a dot or colon is the import path of a class of the user's own, "module.path:ClassName" or
    "module.ClassName", made with the model if it takes one.
    Raises ValueError for an unknown name, a head or layer that the checkpoint does not have, or what is no drafter.
    """
    if not isinstance(drafter, str):
        if not isinstance(drafter, Drafter):
            raise ValueError(
                f"A drafter object needs start, propose, observe and release; {type(drafter).__name__} lacks some."
            )
        return drafter
    if drafter == "auto":
        drafter = model.own_drafter or "ngram"
    if drafter == "mtp":
        return MTPDrafter(model)
    if drafter == "dspark":
        return DSparkDrafter(model)
    if drafter.split(":")[0] == "early-exit":
        return EarlyExitDrafter(model, _exit_layer(drafter))
    if drafter == "ngram":
        return NgramDrafter()
    if drafter == "suffix":
        return SuffixDrafter()
    if "." in drafter or ":" in drafter:
        return load_drafter(drafter, model)
    raise ValueError(
        f"Unknown drafter {drafter!r}: use 'auto', 'mtp', 'dspark', 'early-exit', 'ngram', 'suffix', or the import "
        "path of a class of your own, such as 'package.module:ClassName'."
    )


def _exit_layer(drafter: str) -> int | None:
    _, colon, layer = drafter.partition(":")
    if colon and not layer.isdecimal():
        raise ValueError(f"Drafter {drafter!r} names no layer: write 'early-exit' or, say, 'early-exit:3'.")
    return int(layer) if colon else None
