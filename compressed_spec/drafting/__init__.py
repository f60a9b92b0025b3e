"""Ways to propose trees, and how users name them."""

from compressed_spec.drafting.base import Drafter, DraftPlan, DraftRequest, ScoredTree
from compressed_spec.drafting.dspark import DSparkDrafter
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
    "MTPDrafter",
    "NgramDrafter",
    "ScoredTree",
    "SuffixDrafter",
    "make_drafter",
]


def make_drafter(drafter: str | Drafter, model: TargetModel) -> Drafter:
    """The drafter of this name, or the object itself. "auto": the checkpoint's own head, else n-gram.

    A name with a dot or colon is the import path of a class of the user's own, "module.path:ClassName" or
    "module.ClassName", made with the model if it takes one.
    Raises ValueError for an unknown name, a head that the checkpoint does not have, or what is no drafter.
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
    if drafter == "ngram":
        return NgramDrafter()
    if drafter == "suffix":
        return SuffixDrafter()
    if "." in drafter or ":" in drafter:
        return load_drafter(drafter, model)
    raise ValueError(
        f"Unknown drafter {drafter!r}: use 'auto', 'mtp', 'dspark', 'ngram', 'suffix', or the import path of a class "
        "of your own, such as 'package.module:ClassName'."
    )
