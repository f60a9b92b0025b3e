"""What verifier, drafter and cache ask of each other: refused, or provided for, before anything runs."""

import torch

from compressed_spec.drafting.base import Drafter, DraftPlan, SamplingDrafter
from compressed_spec.drafting.early_exit import EarlyExitDrafter
from compressed_spec.drafting.sampled import fixed_topology
from compressed_spec.tree import TokenTree
from compressed_spec.verifying import CoupledVerifier, DraftTree, Proposal, Verifier


def proposal_for(verifier: Verifier, drafter: Drafter | None, plan: DraftPlan | None) -> Proposal:
    """How the drafter shall propose. Raises ValueError, with the reason, if the three do not fit each other.

    plan: the largest that will be asked for.
    """
    if drafter is None or plan is None:
        return Proposal.DETERMINISTIC
    if isinstance(verifier, CoupledVerifier):
        return Proposal.COUPLED
    chain = TokenTree.chain([0, 0])
    try:
        verifier.check(DraftTree(tree=chain, proposal=Proposal.DETERMINISTIC, fixed_topology=False))
    except ValueError as reason:
        if not isinstance(drafter, SamplingDrafter):
            raise ValueError(f"{reason} ({type(drafter).__name__} cannot draw from a law.)") from None
    else:
        return Proposal.DETERMINISTIC
    if plan.by_value:
        raise ValueError(
            f"Verifier {verifier.name!r} needs a tree whose shape was fixed before its tokens were drawn, and "
            "'dynamic' shapes it by their values: use 'coupled' or 'target', or another tree."
        )
    parents = fixed_topology(plan).parents
    example = DraftTree(
        tree=TokenTree(tokens=[0] * len(parents), parents=parents),
        proposal=Proposal.SAMPLED,
        fixed_topology=True,
        log_q=torch.zeros((len(parents), 1)),
        replacement=False,
    )
    verifier.check(example)
    return Proposal.SAMPLED


def num_target_nodes(drafter: Drafter | None, plan: DraftPlan | None) -> int:
    """Nodes of one row that the target's own layers must have room for in a round."""
    if plan is None:
        return 1
    drafted = plan.num_draft_nodes if isinstance(drafter, EarlyExitDrafter) else 0
    return max(plan.shape.num_nodes, drafted)


def takes_chains_only(verifier: Verifier) -> bool:
    """Whether the rule refuses drawn trees that branch."""
    parents = (-1, 0, 0)
    branching = DraftTree(
        tree=TokenTree(tokens=[0] * len(parents), parents=parents),
        proposal=Proposal.SAMPLED,
        fixed_topology=True,
        log_q=torch.zeros((len(parents), 1)),
        replacement=False,
    )
    try:
        verifier.check(branching)
    except ValueError:
        return True
    return False
