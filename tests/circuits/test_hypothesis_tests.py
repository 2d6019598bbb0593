"""The tests of Shi et al. reject what is wrong, at their level, and not what is right."""

import numpy as np
import pytest
from competent_models import answered_by
from gates import gate_model, gate_prompts
from random_models import random_bridge, random_prompts
from scipy.stats import binomtest

from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.circuits.hypothesis_tests import (
    corrected,
    equivalence_test,
    hypothesis_tests,
    independence_test,
)
from circuitkd.errors import InputError

RNG = np.random.default_rng(0)


# ---------------------------------------------------------------------- equivalence


def test_a_circuit_that_is_the_model_is_equivalent() -> None:
    scores = RNG.normal(size=100)
    assert equivalence_test(scores, scores) == (0.5, 1.0)


def test_rounding_is_no_difference() -> None:
    scores = RNG.normal(size=100)
    assert equivalence_test(scores - 1e-7, scores)[1] == 1.0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_circuit_that_is_always_better_or_always_worse_is_not(sign: int) -> None:
    full = RNG.normal(size=100)
    share, p = equivalence_test(full + sign * 0.1, full)
    assert share == (1.0 if sign > 0 else 0.0)
    assert p < 1e-9


def test_without_tolerance_it_is_the_sign_test() -> None:
    full = np.zeros(30)
    own = np.array([1.0] * 21 + [-1.0] * 9)
    assert equivalence_test(own, full, epsilon=0.0)[1] == pytest.approx(binomtest(21, 30).pvalue)


def test_tolerance_makes_rejecting_harder() -> None:
    own = np.array([1.0] * 21 + [-1.0] * 9)
    strict, lenient = (equivalence_test(own, np.zeros(30), epsilon=e)[1] for e in (0.0, 0.1))
    assert strict < lenient


# ---------------------------------------------------------------------- independence


def test_dependence_is_found_even_where_there_is_no_correlation() -> None:
    x = RNG.normal(size=60)
    _, p = independence_test(np.abs(x), x, 300, np.random.default_rng(1))
    assert p < 0.01


def test_independence_is_rejected_at_its_level_and_not_more_often() -> None:
    rng = np.random.default_rng(2)
    p = [
        independence_test(rng.normal(size=20), rng.normal(size=20), 99, rng)[1] for _ in range(200)
    ]
    assert 0.01 < np.mean(np.array(p) <= 0.05) < 0.1
    assert np.mean(p) == pytest.approx(0.5, abs=0.08)


def test_the_statistic_is_hsic() -> None:
    """Written out: trace(K H L H) / (n - 1)^2, each kernel with its median distance as width."""
    x, y = RNG.normal(size=12), RNG.normal(size=12)
    centre = np.eye(12) - 1 / 12

    def kernel(v: np.ndarray) -> np.ndarray:
        d = np.abs(v[:, None] - v[None])
        return np.exp(-(d**2) / (2 * np.median(d[np.triu_indices(12, 1)]) ** 2))

    expected = np.trace(kernel(x) @ centre @ kernel(y) @ centre) / 11**2
    assert independence_test(x, y, 1, RNG)[0] == pytest.approx(expected)


def test_a_rest_that_never_varies_knows_nothing() -> None:
    assert independence_test(np.full(20, 3.0), RNG.normal(size=20), 99, RNG) == (0.0, 1.0)


# ---------------------------------------------------------------------- corrections


def test_holm_steps_down() -> None:
    p = np.array([0.04, 0.01, 0.03, 0.6])
    assert corrected(p).tolist() == pytest.approx([0.09, 0.04, 0.09, 0.6])
    assert corrected(np.array([0.9, 0.8])).tolist() == [1.0, 1.0]


def test_other_corrections() -> None:
    p = np.array([0.01, 0.02, 0.03])
    assert corrected(p, "fdr").tolist() == pytest.approx([0.03, 0.03, 0.03])
    assert corrected(p, "none").tolist() == p.tolist()
    assert len(corrected(np.zeros(0))) == 0


# ---------------------------------------------------------------------- on circuits


def sizes_of_gate() -> Sizes:
    return Sizes.of(gate_model("and"))


