"""Measures of states, attention maps and predictions: pure functions of tensors.

States are ``(batch, token, model)`` with `real` True where a token counts, ``(batch, token)``.
Maps are ``(row, head, key)``: a row is one query of one sentence, its entries are probabilities
that sum to one; masked keys have zero. Each function returns one value per item (a token, a
sentence, a row and head), so that means over several batches weight all items equally.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

States = Float[Tensor, "batch token model"]
Real = Bool[Tensor, "batch token"]

PEAKED = 0.99
"""A row whose largest probability is above this attends to practically a single key."""

CHUNK = 512  # rows of a distribution over the vocabulary that are processed together


def precise(x: Tensor) -> Tensor:
    """Return `x` in float64, or float32 on a device that has no float64."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def squared_norms(x: States, real: Real) -> Float[Tensor, " real"]:
    """``||x||^2 / d`` of each real token (Xiong et al. 2020, 2002.04745, lemma 2)."""
    return precise(x)[real].square().mean(dim=-1)


def token_cosines(x: States, real: Real) -> Float[Tensor, " sentence"]:
    """Mean cosine over pairs of different real tokens, per sentence that has a pair.

    With u the n states scaled to length one: ``(||sum u||^2 - n) / (n (n - 1))``. It is 1
    when all tokens have the same direction.
    """
    counts = real.sum(dim=1)
    pairs = counts > 1
    u = torch.nn.functional.normalize(precise(x[pairs]), dim=-1) * real[pairs, :, None]
    n = counts[pairs]
    whole = u.sum(dim=1).square().sum(dim=-1)
    own = u.square().sum(dim=(1, 2))
    return (whole - own) / (n * (n - 1))


def token_ranks(x: States, real: Real) -> Float[Tensor, " sentence"]:
    """Effective rank of the matrix of real tokens, per sentence with two or more.

    ``exp(H(s / sum s))``, the exponential of the entropy of the singular values s (Roy & Vetterli
    2007, "The effective rank"): n if all are equal, 1 if only one direction remains. The values are
    roots of the eigenvalues of the smaller Gram matrix. NaN if a state is not finite.
    """
    kept = real.sum(dim=1) > 1
    rows = precise(x[kept]) * real[kept, :, None]
    if rows.shape[1] <= rows.shape[2]:
        gram = rows @ rows.transpose(1, 2)
    else:
        gram = rows.transpose(1, 2) @ rows
    finite = gram.isfinite().flatten(1).all(dim=1)
    values = torch.linalg.eigvalsh(torch.where(finite[:, None, None], gram, 0.0))
    singular = values.clamp(min=0.0).sqrt()
    ranks = entropies(singular / singular.sum(dim=-1, keepdim=True)).exp()
    return torch.where(finite, ranks, torch.nan)


def entropies(p: Float[Tensor, "*shape key"]) -> Float[Tensor, "*shape"]:
    """``-sum p ln p`` in nats, with 0 ln 0 = 0."""
    return torch.special.entr(p).sum(dim=-1)


def map_distances(
    p: Float[Tensor, "*shape key"], q: Float[Tensor, "*shape key"]
) -> Float[Tensor, "*shape"]:
    """Jensen-Shannon divergence in bits: 0 for equal maps, 1 for maps without a common key.

    ``H((p + q) / 2) - (H(p) + H(q)) / 2`` with logarithms of base 2 (He et al. 2021, RealFormer,
    2012.11747, appendix: their cuts of 0.25 and 0.75 imply the base).
    """
    between = entropies((p + q) / 2) - (entropies(p) + entropies(q)) / 2
    return (between / math.log(2.0)).clamp(min=0.0)


def head_distances(
    maps: Float[Tensor, "row head key"], below: Float[Tensor, "row head key"]
) -> Float[Tensor, "head below"]:
    """Mean distance over rows between each head of a layer and each head of the layer below."""
    heads = range(maps.shape[1])
    return torch.stack([map_distances(maps[:, h, None], below).mean(dim=0) for h in heads])


