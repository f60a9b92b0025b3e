"""Ways to propose trees, and how users name them."""

from compressed_spec.drafting.base import Drafter, DraftRequest
from compressed_spec.drafting.dspark import DSparkDrafter
from compressed_spec.drafting.mtp import MTPDrafter
from compressed_spec.drafting.ngram import NgramDrafter
from compressed_spec.target import TargetModel

__all__ = ["DSparkDrafter", "DraftRequest", "Drafter", "MTPDrafter", "NgramDrafter", "make_drafter"]


def make_drafter(drafter: str | Drafter, model: TargetModel) -> Drafter:
    """The drafter of this name, or the object itself. "auto": the checkpoint's own head, else n-gram.

    Raises ValueError for an unknown name, a head that the checkpoint does not have, or an object that is no drafter.
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
    raise ValueError(f"Unknown drafter {drafter!r}: use 'auto', 'mtp', 'dspark', 'ngram' or an object of your own.")