def test_a_superfluous_edge_is_not_minimal_and_the_true_ones_are() -> None:
    model = gate_model("and")
    true = ["input->a0.h0<v>", "input->a0.h1<v>", "a0.h0->m0", "a0.h1->m0", "m0->logits"]
    # From outside come edges that change a little; the superfluous one changes nothing at all.
    circuit = Circuit.build(Sizes.of(model), edges=[*true, "input->a0.h3<v>", "a0.h3->m0"])
    tests = hypothesis_tests(model, gate_prompts(), circuit, ablation="resample", draws=60)
    parts = tests.parts.set_index("part")
    assert parts.loc["a0.h3->m0", "rejected"]
    assert not parts.loc[true, "rejected"].any()
    assert parts.loc["m0->logits", "effect"] == pytest.approx(-1, abs=0.01)
    assert "not minimal" in repr(tests)
    assert tests.frame.set_index("test").loc["minimality", "rejected"]


def test_the_true_nodes_are_minimal_and_a_missing_one_is_no_equivalence() -> None:
    model, prompts = gate_model("and"), gate_prompts(30)
    whole = Circuit.build(sizes_of_gate(), nodes=["a0.h0", "a0.h1", "m0"])
    tests = hypothesis_tests(model, prompts, whole, tie=0.01)
    assert not tests.frame["rejected"].any()
    half = Circuit.build(sizes_of_gate(), nodes=["a0.h0", "m0"])
    frame = hypothesis_tests(model, prompts, half).frame.set_index("test")
    assert frame.loc["equivalence", "rejected"]
    assert frame.loc["equivalence", "statistic"] == 0  # never better


def test_what_the_rest_still_knows_is_found() -> None:
    """Without one unimportant head the rest of a random model scores nearly as the whole does."""
    model = random_bridge("gpt2", layers=2)
    prompts = answered_by(model, random_prompts((6,), (40,)))
    circuit = Circuit.build(Sizes.of(model), nodes=["a1.h0"])
    frame = hypothesis_tests(model, prompts, circuit).frame.set_index("test")
    assert frame.loc["independence", "rejected"]


def test_the_ablation_is_the_one_that_the_circuit_was_found_with() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = answered_by(model, random_prompts((6,), (12,)))
    circuit = Circuit.build(Sizes.of(model), nodes=["a0.h0", "m1"], ablation="zero")
    own = hypothesis_tests(model, prompts, circuit, permutations=10).parts
    zero, mean = (
        hypothesis_tests(model, prompts, circuit, ablation=ablation, permutations=10).parts
        for ablation in ("zero", "mean")
    )
    assert own.equals(zero)
    assert not own.equals(mean)


@pytest.mark.parametrize("parts", [{"nodes": ["m0"]}, {"edges": ["input->a0.g0<k>"]}])
def test_a_circuit_of_another_model_is_refused(parts: dict) -> None:
    other = Circuit.build(Sizes(n_layers=1, n_heads=4, n_kv_heads=2, d_model=32), **parts)
    with pytest.raises(InputError, match="different sizes"):
        hypothesis_tests(gate_model("and"), gate_prompts(), other)


def test_the_same_seed_gives_the_same_p() -> None:
    model = random_bridge("llama", layers=2)
    prompts = answered_by(model, random_prompts())
    circuit = Circuit.build(Sizes.of(model), edges=["input->m0", "m0->logits"])
    one, two = (
        hypothesis_tests(model, prompts, circuit, ablation="resample", draws=20, seed=3)
        for _ in range(2)
    )
    assert one.frame.equals(two.frame)
    assert one.parts.equals(two.parts)


def test_an_empty_circuit_has_no_part_that_is_not_minimal() -> None:
    model = random_bridge("gpt2", layers=1)
    prompts = answered_by(model, random_prompts())
    tests = hypothesis_tests(model, prompts, Circuit(Sizes.of(model), {}))
    assert tests.parts.empty
    assert tests.frame.set_index("test").loc["minimality", "p"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"correction": "hope"}, "Unknown correction"),
        ({"alpha": 0.0}, "alpha must lie"),
        ({"quantile": 1.0}, "quantile must lie"),
        ({"epsilon": 0.5}, "epsilon must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    model = gate_model("and")
    with pytest.raises(InputError, match=message):
        hypothesis_tests(model, gate_prompts(), Circuit.full(model), **arguments)
