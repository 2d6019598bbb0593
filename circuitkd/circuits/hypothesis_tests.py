"""Three tests of the claim that a circuit is *the* circuit (Shi et al. 2024).

"Hypothesis testing the circuit hypothesis in LLMs". Each null hypothesis says that the circuit is
what it claims to be, so a small p speaks against the circuit:

- **equivalence** (mechanism preservation): the circuit alone is as likely to do better than the
  full model on a prompt as to do worse, up to ``epsilon``;
- **independence** (mechanism localisation): with the circuit ablated, what the rest scores on a
  prompt says nothing about what the full model scores there;
- **minimality**: every part matters more than most parts from outside would.

Not rejecting is no proof: with few prompts little can be rejected.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.spatial.distance import pdist, squareform
from scipy.stats import binom, binomtest, false_discovery_control
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.circuits.circuit_runs import CircuitRuns, Part, ablation_of, level_of, parts_of
from circuitkd.circuits.edges import Edge
from circuitkd.circuits.influence import Progress
from circuitkd.errors import InputError
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts

CORRECTIONS = ("holm", "fdr", "none")

ROUNDING = 1e-5
"""Metrics closer than this are equal."""


@dataclass(frozen=True)
class HypothesisTests:
    """The results.

    ``frame`` has one row a test: test, null, statistic, p, rejected. Minimality's p is the
    smallest corrected p of its parts. ``parts`` has one row a part of the circuit: part, effect
    (mean metric without it minus with it), exceeded (share of the parts from outside whose effect
    is smaller), p, p_corrected, rejected. A test without anything to test has p = 1.
    """

    alpha: float
    correction: str
    frame: pd.DataFrame
    parts: pd.DataFrame

    def __repr__(self) -> str:
        table = self.frame.to_string(index=False, float_format=lambda value: f"{value:.3g}")
        superfluous = self.parts.loc[self.parts["rejected"], "part"].tolist()
        note = f"\nnot minimal: {', '.join(superfluous)}" if superfluous else ""
        return f"Tests of the circuit at level {self.alpha} (small p: against it)\n{table}{note}"


def hypothesis_tests(
    model: TransformerBridge,
    prompts: Prompts,
    circuit: Circuit,
    *,
    ablation: str | None = None,
    alpha: float = 0.05,
    epsilon: float = 0.1,
    tie: float = ROUNDING,
    quantile: float = 0.9,
    draws: int = 100,
    permutations: int = 1000,
    correction: str = "holm",
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> HypothesisTests:
    """Test equivalence, independence and minimality of a circuit.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        circuit: its edges are tested where it lists them, else its nodes.
        ablation: what replaces what is not kept: ``"mean"``, ``"resample"`` or ``"zero"``; by
            default what the circuit was found with, and ``"mean"`` where it does not say.
        alpha: level of all tests.
        epsilon: how far from 1/2 the chance to do better may be and still count as equal.
        tie: scores of one prompt that differ by no more than this, in the metric's unit, are
            equal; else a circuit that is always worse by a hair is never equivalent.
        quantile: a part is minimal where it matters more than this share of parts from outside.
        draws: how many parts from outside are tried: nodes without repetition, edges with.
        permutations: for the independence test.
        correction: over a circuit's parts: ``"holm"`` (family-wise), ``"fdr"`` (Benjamini and
            Hochberg) or ``"none"``.
        seed: of draws and permutations.
        batch_size: prompts that go through the model at once.
        progress: called as ``progress(stage, done, total)``, in parts.

    Raises:
        InputError: an argument that cannot be used, or a circuit of another model.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> tests = hypothesis_tests(student, prompts, Circuit.full(student))
    >>> tests.frame["rejected"].tolist()
    [False, False, False]
    """
    _validate(correction, alpha=alpha, quantile=quantile)
    if not 0 <= epsilon < 0.5:
        raise InputError(f"epsilon must be in [0, 0.5), not {epsilon}.")
    circuit.require_sizes(Sizes.of(model))
    ablation = ablation_of(circuit) if ablation is None else ablation
    runs = CircuitRuns(model, prompts, level_of(circuit), ablation=ablation, batch_size=batch_size)
    return run_tests(
        runs,
        circuit,
        alpha=alpha,
        epsilon=epsilon,
        tie=tie,
        quantile=quantile,
        draws=draws,
        permutations=permutations,
        correction=correction,
        seed=seed,
        progress=progress,
    )


def run_tests(
    runs: CircuitRuns,
    circuit: Circuit,
    *,
    alpha: float = 0.05,
    epsilon: float = 0.1,
    tie: float = ROUNDING,
    quantile: float = 0.9,
    draws: int = 100,
    permutations: int = 1000,
    correction: str = "holm",
    seed: int = 0,
    measured: Mapping[Part, float] | None = None,
    progress: Progress | None = None,
) -> HypothesisTests:
    """``hypothesis_tests`` on runs that are there already.

    ``measured``: mean effects of leaving out parts of the circuit that are known.
    """
    rng = np.random.default_rng(seed)
    kept = parts_of(circuit)
    full, own = (runs.metric(part).double().numpy() for part in (runs.parts, kept))
    rest = runs.without(kept).double().numpy()
    better, p_equivalence = equivalence_test(own, full, epsilon, tie)
    hsic, p_independence = independence_test(rest, full, permutations, rng)
    parts = _minimality(runs, circuit, quantile, draws, correction, rng, measured or {}, progress)
    parts["rejected"] = parts["p_corrected"] < alpha
    p_minimality = float(parts["p_corrected"].min()) if len(parts) else 1.0
    weakest = float(parts["exceeded"].min()) if len(parts) else np.nan
    rows = [
        ("equivalence", "circuit and model do better equally often", better, p_equivalence),
        ("independence", "the rest knows nothing of the model's score", hsic, p_independence),
        ("minimality", "every part matters more than most others", weakest, p_minimality),
    ]
    frame = pd.DataFrame(rows, columns=["test", "null", "statistic", "p"])
    frame["rejected"] = frame["p"] < alpha
    return HypothesisTests(alpha, correction, frame, parts)


def equivalence_test(
    circuit: Float[np.ndarray, "prompt"],
    full: Float[np.ndarray, "prompt"],
    epsilon: float = 0.1,
    tie: float = ROUNDING,
) -> tuple[float, float]:
    """Share of prompts where the circuit does better (ties count half), and p.

    Null: abs(P(circuit better) - 1/2) <= epsilon. p is the chance, at the end of the null, of a
    share as far from 1/2 as the one seen.

    >>> share, p = equivalence_test(np.zeros(50), np.ones(50))
    >>> share, p < 0.001
    (0.0, True)
    """
    difference, n = circuit - full, len(full)
    ties = np.abs(difference) <= tie
    share = float(((difference > 0) & ~ties).sum() + ties.sum() / 2) / n
    counts = np.arange(n + 1)
    extreme = np.abs(counts / n - 0.5) >= abs(share - 0.5) - 1e-12
    return share, float(min(1.0, binom.pmf(counts[extreme], n, 0.5 + epsilon).sum()))


def independence_test(
    rest: Float[np.ndarray, "prompt"],
    full: Float[np.ndarray, "prompt"],
    permutations: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """HSIC of two samples (Gretton et al. 2007), and its permutation p.

    Gaussian kernels with each variable's own median distance as width. A variable that does not
    vary is independent of everything: 0 and p = 1.

    >>> x = np.random.default_rng(0).normal(size=40)
    >>> independence_test(x**2, x, 200, np.random.default_rng(1))[1] < 0.05
    True
    """
    if np.ptp(rest) <= ROUNDING or np.ptp(full) <= ROUNDING:
        return 0.0, 1.0
    ours, theirs = _centred_kernel(rest), _centred_kernel(full)
    scale = (len(full) - 1) ** 2
    seen = float((ours * theirs).sum() / scale)
    as_large = 1
    for _ in range(permutations):
        order = rng.permutation(len(full))
        # Rounding must not decide between permutations that are the same.
        shuffled = float((ours * theirs[np.ix_(order, order)]).sum() / scale)
        as_large += shuffled >= seen * (1 - 1e-9)
    return seen, as_large / (1 + permutations)


def corrected(p: Float[np.ndarray, "test"], correction: str = "holm") -> Float[np.ndarray, "test"]:
    """p-values corrected for their number.

    >>> corrected(np.array([0.01, 0.04, 0.03])).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    _validate(correction)
    if correction == "none" or len(p) == 0:
        return p.copy()
    if correction == "fdr":
        return false_discovery_control(p)
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    result = np.empty_like(p)
    result[order] = np.minimum(stepped, 1)
    return result