def matched_distance(distances: Float[Tensor, "head below"]) -> float:
    """Mean distance under the one-to-one matching of heads that minimises it.

    Without residual scores, head i is unrelated to head i of the layer below, so the distance
    of the same head is a random baseline; this distance is not.
    """
    from scipy.optimize import linear_sum_assignment

    if not bool(distances.isfinite().all()):
        return math.nan
    table = distances.cpu().numpy()
    return float(table[linear_sum_assignment(table)].mean())


def score_ratio(new: Float[Tensor, " cell"], total: Float[Tensor, " cell"]) -> Float[Tensor, ""]:
    """``r_n = ||S_n||_F / ||Z_n||_F``: a layer's own scores relative to the running sum.

    Taken over the visible cells. 0 means that a layer adds nothing to the carried sum (Su
    Jianlin's diagnostic for residual attention); NaN if the sum is zero.
    """
    return precise(new).norm() / precise(total).norm()


def peaked_rows(maps: Float[Tensor, "*shape key"]) -> Float[Tensor, "*shape"]:
    """1 if the largest probability of a row is above 0.99, otherwise 0."""
    return (maps.amax(dim=-1) > PEAKED).to(maps.dtype)


def distribution_sums(
    logits: Float[Tensor, "position vocabulary"],
) -> tuple[Float[Tensor, " vocabulary"], Float[Tensor, ""]]:
    """Return the sum over positions of the distributions, and of their entropies (nats)."""
    total = precise(logits.new_zeros(logits.shape[1]))
    entropy = precise(logits.new_zeros(()))
    for part in logits.split(CHUNK):
        p = precise(part).softmax(dim=-1)
        total += p.sum(dim=0)
        entropy += entropies(p).sum()
    return total, entropy


def output_information(
    total: Float[Tensor, " vocabulary"], entropy: Float[Tensor, ""], positions: int
) -> Float[Tensor, ""]:
    """Mean divergence ``KL(p_i || mean_j p_j)`` of the predictions from their average, in nats.

    ``H(mean p) - mean H(p)``, from the sums of `distribution_sums`. It is 0 if the model
    predicts the same at every position: then its states do not distinguish positions.
    """
    return (entropies(total / positions) - entropy / positions).clamp(min=0.0)


def row_angles(
    old: Float[Tensor, " row"], along: Float[Tensor, " row"], moved: Float[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """The angles in radians by which changes turn rows; 0 for a row of zeros, which has none.

    For a row w and its change d: ``||w||``, ``w . d`` and ``||d||``. From the parts of d along and
    across w, since the arc cosine of a number near 1 has no small angles in float32.
    """
    old, along, moved = (precise(x) for x in (old, along, moved))
    along = along / torch.where(old == 0.0, 1.0, old)
    across = (moved.square() - along.square()).clamp(min=0.0).sqrt()
    return torch.where(old == 0.0, 0.0, torch.atan2(across, old + along))


def equilibrium_angle(rate: float, decay: float, beta1: float) -> float:
    """``sqrt(2 eta lambda (1 - beta1) / (1 + beta1))``: the angle per step in AdamW's equilibrium.

    It has no other parameter (Kosson et al. 2023, 2305.17212): rows of any model turn by it once
    decay and growth of their norms balance.
    """
    return math.sqrt(2.0 * rate * decay * (1.0 - beta1) / (1.0 + beta1))


def relative_changes(
    old: Float[Tensor, "token model"], new: Float[Tensor, "token model"]
) -> Float[Tensor, " token"]:
    """``||x' - x|| / ||x||`` of each token; tokens whose state is zero are left out."""
    before = precise(old).norm(dim=-1)
    kept = before != 0.0
    return precise(new - old).norm(dim=-1)[kept] / before[kept]


def largest_singular_values(
    left: Float[Tensor, "head dim model"], right: Float[Tensor, "head dim model"]
) -> Float[Tensor, " head"]:
    """``sigma_1(left^T right)`` of each head, from the triangular factors of both.

    NaN if a product of any head is not finite, as after a step that made weights infinite.
    """
    parts = (torch.linalg.qr(precise(part).mT, mode="r").R for part in (left, right))
    first, second = parts
    product = first @ second.mT
    if not product.isfinite().all():
        return product.new_full(product.shape[:1], math.nan)
    return torch.linalg.svdvals(product)[:, 0]
