"""In networks made by hand every planted head has its role, and no other head that matters does."""

from dataclasses import replace

import planted_induction
import planted_ioi
import pytest
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.attention import HeadRoles, head_roles
from circuitkd.circuits.influence import node_influence
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts

HALF = 0.5  # of the way from a uniform head to a perfect one
NO_INFLUENCE = 0.02  # the hand-set circuit's parts have 10 % of it or more


def roles_and_influence(
    model: TransformerBridge, prompts: Prompts
) -> tuple[HeadRoles, dict[Node, float]]:
    influence = node_influence(model, prompts)
    shares = dict(zip(influence.nodes, influence.share().tolist(), strict=True))
    return head_roles(model, replace(prompts, bos="BOS")), shares


@pytest.mark.parametrize("strength", [planted_ioi.SATURATED, planted_ioi.SOFT])
def test_indirect_object_identification(strength: float) -> None:
    found, share = roles_and_influence(planted_ioi.ioi_model(strength), planted_ioi.ioi_prompts(32))
    planted, noise = planted_ioi.PLANTED, planted_ioi.NOISE
    expected = {
        "previous token": set(),
        # The noise head does the same, but writes where nobody reads: a role is not an influence.
        "duplicate token": {planted["duplicate token"], noise["changing"]},
        "induction": set(),
        # Nor is one that looks at names and does not copy them a name mover.
        "name mover": {planted["name mover"], planted["second name mover"]},
        "negative name mover": set(),
        "S-inhibition": {planted["S-inhibition"]},
    }
    for role, heads in expected.items():
        assert set(found.holders(role, least=HALF)) == heads, role
    assert all(share[node] > NO_INFLUENCE for node in planted.values())
    assert share[noise["changing"]] < NO_INFLUENCE


@pytest.mark.parametrize("strength", [planted_induction.SATURATED, planted_induction.SOFT])
def test_induction(strength: float) -> None:
    found, share = roles_and_influence(
        planted_induction.induction_model(strength), planted_induction.induction_prompts(32)
    )
    planted, noise = planted_induction.PLANTED, planted_induction.NOISE
    expected = {
        "previous token": {planted["previous token"], noise["changing"]},
        "duplicate token": set(),
        "induction": {planted["induction"], noise["reader"]},
    }
    for role, heads in expected.items():
        assert set(found.holders(role, least=HALF)) == heads, role
        for node in heads:
            assert (share[node] > NO_INFLUENCE) == (node in planted.values())