def _centred_kernel(values: Float[np.ndarray, "prompt"]) -> Float[np.ndarray, "prompt other"]:
    distances = pdist(values[:, None])
    # Where most values are equal, the median is 0 and would make no kernel.
    width = np.median(distances) or distances[distances > 0].mean()
    kernel = np.exp(-(squareform(distances) ** 2) / (2 * width**2))
    kernel -= kernel.mean(0)
    return kernel - kernel.mean(1, keepdims=True)


# ---------------------------------------------------------------------- minimality


def _minimality(
    runs: CircuitRuns,
    circuit: Circuit,
    quantile: float,
    draws: int,
    correction: str,
    rng: np.random.Generator,
    measured: Mapping[Part, float],
    progress: Progress | None,
) -> pd.DataFrame:
    """Each part's effect against those of parts from outside, put into the circuit."""
    kept = parts_of(circuit)
    ordered = [part for part in runs.parts if part in kept]

    def mean(parts: frozenset[Part]) -> float:
        return float(runs.metric(parts).double().mean())

    base = mean(kept)
    effects = []
    for done, part in enumerate(ordered, start=1):
        known = measured.get(part)
        effects.append(mean(kept - {part}) - base if known is None else known)
        if progress is not None:
            progress("Testing minimality", done, len(ordered))
    others = np.abs(_outside_effects(runs, circuit, draws, rng, mean))
    exceeded = [int((abs(effect) > others).sum()) for effect in effects]
    tested = len(others) > 0
    p = np.array(
        [
            binomtest(count, len(others), quantile, alternative="less").pvalue if tested else 1.0
            for count in exceeded
        ],
        dtype=float,
    )
    return pd.DataFrame(
        {
            "part": [part.name for part in ordered],
            "effect": np.array(effects, dtype=float),
            "exceeded": [count / len(others) if tested else np.nan for count in exceeded],
            "p": p,
            "p_corrected": corrected(p, correction),
        }
    )


