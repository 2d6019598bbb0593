"""Similarity: on plain arrays, and of two models' components against loops written out in full."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from compare.synthetic import copy_head, head_places, random_components

from circuitkd.circuits.activations import Components
from circuitkd.compare import _outputs, _patterns
from circuitkd.compare.similarity import component_similarity, paper_similarity, similarity
from circuitkd.errors import InputError
from circuitkd.metrics import bootstrap_weights

RNG = np.random.default_rng


def rotation(width: int, seed: int = 0) -> np.ndarray:
    return np.linalg.qr(RNG(seed).normal(size=(width, width)))[0]


# Plain arrays


def test_cka_ignores_rotation_scale_translation_and_padding() -> None:
    x, y = RNG(0).normal(size=(40, 5)), RNG(1).normal(size=(40, 7))
    y[:, :5] += x
    moved = np.pad(3 * y @ rotation(7) - 11, ((0, 0), (0, 2)))
    assert similarity(x, moved) == pytest.approx(similarity(x, y), abs=1e-9)
    assert 0.2 < similarity(x, y) < 0.8
    assert similarity(y, moved) == pytest.approx(1, abs=1e-9)


def test_cka_equals_the_definition_with_gram_matrices() -> None:
    x, y = RNG(0).normal(size=(9, 3)), RNG(1).normal(size=(9, 2))
    y[:, 0] += x[:, 1]

    def hsic(k: np.ndarray, m: np.ndarray) -> float:
        n, ones = len(k), np.ones(len(k))
        k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
        middle = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
        last = 2 / (n - 2) * (ones @ k @ m @ ones)
        return (np.trace(k @ m) + middle - last) / (n * (n - 3))

    k, m = x @ x.T, y @ y.T
    expected = hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))
    assert similarity(x, y) == pytest.approx(expected, abs=1e-9)


def test_independent_arrays_score_zero_on_average() -> None:
    # Plain CKA of 20 rows of 10 features is about 0.5 here.
    values = [
        similarity(RNG(2 * s).normal(size=(20, 10)), RNG(2 * s + 1).normal(size=(20, 10)))
        for s in range(300)
    ]
    assert abs(np.mean(values)) < 0.02
    assert min(values) < 0 < max(values)


def test_a_constant_array_resembles_nothing() -> None:
    x = RNG(0).normal(size=(10, 3))
    assert similarity(x, np.full((10, 4), 0.1)) == 0


def test_paper_mlp_gives_identical_layers_a_third_and_a_rotation_destroys_it() -> None:
    x = RNG(0).normal(size=(100, 40)) * np.geomspace(3, 0.1, 40)
    assert similarity(x, x, measure="paper_mlp") == pytest.approx(1 / 3)
    assert similarity(x, x @ rotation(40), measure="paper_mlp") < 0.2
    assert similarity(x, x @ rotation(40)) == pytest.approx(1)


def test_paper_mlp_makes_each_directions_largest_entry_positive() -> None:
    turn = np.array([[0.8, 0.6, 0.0], [-0.6, 0.8, 0.0], [0.0, 0.0, 1.0]])
    x = np.diag([3.0, 2.0, 1.0])
    assert similarity(x, x @ turn, measure="paper_mlp") == pytest.approx(2.6 / 9)


def test_paper_head_averages_the_cosines_of_query_rows() -> None:
    x = np.array([[1.0, 0.0], [0.5, 0.5]])
    y = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert similarity(x, y, measure="paper_head") == pytest.approx((1 + np.sqrt(0.5)) / 2)


def test_tensors_are_taken_like_arrays() -> None:
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert similarity(x.bfloat16(), x.bfloat16()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("x", "y", "measure", "message"),
    [
        (np.ones((5, 2)), np.ones((6, 2)), "cka", "x has 5 rows and y 6"),
        (np.ones((3, 2)), np.ones((3, 2)), "cka", "at least 4 rows"),
        (np.full((5, 2), np.nan), np.ones((5, 2)), "cka", "x holds NaN"),
        (np.ones((5, 2)), np.full((5, 2), np.inf), "cka", "y holds NaN or infinite"),
        (np.ones(5), np.ones(5), "cka", "must be a matrix"),
        (np.ones((5, 4)), np.ones((5, 3)), "paper_mlp", "not 4 with 3 columns"),
        (np.ones((5, 2)), np.ones((5, 2)), "paper_mlp", "at least 3 rows and columns"),
        (np.ones((5, 2)), np.ones((5, 2)), "cosine", "choose one of cka, procrustes"),
    ],
)
def test_wrong_arrays_are_refused_in_words(x, y, measure, message) -> None:
    with pytest.raises(InputError, match=message):
        similarity(x, y, measure)


# Two models' components


def slow_output(teacher: Components, student: Components, i: int, j: int, w: np.ndarray) -> float:
    def total(a: torch.Tensor, b: torch.Tensor) -> float:
        result = 0.0
        for r, p in enumerate(teacher.row_prompt.tolist()):
            for s, q in enumerate(teacher.row_prompt.tolist()):
                if p != q:
                    result += float(w[p] * w[q]) * float(a[r] @ a[s]) * float(b[r] @ b[s])
        return result

    x, y = teacher.features[i].double(), student.features[j].double()
    return max(0.0, total(x, y) / math.sqrt(total(x, x) * total(y, y)))


def slow_pattern(teacher: Components, student: Components, i: int, j: int, w: np.ndarray) -> float:
    left, right = [], []
    for members, a, b in zip(
        teacher.group_prompts, teacher.patterns, student.patterns, strict=True
    ):
        copies = [k for k, p in enumerate(members.tolist()) for _ in range(int(w[p]))]
        if not copies:
            continue
        mean_a, mean_b = a[copies].double().mean(0), b[copies].double().mean(0)
        common = (mean_a.mean(0) + mean_b.mean(0)) / 2
        scale = np.sqrt(len(copies) / w.sum())
        left.append((scale * (mean_a[i] - common)).flatten())
        right.append((scale * (mean_b[j] - common)).flatten())
    return max(0.0, float(torch.cosine_similarity(torch.cat(left), torch.cat(right), dim=0)))


def slow_similarity(teacher: Components, student: Components, w: np.ndarray) -> np.ndarray:
    values = np.zeros((len(teacher.nodes), len(student.nodes)))
    heads = head_places(teacher), head_places(student)
    for i, a in enumerate(teacher.nodes):
        for j, b in enumerate(student.nodes):
            if a.kind != b.kind:
                continue
            values[i, j] = slow_output(teacher, student, i, j, w)
            if a.kind == "head":
                places = heads[0].index(i), heads[1].index(j)
                values[i, j] = (values[i, j] + slow_pattern(teacher, student, *places, w)) / 2
    return values


def related_pair() -> tuple[Components, Components]:
    """Different depths, head counts and widths; student outputs are the teacher's plus noise."""
    teacher = random_components(layers=2, heads=3, d_head=4, d_model=6, seed=1)
    student = random_components(layers=1, heads=2, d_head=5, d_model=7, seed=2)
    features = [x.clone() for x in student.features]
    features[0][:, :4] += 2 * teacher.features[1]
    features[2][:, :6] += teacher.features[3]
    return teacher, replace(student, features=tuple(features))


