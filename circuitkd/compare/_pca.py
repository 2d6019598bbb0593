"""PCA, Procrustes and canonical correlations of two recordings of the same prompts and labels.

Arrays are ``[prompt, label, feature]``; a row is one label of one prompt.
"""

from dataclasses import dataclass

import numpy as np
from einops import rearrange
from jaxtyping import Float, Int
from scipy.linalg import orthogonal_procrustes, subspace_angles
from sklearn.decomposition import PCA

Scores = Float[np.ndarray, "prompt label component"]


@dataclass(frozen=True, eq=False)
class Projection:
    """A recording in its own principal components, most variance first.

    ``scores`` are centred over all rows; ``ratio`` is each component's share of the variance.
    """

    scores: Float[np.ndarray, "prompt label component"]
    ratio: Float[np.ndarray, "component"]

    def first(self, components: int) -> Scores:
        return self.scores[..., :components]

    def enough_for(self, variance: float) -> int:
        """How many components hold this share of the variance."""
        return 1 + int(np.searchsorted(np.cumsum(self.ratio), variance * (1 - 1e-12)))


def principal_components(activations: Float[np.ndarray, "prompt label feature"]) -> Projection:
    """All principal components that vary (Pearson 1901), by scikit-learn's full SVD."""
    rows = rearrange(activations, "prompt label feature -> (prompt label) feature")
    pca = PCA(svd_solver="full").fit(rows)
    varies = pca.explained_variance_ >= 1e-12 * max(pca.explained_variance_[0], 1e-300)
    scores = pca.transform(rows)[:, varies].reshape(*activations.shape[:2], -1)
    return Projection(scores, pca.explained_variance_ratio_[varies])


def aligned(fixed: Scores, moved: Scores) -> tuple[Scores, float]:
    """``moved`` after the rotation and scale that bring it nearest to ``fixed``, and the scale.

    min over orthogonal R and c of ‖fixed − c · moved R‖ (Schönemann 1966).
    """
    rotation, scale = _procrustes(fixed, moved)
    return scale * moved @ rotation, scale


def procrustes_residual(fixed: Scores, moved: Scores) -> float:
    """Share of ``fixed``'s squares that the best rotation and scale of ``moved`` do not give.

    1 − (‖MᵀF‖_* / (‖M‖ ‖F‖))², in [0, 1] and the same both ways round.
    """
    nuclear = orthogonal_procrustes(_rows(moved), _rows(fixed))[1]
    size = np.linalg.norm(fixed) * np.linalg.norm(moved)
    return float(np.clip(1 - (nuclear / size) ** 2, 0, 1)) if size > 0 else 1.0


def held_out_cosines(fixed: Scores, moved: Scores) -> Float[np.ndarray, "prompt label"]:
    """Cosine of each row after alignment on the other half of the prompts (even, odd).

    A rotation fitted on the very rows that it is judged on would make unrelated ones look alike.
    """
    cosines = np.zeros(fixed.shape[:2])
    for half in (0, 1):
        seen, judged = slice(1 - half, None, 2), slice(half, None, 2)
        rotation, _ = _procrustes(fixed[seen], moved[seen])
        cosines[judged] = _cosine(fixed[judged], moved[judged] @ rotation)
    return cosines


def canonical_correlations(
    one: Float[np.ndarray, "prompt label _"], other: Float[np.ndarray, "prompt label _"]
) -> Float[np.ndarray, "canonical"]:
    """Correlations of the best matching directions, largest first (Hotelling 1936).

    They are the cosines of the principal angles between the spaces that the centred scores span.
    """
    return np.cos(np.sort(subspace_angles(_rows(one), _rows(other))))


def shuffles(n_prompts: int, times: int, seed: int) -> Int[np.ndarray, "time prompt"]:
    """Random orders of the prompts: pairs of other prompts, each label still with its own."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(n_prompts) for _ in range(times)])


def _procrustes(
    fixed: Scores, moved: Scores
) -> tuple[Float[np.ndarray, "component component"], float]:
    rotation, nuclear = orthogonal_procrustes(_rows(moved), _rows(fixed))
    squares = float((moved**2).sum())
    return rotation, float(nuclear) / squares if squares > 0 else 0.0


def _cosine(x: Scores, y: Scores) -> Float[np.ndarray, "prompt label"]:
    size = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.divide((x * y).sum(-1), size, out=np.zeros_like(size), where=size > 0)


def _rows(scores: Float[np.ndarray, "prompt label _"]) -> Float[np.ndarray, "row _"]:
    return rearrange(scores, "prompt label component -> (prompt label) component")