def _outside_effects(
    runs: CircuitRuns,
    circuit: Circuit,
    draws: int,
    rng: np.random.Generator,
    mean: Callable[[frozenset[Part]], float],
) -> Float[np.ndarray, "draw"]:
    """Effects of removing a random part again from the circuit that was inflated by it."""
    kept = parts_of(circuit)
    outside = [part for part in runs.parts if part not in kept]
    if not outside:
        return np.zeros(0)
    if circuit.edges is None:
        chosen = rng.permutation(len(outside))[:draws]
        base = mean(kept)
        return np.array([base - mean(kept | {outside[number]}) for number in chosen])
    effects = []
    for number in rng.integers(len(outside), size=draws):
        edge = outside[number]
        inflated = kept | {edge} | _path_through(circuit, edge, rng)
        effects.append(mean(inflated - {edge}) - mean(inflated))
    return np.array(effects)


def _path_through(circuit: Circuit, part: Part, rng: np.random.Generator) -> frozenset[Part]:
    """Edges that join an edge to the input and to the logits, directly."""
    assert isinstance(part, Edge)
    edges = circuit.sizes.edges
    into = [
        edge
        for edge in edges
        if edge.sender.kind == "input" and part.sender in circuit.sizes.receiving(edge.receiver)
    ]
    readers = circuit.sizes.receiving(part.receiver)
    out = [Edge(node, edges[-1].receiver) for node in readers if node != Node("logits")]
    path = [into[rng.integers(len(into))]] if into else []
    path += [out[rng.integers(len(out))]] if out else []
    return frozenset(path)


def _validate(correction: str, **shares: float) -> None:
    if correction not in CORRECTIONS:
        raise InputError(f"Unknown correction {correction!r}: one of {', '.join(CORRECTIONS)}.")
    for name, share in shares.items():
        if not 0 < share < 1:
            raise InputError(f"{name} must lie between 0 and 1, not {share}.")