@pytest.mark.parametrize("cells", [10, 10**6], ids=["tiny chunks", "one chunk"])
def test_the_fast_similarity_equals_loops_over_rows(monkeypatch, cells: int) -> None:
    monkeypatch.setattr(_outputs, "_GRAM_CELLS", cells)
    monkeypatch.setattr(_outputs, "_PAIR_ROWS", cells)
    monkeypatch.setattr(_patterns, "_AVERAGE_CELLS", cells)
    teacher, student = related_pair()
    weights = bootstrap_weights(9, draws=3, seed=0)
    weights[2] = np.where(np.isin(np.arange(9), teacher.group_prompts[0]), 2, 0)  # one group only
    found = component_similarity(teacher, student, weights)
    np.testing.assert_allclose(
        found.value, slow_similarity(teacher, student, np.ones(9)), atol=1e-5
    )
    for draw, w in zip(found.draws, weights, strict=True):
        np.testing.assert_allclose(draw, slow_similarity(teacher, student, w), atol=1e-5)
    assert 0.3 < found.value[1, 0] < 1
    assert 0.1 < found.value[3, 2] < 1


def test_a_model_is_itself() -> None:
    components = random_components(layers=3, heads=4, batches=(20, 12), seed=3)
    weights = bootstrap_weights(32, draws=10, seed=0)
    found = component_similarity(components, components, weights)
    np.testing.assert_allclose(np.diagonal(found.value), 1, atol=1e-6)
    np.testing.assert_allclose(np.diagonal(found.draws, axis1=1, axis2=2), 1, atol=2e-6)
    assert found.value[~np.eye(15, dtype=bool)].max() < 0.9


