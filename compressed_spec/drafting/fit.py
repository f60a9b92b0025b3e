"""Which kind of proposal a verifier needs, and whether a drafter can make it: refused before anything runs."""

import torch

from compressed_spec.drafting.base import Drafter, SamplingDrafter
from compressed_spec.drafting.sampled import fixed_topology
from compressed_spec.tree import TokenTree, TreeShape
from compressed_spec.verifying import DraftTree, Proposal, Verifier


def proposal_for(verifier: Verifier, drafter: Drafter | None, shape: TreeShape | None) -> Proposal:
    """How the drafter shall propose. Raises ValueError, with the reason, if the three do not fit each other."""
    if drafter is None or shape is None:
        return Proposal.DETERMINISTIC
    if verifier.name == "coupled":
        return Proposal.COUPLED
    chain = TokenTree.chain([0, 0])
    try:
        verifier.check(DraftTree(tree=chain, proposal=Proposal.DETERMINISTIC, fixed_topology=False))
    except ValueError as reason:
        if not isinstance(drafter, SamplingDrafter):
            raise ValueError(f"{reason} ({type(drafter).__name__} cannot draw from a law.)") from None
    else:
        return Proposal.DETERMINISTIC
    parents = fixed_topology(shape)
    example = DraftTree(
        tree=TokenTree(tokens=[0] * len(parents), parents=parents),
        proposal=Proposal.SAMPLED,
        fixed_topology=True,
        log_q=torch.zeros((len(parents), 1)),
        replacement=False,
    )
    verifier.check(example)
    return Proposal.SAMPLED
