"""Principal components of two models: known answers on arrays, and networks of every shape."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from random_models import random_bridge, random_gpt2, random_llama, random_prompts
from sklearn.cross_decomposition import CCA
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import load_model
from circuitkd.compare._pca import (
    aligned,
    canonical_correlations,
    held_out_cosines,
    principal_components,
    procrustes_residual,
    shuffles,
)
from circuitkd.compare.residual_pca import (
    ResidualPCA,
    layer_pairs_by_depth,
    record_sites,
    residual_pca,
)
from circuitkd.distill.gauge import random_gauge
from circuitkd.errors import InputError
from circuitkd.prompts import Prompts

RNG = np.random.default_rng


def labelled_prompts(batches: tuple[int, ...] = (9, 7), seed: int = 0) -> Prompts:
    """Two groups, of 7 and 5 tokens, with labels A, B and END in different places."""
    prompts = random_prompts(batches=batches, seed=seed, means=4)
    places = [{"A": 1, "B": 4, "END": 6}, {"A": 3, "B": 2, "END": 4}]
    groups = [
        replace(group, positions={k: torch.full((len(group),), v) for k, v in own.items()})
        for group, own in zip(prompts.groups, places, strict=True)
    ]
    return replace(prompts, groups=tuple(groups))


def rotation(width: int, seed: int = 0) -> np.ndarray:
    return np.linalg.qr(RNG(seed).normal(size=(width, width)))[0]


def centred(n: int = 20, labels: int = 3, width: int = 4, seed: int = 0) -> np.ndarray:
    x = RNG(seed).normal(size=(n, labels, width))
    return x - x.mean((0, 1))


# Arrays


def test_components_of_points_on_a_line() -> None:
    """Everything varies along (3, 4): one component, and scores are lengths along it."""
    along = np.array([[-2.0, -1.0], [1.0, 2.0]])
    found = principal_components(along[..., None] * np.array([0.6, 0.8]) + 7)
    np.testing.assert_allclose(found.ratio, [1.0], atol=1e-12)
    np.testing.assert_allclose(np.abs(found.scores[..., 0]), np.abs(along), atol=1e-12)
    assert found.enough_for(0.99) == 1


def test_components_are_eigenvectors_of_the_covariance() -> None:
    x = RNG(0).normal(size=(15, 3, 6)) * np.array([5, 4, 3, 2, 1, 0.5])
    found = principal_components(x)
    values = np.linalg.eigvalsh(np.cov(x.reshape(-1, 6).T))[::-1]
    np.testing.assert_allclose(found.ratio, values / values.sum(), atol=1e-12)
    covariance = np.cov(found.scores.reshape(-1, 6).T)
    np.testing.assert_allclose(covariance, np.diag(values), atol=1e-9)
    share = np.cumsum(found.ratio)
    assert found.enough_for(share[2]) == 3
    assert found.enough_for(share[2] + 1e-6) == 4
    assert found.enough_for(1.0) == 6


def test_a_rotated_and_scaled_copy_is_the_same() -> None:
    x = centred()
    moved = 0.2 * x @ rotation(4)
    found, scale = aligned(x, moved)
    np.testing.assert_allclose(found, x, atol=1e-12)
    assert scale == pytest.approx(5)
    assert procrustes_residual(x, moved) == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(held_out_cosines(x, moved), 1, atol=1e-12)
    np.testing.assert_allclose(canonical_correlations(x, moved), 1, atol=1e-12)


def test_the_residual_is_what_the_best_fit_leaves_and_symmetric() -> None:
    x, y = centred(seed=0), centred(seed=1) + 0.5 * centred(seed=0)
    left = ((x - aligned(x, y)[0]) ** 2).sum() / (x**2).sum()
    assert procrustes_residual(x, y) == pytest.approx(left)
    assert procrustes_residual(y, x) == pytest.approx(left)
    assert 0.2 < left < 0.9
    worse = [((x - c * y @ rotation(4, s)) ** 2).sum() for s in range(20) for c in (0.5, 1)]
    assert min(worse) > left * (x**2).sum()
    assert procrustes_residual(x, 0 * x) == 1


def test_unrelated_rows_are_unlike_on_other_prompts_only() -> None:
    """Fitted and judged on the same rows they would seem related."""
    x, y = centred(12, 1, 10, seed=0), centred(12, 1, 10, seed=1)
    fit = aligned(x, y)[0]
    own = (x * fit).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(fit, axis=-1)
    assert own.mean() > 0.6
    assert abs(held_out_cosines(x, y).mean()) < 0.2


def test_held_out_cosines_are_loops_over_halves() -> None:
    x, y = centred(9, 2, 3, seed=0), centred(9, 2, 3, seed=1) + centred(9, 2, 3, seed=0)
    found = held_out_cosines(x, y)
    for prompt in range(9):
        others = [p for p in range(9) if p % 2 != prompt % 2]
        u, _, v = np.linalg.svd(y[others].reshape(-1, 3).T @ x[others].reshape(-1, 3))
        for label in range(2):
            a, b = x[prompt, label], y[prompt, label] @ u @ v
            cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            assert found[prompt, label] == pytest.approx(cosine)


def test_canonical_correlations_are_those_of_scikit_learn() -> None:
    x = centred(60, 1, 3, seed=0)
    y = centred(60, 1, 4, seed=1)
    y[..., :2] += x[..., :2] * np.array([2, 0.5])
    y -= y.mean((0, 1))
    cca = CCA(n_components=3, tol=1e-12, max_iter=10_000)
    left, right = cca.fit_transform(x[:, 0], y[:, 0])
    slow = [np.corrcoef(left[:, k], right[:, k])[0, 1] for k in range(3)]
    found = canonical_correlations(x, y)
    np.testing.assert_allclose(found, sorted(slow, reverse=True), atol=1e-5)
    assert 0.8 < found[0] < 1


def test_shuffling_keeps_labels_and_shows_what_they_alone_give() -> None:
    """Rows that are nothing but their label look alike, and just as alike by chance."""
    means = 10 * centred(1, 3, 4, seed=5)
    x, y = means + centred(seed=0), means @ rotation(4) + centred(seed=1)
    true = held_out_cosines(x, y).mean()
    orders = shuffles(20, 5, seed=0)
    assert (np.sort(orders, 1) == np.arange(20)).all()
    chance = np.mean([held_out_cosines(x, y[order]).mean() for order in orders])
    assert true > 0.9
    assert chance == pytest.approx(true, abs=0.02)


# Networks


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_sites_are_those_of_hooks_in_sampling_order(family: str) -> None:
    model, prompts = random_bridge(family), labelled_prompts()
    found = record_sites(model, prompts)
    assert found.labels == ("A", "B", "END")
    for group in prompts.groups:
        with torch.no_grad():
            _, cache = model.run_with_cache(group.clean)
        for layer in range(3):
            for recorded, point in (
                (found.mlp, f"blocks.{layer}.mlp.hook_out"),
                (found.residual, f"blocks.{layer}.hook_resid_post"),
            ):
                for place, label in enumerate(found.labels):
                    slow = cache[point][:, int(group.positions[label][0])]
                    torch.testing.assert_close(
                        recorded[layer][group.index, place], slow, atol=1e-4, rtol=0
                    )
    single = record_sites(model, prompts, labels=["END"], batch_size=1)
    torch.testing.assert_close(single.mlp[2][:, 0], found.mlp[2][:, 2], atol=1e-5, rtol=0)


def compared(teacher: TransformerBridge, student: TransformerBridge, **options) -> ResidualPCA:
    prompts = labelled_prompts()
    return residual_pca(teacher, student, prompts, prompts, **options)


def test_a_model_is_itself_in_any_basis() -> None:
    """Rotating the stream moves every activation and no figure."""
    network = random_gpt2()
    rotated = load_model(random_gauge(network, seed=1).model)
    found = compared(load_model(network), rotated, pairs=[(0, 0), (2, 2)])
    for name in ("cosine", "cca_mean", "cca_max", "svcca"):
        np.testing.assert_allclose(found.pairs[name], 1, atol=1e-4)
    np.testing.assert_allclose(found.pairs["residual"], 0, atol=1e-4)
    np.testing.assert_allclose(found.pairs["scale"], 1, atol=1e-4)
    # With 48 rows and 10 components something is always alike: chance says how much.
    assert found.pairs["cosine_chance"].max() < 0.6
    assert found.pairs["residual_chance"].min() > 0.5
    shown = found.projections.set_index(["site", "teacher_layer", "prompt", "label"])
    columns = [f"pc{k}" for k in range(1, 11)]
    teacher, student = (shown[shown["side"] == side][columns] for side in ("teacher", "student"))
    np.testing.assert_allclose(student, teacher, atol=1e-3)


def test_figures_do_not_depend_on_the_basis() -> None:
    teacher, student = random_gpt2(), random_llama(layers=2, seed=1)
    before = compared(load_model(teacher), load_model(student))
    after = compared(
        load_model(random_gauge(teacher, 2).model), load_model(random_gauge(student, 3).model)
    )
    pd.testing.assert_frame_equal(after.pairs, before.pairs, atol=1e-3)
    pd.testing.assert_frame_equal(after.cosines, before.cosines, atol=1e-3)
    pd.testing.assert_frame_equal(after.variance, before.variance, atol=1e-5)


def test_widths_depths_and_families_may_differ() -> None:
    teacher = load_model(random_gpt2(layers=4, width=32))
    student = load_model(random_llama(layers=2, width=48, seed=1))
    found = compared(teacher, student, components=5)
    assert found.pairs[["site", "teacher_layer", "student_layer"]].to_numpy().tolist() == [
        ["mlp", 1, 0],
        ["mlp", 3, 1],
        ["residual", 1, 0],
        ["residual", 3, 1],
    ]
    figures = found.pairs.drop(columns=["site", "teacher_layer", "student_layer", "scale"])
    assert ((figures >= -1) & (figures <= 1)).all(axis=None)
    assert len(found.variance) == (4 + 2) * 2 * 5
    assert len(found.projections) == 4 * 2 * 16 * 3
    assert len(found.cosines) == 4 * 3
    assert (found.cosines["low"] <= found.cosines["cosine"]).all()
    assert (found.cosines["cosine"] <= found.cosines["high"]).all()


def test_explained_variance_is_each_models_own() -> None:
    model, prompts = random_bridge("gpt2"), labelled_prompts()
    found = residual_pca(model, random_bridge("llama"), prompts, prompts, components=3)
    rows = record_sites(model, prompts).mlp[1].flatten(0, 1).double()
    values = torch.linalg.svdvals(rows - rows.mean(0)).square()
    frame = found.variance.query("side == 'teacher' and site == 'mlp' and layer == 1")
    np.testing.assert_allclose(frame["ratio"], (values / values.sum())[:3], atol=1e-6)
    np.testing.assert_allclose(frame["cumulative"], np.cumsum(frame["ratio"]), atol=1e-12)


def test_layers_are_paired_as_asked() -> None:
    assert layer_pairs_by_depth(3, 2) == [(1, 0), (2, 1)]
    assert layer_pairs_by_depth(2, 4) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert layer_pairs_by_depth(5, 5) == [(k, k) for k in range(5)]
    model = random_bridge("gpt2", layers=2)
    every = compared(model, model, pairs="all", components=2).pairs
    assert every.query("site == 'mlp'")[["teacher_layer", "student_layer"]].to_numpy().tolist() == [
        [0, 0],
        [0, 1],
        [1, 0],
        [1, 1],
    ]


def test_a_result_is_saved_and_loaded(tmp_path: Path) -> None:
    model = random_bridge("gpt2", layers=2)
    found = compared(model, model, components=2, labels=["B", "END"])
    found.save(tmp_path / "pca")
    again = ResidualPCA.load(tmp_path / "pca")
    for name in ("variance", "projections", "pairs", "cosines"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(found, name))
    assert again.about == found.about
    assert repr(again) == repr(found)
    assert "at B, END; first 2" in repr(found)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    model, prompts = random_bridge("gpt2", layers=2), labelled_prompts()
    for options, message in (
        ({"pairs": [(0, 2)]}, "no pair of layers"),
        ({"pairs": "nearest"}, "'depth', 'all'"),
        ({"components": 0}, "at least 1"),
        ({"variance": 1.5}, r"in \(0, 1\]"),
        ({"labels": ["C"]}, "have the labels C"),
    ):
        with pytest.raises(InputError, match=message):
            compared(model, model, **options)
    few = labelled_prompts(batches=(2, 1))
    with pytest.raises(InputError, match="4 or more"):
        residual_pca(model, model, few, few)
    others = replace(
        prompts, groups=tuple(replace(g, texts=("x",) * len(g)) for g in prompts.groups)
    )
    with pytest.raises(InputError, match="different prompts"):
        residual_pca(model, model, prompts, others)
    with pytest.raises(InputError, match="no saved residual PCA"):
        ResidualPCA.load(tmp_path)