def test_independent_components_score_about_zero() -> None:
    batches, positions = (40, 40), (3, 2)
    teacher = random_components(layers=1, heads=1, batches=batches, positions=positions, seed=0)
    values = []
    for seed in range(1, 9):
        student = random_components(
            layers=4, heads=1, batches=batches, positions=positions, seed=seed
        )
        values += list(component_similarity(teacher, student).value[1, 1::2])  # MLPs: output part
    assert np.mean(values) < 0.03


def test_copies_of_a_prompt_are_no_agreement() -> None:
    teacher, student = (
        random_components(layers=3, heads=1, batches=(12,), positions=(1,), seed=seed)
        for seed in (0, 1)
    )
    mlps = np.ix_([1, 3, 5], [1, 3, 5])
    twice = component_similarity(teacher, student, np.full((1, 12), 2))
    np.testing.assert_allclose(twice.draws[0], twice.value, atol=1e-6)
    drawn = component_similarity(teacher, student, bootstrap_weights(12, draws=200, seed=0))
    # Counting copies as different prompts would lift these to about 0.2.
    assert drawn.draws.mean(0)[mlps].mean() < drawn.value[mlps].mean() + 0.08


def test_scale_and_rotation_of_outputs_change_nothing() -> None:
    teacher, student = related_pair()
    turned = [
        1e4 * x @ torch.from_numpy(rotation(x.shape[1], seed)).float()
        for seed, x in enumerate(student.features)
    ]
    expected = component_similarity(teacher, student).value
    found = component_similarity(teacher, replace(student, features=tuple(turned))).value
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_equal_heads_stay_equal_however_the_others_are_arranged() -> None:
    teacher = random_components(layers=1, heads=4, seed=0)
    student = copy_head(copy_head(teacher, 0, 3), 1, 2)
    values = component_similarity(teacher, student).value
    np.testing.assert_allclose([values[0, 3], values[1, 2], values[0, 0]], 1, atol=1e-6)


def test_heads_that_all_attend_alike_have_the_same_pattern() -> None:
    teacher = random_components(layers=1, heads=2, seed=0)
    flat = tuple(torch.ones_like(group) for group in teacher.patterns)
    alike = replace(teacher, patterns=flat)
    assert component_similarity(alike, alike).value[0, 0] == pytest.approx(1, abs=1e-6)


def test_a_component_that_never_varies_resembles_nothing() -> None:
    teacher = random_components(layers=1, heads=1, seed=0)
    silent = replace(teacher, features=(teacher.features[0], torch.zeros_like(teacher.features[1])))
    found = component_similarity(teacher, silent, np.ones((1, 9)))
    assert found.value[1, 1] == 0
    assert found.draws[0, 1, 1] == 0


def test_a_head_is_no_mlp() -> None:
    components = random_components(layers=1, heads=1, d_head=6, d_model=6, seed=0)
    features = (components.features[0], components.features[0])
    values = component_similarity(components, replace(components, features=features)).value
    assert values[1, 0] == 0
    assert values[0, 1] == 0


def test_papers_similarities_are_those_of_plain_arrays() -> None:
    teacher = random_components(layers=2, heads=2, seed=0)
    student = random_components(layers=1, heads=3, seed=1)
    values = paper_similarity(teacher, student)
    mlp = similarity(teacher.raw_mlp[1], student.raw_mlp[0], measure="paper_mlp")
    assert values[5, 3] == pytest.approx(mlp)
    heads = [
        similarity(a[:, 3].mean(0), b[:, 2].mean(0), measure="paper_head")
        for a, b in zip(teacher.patterns, student.patterns, strict=True)
    ]
    assert values[4, 2] == pytest.approx((5 * heads[0] + 4 * heads[1]) / 9, abs=1e-6)
    assert values[4, 3] == 0


def test_recordings_of_other_prompts_are_refused() -> None:
    teacher = random_components(seed=0)
    other = replace(teacher, row_prompt=teacher.row_prompt.flip(0))
    with pytest.raises(InputError, match="different prompts or positions"):
        component_similarity(teacher, other)


def test_nan_is_refused_by_the_components_name() -> None:
    teacher = random_components(layers=1, heads=1, seed=0)
    broken = replace(teacher, features=(teacher.features[0], teacher.features[1] * np.nan))
    with pytest.raises(InputError, match="student's MLP 0 holds NaN"):
        component_similarity(teacher, broken)
