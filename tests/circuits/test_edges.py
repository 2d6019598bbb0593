"""Edges have the names, the order and the number that EAP-IG and MIB give them."""

import pytest
from random_models import random_bridge

from circuitkd.circuits.edges import Edge, Layout, Receiver, edges_of, layout_of
from circuitkd.errors import InputError
from circuitkd.nodes import Node


@pytest.mark.parametrize(
    ("layers", "heads", "nodes", "edges"), [(12, 12, 158, 32_491), (6, 12, 80, 7_588)]
)
def test_gpt2_small_and_distilgpt2_have_the_published_counts(
    layers: int, heads: int, nodes: int, edges: int
) -> None:
    layout = Layout(layers, heads, heads)
    assert len(layout.nodes) == len(set(layout.nodes)) == nodes
    assert len(layout.edges) == len(set(layout.edges)) == edges


@pytest.mark.parametrize("groups", [0, 3])
def test_heads_that_cannot_share_evenly_are_refused(groups: int) -> None:
    with pytest.raises(InputError, match="4 heads cannot share"):
        Layout(2, 4, groups)


def test_every_name_is_read_back() -> None:
    for layout in (Layout(2, 3, 3), Layout(2, 4, 2)):
        for edge in layout.edges:
            assert Edge.parse(edge.name) == edge
        for receiver in layout.receivers:
            assert Receiver.parse(receiver.name) == receiver


def test_a_small_network_has_exactly_these_edges() -> None:
    names = [edge.name for edge in Layout(n_layers=1, n_heads=1, n_kv_heads=1).edges]
    assert names == [
        "input->a0.h0<q>",
        "input->a0.h0<k>",
        "input->a0.h0<v>",
        "input->m0",
        "a0.h0->m0",
        "input->logits",
        "a0.h0->logits",
        "m0->logits",
    ]


def test_heads_read_earlier_layers_and_mlps_also_the_heads_of_their_own() -> None:
    names = {edge.name for edge in Layout(2, 2, 2).edges}
    assert {"m0->a1.h0<q>", "a0.h1->a1.h1<v>", "a1.h0->m1", "a0.h0->m1", "m0->m1"} <= names
    assert not {"a1.h0->a1.h1<q>", "m1->m1", "a1.h0->m0", "m1->a1.h0<q>"} & names


def test_edges_come_in_order_of_computation() -> None:
    layout = Layout(3, 2, 1)
    receivers = [layout.receivers.index(edge.receiver) for edge in layout.edges]
    assert receivers == sorted(receivers)
    for receiver in layout.receivers:
        senders = [edge.sender for edge in layout.edges if edge.receiver == receiver]
        assert tuple(senders) == layout.senders[: layout.n_before(receiver)]
    assert [layout.position(sender) for sender in layout.senders] == list(range(10))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_keys_and_values_are_received_by_the_group_that_shares_them(kv_heads: int) -> None:
    layout = layout_of(random_bridge("llama", kv_heads=kv_heads, layers=1))
    names = [receiver.name for receiver in layout.receivers]
    groups = [f"a0.g{group}<{kind}>" for kind in "kv" for group in range(kv_heads)]
    assert names == [*(f"a0.h{head}<q>" for head in range(4)), *groups, "m0", "logits"]


def test_a_group_changes_its_own_query_heads() -> None:
    layout = Layout(1, 4, 2)
    assert layout.query_heads(Receiver.parse("a0.g1<k>")) == slice(2, 4)
    assert layout.query_heads(Receiver.parse("a0.h1<q>")) == slice(1, 2)
    assert Layout(1, 4, 4).query_heads(Receiver.parse("a0.h3<v>")) == slice(3, 4)


def test_with_a_key_for_every_head_the_keys_are_the_heads_own() -> None:
    names = {edge.name for edge in edges_of(random_bridge("llama", kv_heads=4, layers=1))}
    assert "input->a0.h3<k>" in names
    assert not any(".g" in name for name in names)


def test_people_read_labels() -> None:
    assert Edge.parse("a9.h9->a10.g1<v>").label == "9.9 → 10.group 1 v"
    assert Edge.parse("m3->logits").label == "MLP 3 → logits"


@pytest.mark.parametrize(
    "name",
    ["a1.h0", "a1.h0->", "m0->a0.h1", "a0.g0->m0", "input->a0.g1<q>", "logits->m0", "x->logits"],
)
def test_what_is_not_an_edge_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        Edge.parse(name)


@pytest.mark.parametrize("name", ["m1->m1", "a1.h0->a1.h1<q>", "m1->a1.h0<k>", "a2.h0->m1"])
def test_an_edge_goes_forward(name: str) -> None:
    with pytest.raises(InputError, match="before it"):
        Edge.parse(name)


def test_edges_of_another_model_are_named() -> None:
    layout = Layout(2, 4, 2)
    with pytest.raises(InputError, match=r"a7\.h0"):
        layout.require([Edge(Node.attention_head(7, 0), Receiver("logits"))])
    with pytest.raises(InputError, match="share 2 keys and values"):
        layout.require([Edge.parse("input->a1.h3<k>")])
