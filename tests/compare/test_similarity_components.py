"""Measures on two models' components: against loops, at chance, for models of any shape."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from compare.synthetic import copy_head, head_places, random_components
from scipy.spatial.distance import jensenshannon

from circuitkd.circuits.activations import Components
from circuitkd.compare._blocks import _shuffles
from circuitkd.compare._measures_paper import paper_mlp, rescaled
from circuitkd.compare.similarity import (
    COMPONENT_MEASURES,
    component_similarity,
    paper_similarity,
    similarity,
)
from circuitkd.errors import InputError

CIRCUITS = ("qk_circuit", "ov_circuit")
SHUFFLED = ("procrustes", "principal_angles", "svcca")
HEADS_ONLY = ("attention_correlation", "attention_cosine", "attention_js", *CIRCUITS)
RESAMPLED = ("default", "cka", "attention_correlation", "attention_cosine")


def pair() -> tuple[Components, Components]:
    """Different depths, head counts and widths; the student's outputs hold some of the teacher's.

    30 + 20 prompts of 3 and 2 positions: 130 rows.
    """
    shape = {"batches": (30, 20)}
    teacher = random_components(layers=2, heads=3, d_head=4, d_model=6, seed=1, **shape)
    student = random_components(layers=1, heads=2, d_head=5, d_model=7, seed=2, **shape)
    features = [x.clone() for x in student.features]
    features[0][:, :4] += 2 * teacher.features[1]
    features[2][:, :6] += teacher.features[3]
    return teacher, replace(student, features=tuple(features))


def circuits_of(components: Components, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(head_places(components)), 5, 5, generator=generator)


def averages(components: Components) -> list[np.ndarray]:
    return [group.double().mean(0).numpy() for group in components.patterns]


@pytest.mark.parametrize("measure", COMPONENT_MEASURES)
def test_every_component_is_itself(measure: str) -> None:
    components = random_components(batches=(30, 20), d_model=6, seed=0)
    circuits = circuits_of(components), circuits_of(components)
    found = component_similarity(components, components, measure=measure, circuits=circuits)
    own = np.diagonal(found.value).copy()
    if measure.startswith("paper"):  # whose MLPs score 1/3 against themselves, or are rescaled
        own = own[head_places(components)]
    np.testing.assert_allclose(own, 1, atol=2e-6)
    off = found.value[~np.eye(len(found.value), dtype=bool)]
    assert 0 <= off.min() < 0.9


@pytest.mark.parametrize("measure", [m for m in COMPONENT_MEASURES if not m.startswith("paper")])
def test_models_of_any_shape_can_be_compared(measure: str) -> None:
    teacher, student = pair()
    circuits = circuits_of(teacher), circuits_of(student, 1)
    value = component_similarity(teacher, student, measure=measure, circuits=circuits).value
    assert value.shape == (8, 3)
    assert value.min() >= 0
    assert value.max() <= 1
    assert not value[[3, 7], :2].any()  # an MLP against a head
    assert not value[:3, 2].any()


@pytest.mark.parametrize("measure", HEADS_ONLY)
def test_measures_of_heads_leave_mlps_to_the_default(measure: str) -> None:
    teacher, student = pair()
    circuits = circuits_of(teacher), circuits_of(student)
    found = component_similarity(teacher, student, measure=measure, circuits=circuits)
    expected = component_similarity(teacher, student)
    np.testing.assert_array_equal(found.value[[3, 7], 2], expected.value[[3, 7], 2])
    assert expected.value[3, 2] > 0.1


# Outputs


def slow_procrustes(x: np.ndarray, y: np.ndarray) -> float:
    y = np.pad(y, ((0, 0), (0, max(0, x.shape[1] - y.shape[1]))))
    x = np.pad(x, ((0, 0), (0, y.shape[1] - x.shape[1])))
    turned = y @ scipy.linalg.orthogonal_procrustes(y, x)[0]
    scale = (x * turned).sum() / (turned**2).sum()
    return 1 - ((x - scale * turned) ** 2).sum() / (x**2).sum()


def slow_angles(x: np.ndarray, y: np.ndarray) -> float:
    k = min(x.shape[1], y.shape[1])
    spans = [scipy.linalg.svd(m, full_matrices=False)[0][:, :k] for m in (x, y)]
    return float((np.cos(scipy.linalg.subspace_angles(*spans)) ** 2).mean())


@pytest.mark.parametrize(
    ("measure", "slow"), [("procrustes", slow_procrustes), ("principal_angles", slow_angles)]
)
def test_outputs_are_compared_as_the_ablation_centred_them(measure, slow) -> None:
    teacher, student = pair()
    shifted = replace(student, features=tuple(x + 0.5 for x in student.features))
    found = component_similarity(teacher, shifted, measure=measure, corrected=False)
    for i, j in ((1, 0), (4, 1), (3, 2)):
        x, y = teacher.features[i].double().numpy(), shifted.features[j].double().numpy()
        assert found.value[i, j] == pytest.approx(slow(x, y), abs=1e-6)
    assert not found.chance.any()


@pytest.mark.parametrize("measure", SHUFFLED)
def test_chance_is_taken_away_from_outputs(measure: str) -> None:
    teacher, student = pair()
    raw = component_similarity(teacher, student, measure=measure, corrected=False)
    found = component_similarity(teacher, student, measure=measure)
    heads = np.ix_([0, 1, 2, 4, 5, 6], [0, 1])
    unrelated = raw.value[heads] < 0.5
    assert unrelated.sum() == 11  # all but the head that the student took over
    assert found.value[heads][unrelated].max() < 0.1
    assert found.value[1, 0] > 0.5
    expected = np.clip((raw.value - found.chance) / (1 - found.chance), 0, 1)
    np.testing.assert_allclose(found.value[heads], expected[heads], atol=1e-12)
    assert raw.value[heads][unrelated].mean() == pytest.approx(
        found.chance[heads][unrelated].mean(), abs=0.02
    )


@pytest.mark.parametrize("measure", ["procrustes", "svcca"])
def test_what_all_prompts_share_is_chance(measure: str) -> None:
    sides = [
        random_components(layers=1, heads=1, batches=(200,), positions=(3,), seed=s) for s in (0, 1)
    ]
    shared = [replace(side, features=tuple(x * 0.1 + 10 for x in side.features)) for side in sides]
    raw = component_similarity(shared[0], shared[1], measure=measure, corrected=False)
    assert raw.value[0, 0] > 0.4
    assert component_similarity(shared[0], shared[1], measure=measure).value.max() < 0.1


def test_shuffles_move_every_prompt_to_another_of_its_group_and_keep_positions() -> None:
    components = random_components(batches=(5, 4), positions=(3, 2), seed=0)
    row_prompt = components.row_prompt.numpy()
    position = np.concatenate([np.tile(np.arange(3), 5), np.tile(np.arange(2), 4)])
    of_group = np.repeat([0, 1], [15, 8])
    orders = list(_shuffles(components))
    assert len({tuple(order) for order in orders}) == len(orders)
    for order in orders:
        assert sorted(order) == list(range(23))
        assert (row_prompt[order] != row_prompt).all()
        np.testing.assert_array_equal(position[order], position)
        np.testing.assert_array_equal(of_group[order], of_group)


def test_prompts_alone_in_their_groups_are_shuffled_among_each_other() -> None:
    components = random_components(batches=(1, 1, 4), positions=(3, 2, 2), seed=0)
    row_prompt = components.row_prompt.numpy()
    for order in _shuffles(components):
        assert sorted(order) == list(range(13))
        assert (row_prompt[order] != row_prompt).sum() >= 12  # a longer one partly meets itself
        assert set(order[:5]) == set(range(5))


def test_a_single_prompt_has_no_chance_level() -> None:
    components = random_components(batches=(1,), positions=(30,), seed=0)
    with pytest.raises(InputError, match="single prompt has no chance level"):
        component_similarity(components, components, measure="procrustes")


# Patterns


def test_raw_cosines_are_of_averages_weighted_by_the_groups() -> None:
    teacher, student = pair()
    found = component_similarity(teacher, student, measure="attention_cosine", corrected=False)
    left, right = averages(teacher), averages(student)
    x, y = (
        np.concatenate(
            [np.sqrt(n) * group[head].ravel() for n, group in zip((30, 20), side, strict=True)]
        )
        for side, head in ((left, 4), (right, 1))
    )
    expected = x @ y / np.sqrt((x @ x) * (y @ y))
    assert found.value[5, 1] == pytest.approx(expected, abs=1e-6)


def test_js_is_of_averages_weighted_by_the_groups() -> None:
    teacher, student = pair()
    found = component_similarity(teacher, student, measure="attention_js", corrected=False)
    groups = [
        np.mean([1 - jensenshannon(a, b, base=2) ** 2 for a, b in zip(x[4], y[1], strict=True)])
        for x, y in zip(averages(teacher), averages(student), strict=True)
    ]
    assert found.value[5, 1] == pytest.approx(0.6 * groups[0] + 0.4 * groups[1], abs=1e-6)


@pytest.mark.parametrize("measure", ["attention_cosine", "attention_js"])
def test_the_average_pair_of_heads_is_chance(measure: str) -> None:
    teacher = random_components(layers=2, heads=4, seed=0)
    student = copy_head(random_components(layers=1, heads=4, seed=1), 0, 3)
    student = replace(
        student,
        patterns=tuple(
            torch.cat([a[:, 5:6], b[:, 1:]], dim=1)
            for a, b in zip(teacher.patterns, student.patterns, strict=True)
        ),
    )
    heads = np.ix_(head_places(teacher), head_places(student))
    raw = component_similarity(teacher, student, measure=measure, corrected=False).value[heads]
    found = component_similarity(teacher, student, measure=measure)
    np.testing.assert_allclose(found.chance[heads], raw.mean())
    expected = np.clip((raw - raw.mean()) / (1 - raw.mean()), 0, 1)
    np.testing.assert_allclose(found.value[heads], expected, atol=1e-12)
    assert raw.mean() > 0.4
    assert found.value[6, 0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("measure", RESAMPLED)
def test_resampling_that_takes_every_prompt_once_changes_nothing(measure: str) -> None:
    teacher, student = pair()
    found = component_similarity(teacher, student, np.ones((2, 50)), measure=measure)
    for draw in found.draws:
        np.testing.assert_allclose(draw, found.value, atol=1e-5)
    assert found.value.max() > 0.3


# Circuits


@pytest.mark.parametrize("measure", CIRCUITS)
def test_circuits_of_all_pairs_of_heads_are_those_of_plain_arrays(measure: str) -> None:
    teacher, student = pair()
    scores = circuits_of(teacher), circuits_of(student, 1)
    scores[1][0] += scores[0][4]
    found = component_similarity(teacher, student, measure=measure, circuits=scores).value
    assert found[5, 0] == pytest.approx(similarity(scores[0][4], scores[1][0], measure), abs=1e-9)
    assert found[5, 0] > 0.2
    signed = similarity(scores[0][0], scores[1][1], measure)
    assert found[0, 1] == pytest.approx(max(0, signed), abs=1e-9)


def test_opposite_circuits_are_not_alike() -> None:
    teacher, _ = pair()
    scores = circuits_of(teacher)
    found = component_similarity(teacher, teacher, measure="ov_circuit", circuits=(scores, -scores))
    assert found.value[0, 0] == 0


@pytest.mark.parametrize(
    ("teacher_shape", "student_shape", "message"),
    [
        ((5, 4, 4), (2, 4, 4), "teacher has 6 heads"),
        ((6, 4, 4), (3, 4, 4), "student has 2 heads"),
        ((6, 4, 4), (2, 4, 5), "the same words"),
    ],
)
def test_wrong_circuits_are_refused(teacher_shape, student_shape, message) -> None:
    teacher, student = pair()
    scores = torch.zeros(teacher_shape), torch.zeros(student_shape)
    with pytest.raises(InputError, match=message):
        component_similarity(teacher, student, measure="qk_circuit", circuits=scores)


def test_missing_and_broken_circuits_are_refused() -> None:
    teacher, student = pair()
    with pytest.raises(InputError, match="give circuits="):
        component_similarity(teacher, student, measure="qk_circuit")
    broken = circuits_of(teacher), circuits_of(student) * torch.nan
    with pytest.raises(InputError, match="student's circuits hold NaN"):
        component_similarity(teacher, student, measure="qk_circuit", circuits=broken)


# The paper's


def test_the_papers_mlps_may_be_rescaled_by_its_heads() -> None:
    teacher, student = random_components(seed=0), random_components(layers=1, seed=1)
    plain, found = (
        paper_similarity(teacher, student),
        paper_similarity(teacher, student, rescaled=True),
    )
    heads = np.ix_(head_places(teacher), head_places(student))
    np.testing.assert_array_equal(found[heads], plain[heads])
    mlps = np.array([[paper_mlp(x.double().numpy(), y.double().numpy()) for y in student.raw_mlp]
                     for x in teacher.raw_mlp])  # fmt: skip
    np.testing.assert_allclose(
        found[[3, 7], 3], np.clip(rescaled(mlps, plain[heads])[:, 0], 0, 1), atol=1e-12
    )
    assert found[[3, 7], 3].max() == 1


def test_the_papers_mlps_need_models_of_one_width() -> None:
    teacher, student = pair()
    with pytest.raises(InputError, match=r"one width, not \[6, 7\]"):
        component_similarity(teacher, student, measure="paper")


# Refusals


@pytest.mark.parametrize("measure", [m for m in COMPONENT_MEASURES if m not in RESAMPLED])
def test_measures_that_are_not_resampled_say_so(measure: str) -> None:
    components = random_components(batches=(30, 20), seed=0)
    circuits = circuits_of(components), circuits_of(components)
    with pytest.raises(InputError, match="cannot be resampled"):
        component_similarity(
            components, components, np.ones((1, 50)), measure=measure, circuits=circuits
        )


def test_unknown_measures_are_refused_by_name() -> None:
    components = random_components(seed=0)
    with pytest.raises(InputError, match="Unknown measure 'l2' of components; choose one of def"):
        component_similarity(components, components, measure="l2")
