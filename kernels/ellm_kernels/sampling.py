"""From one row of logits to one token: argmax, draw, ranks, penalties, and the random numbers.

Tokens are ordered by (logit falling, id rising) everywhere, so equal logits never make a result
depend on the route. Nothing sorts the vocabulary: tokens are counted into buckets of 1/16 octave
of probability, and only the bucket that holds the border is sorted. A weight is the probability
relative to the most likely token; its own is exactly 1. Scratch arrays come from the caller.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ellm_kernels.jit import entry, kernel
from ellm_kernels.simd import LANES, vadd, vexp2, vfma, vload, vsplat, vstore, vsub, vsum

NUM_BUCKETS = 2048
# Buffers for weights are this long or a multiple of it: they are written in whole vectors.
WEIGHTS_MULTIPLE = LANES
_BUCKETS_PER_OCTAVE = np.float32(16.0)
_LAST_BUCKET = np.float32(NUM_BUCKETS - 1)
# Sums run in float32 lanes over this many vectors, then go on in float64.
_VECS_PER_SUM = 64
_ARGMAX_BLOCK = 1024
LOG2_E = 1.4426950408889634
_INF_KEY = 0x7F800000


@kernel
def _order_key(bits: Any) -> Any:
    """Sign and magnitude to two's complement: integers ordered as the floats, -0 equal to 0."""
    return bits if bits >= 0 else np.int32(np.int32(-(2**31)) - bits)


@entry("int64(float32[::1])")
def argmax(row: Any) -> Any:
    """The lowest index of the largest value, or -1 if any value is NaN. Reads the row once.

    Works on integer keys: integer maxima are reduced in vectors, and a NaN's key lies outside
    [-inf, inf].
    """
    bits = row.view(np.int32)
    best = np.int32(-(2**31) + 1)
    best_block: Any = 0
    lowest = np.int32(0)
    highest = np.int32(0)
    for start in range(0, bits.size, _ARGMAX_BLOCK):
        stop = min(start + _ARGMAX_BLOCK, bits.size)
        low = np.int32(2**31 - 1)
        high = np.int32(-(2**31) + 1)
        for i in range(start, stop):
            key = _order_key(bits[i])
            low = key if key < low else low
            high = key if key > high else high
        lowest = min(lowest, low)
        highest = max(highest, high)
        if high > best:
            best = high
            best_block = start
    if highest > _INF_KEY or lowest < -_INF_KEY:
        return -1
    i = best_block
    while _order_key(bits[i]) != best:
        i += 1
    return i


@kernel
def _weights(row: Any, peak: Any, scale: Any, weights: Any) -> Any:
    """weights[i] = 2^((row[i] - peak)·scale); returns their sum. `weights` is padded."""
    source = np.intp(row.ctypes.data)
    target = np.intp(weights.ctypes.data)
    whole = row.size // LANES
    for i in range(whole * LANES, row.size):
        weights[i] = row[i]
    for i in range(row.size, weights.size):
        weights[i] = -np.inf
    peaks = vsplat(np.float32(peak))
    scales = vsplat(np.float32(scale))
    zero = vsplat(np.float32(0.0))
    total = 0.0
    num_vecs = weights.size // LANES
    for start in range(0, num_vecs, _VECS_PER_SUM):
        partial = zero
        for j in range(start, min(start + _VECS_PER_SUM, num_vecs)):
            x = vload((source if j < whole else target) + 4 * LANES * j)
            w = vexp2(vfma(vsub(x, peaks), scales, zero))
            vstore(target + 4 * LANES * j, w)
            partial = vadd(partial, w)
        total += np.float64(vsum(partial))
    return total


@entry("float64(float32[::1], int64, float32[::1])")
def log_sum_exp(row: Any, best: Any, weights: Any) -> Any:
    """ln Σ exp(row[i]), with `best` the row's argmax. Overwrites `weights`."""
    total = _weights(row, row[best], np.float32(LOG2_E), weights)
    return np.float64(row[best]) + np.log(total)


@kernel
def _bucket(x: Any, peak: Any, scale: Any) -> Any:
    """Which 1/16 octave below the peak a logit lies in; the last bucket takes all the rest."""
    depth = (peak - x) * scale * _BUCKETS_PER_OCTAVE
    return np.int64(min(depth, _LAST_BUCKET))


@kernel
def _before(row: Any, a: Any, b: Any) -> Any:
    """Whether token a comes before token b."""
    return row[a] > row[b] or (row[a] == row[b] and a < b)


@kernel
def _sift_down(row: Any, heap: Any, start: Any, size: Any) -> None:
    """Restores a heap whose root is the token that comes last."""
    parent = start
    while True:
        child = 2 * parent + 1
        if child >= size:
            return
        if child + 1 < size and _before(row, heap[child], heap[child + 1]):
            child += 1
        if not _before(row, heap[parent], heap[child]):
            return
        heap[parent], heap[child] = heap[child], heap[parent]
        parent = child


@kernel
def _sort(row: Any, ids: Any, size: Any) -> None:
    """Sorts ids[:size] in place by heap: no bad case and no memory."""
    for start in range(size // 2 - 1, -1, -1):
        _sift_down(row, ids, start, size)
    for last in range(size - 1, 0, -1):
        ids[0], ids[last] = ids[last], ids[0]
        _sift_down(row, ids, 0, last)


@kernel
def _is_sorted(row: Any, ids: Any, size: Any) -> Any:
    i = 1
    while i < size and _before(row, ids[i - 1], ids[i]):
        i += 1
    return i >= size


@kernel
def _cut(
    row: Any, peak: Any, scale: Any, weights: Any, ids: Any, count: Any, limit: Any, by_mass: Any,
    histogram: Any, border: Any,
) -> Any:  # fmt: skip
    """Keeps the first tokens of ids[:count] in order; returns how many stay, ids still rising.

    by_mass: the shortest prefix whose share of the mass is at least `limit`; otherwise the first
    `limit` tokens. A prefix has at least one token.
    """
    for b in range(NUM_BUCKETS):
        histogram[b] = 0.0
    total = 0.0
    for j in range(count):
        amount = np.float64(weights[ids[j]]) if by_mass else 1.0
        histogram[_bucket(row[ids[j]], peak, scale)] += amount
        total += amount
    goal = limit * total if by_mass else limit
    if goal >= total:
        return count
    reached = 0.0
    last = 0
    while last < NUM_BUCKETS - 1 and reached + histogram[last] < goal:
        reached += histogram[last]
        last += 1
    size = 0
    for j in range(count):
        b = _bucket(row[ids[j]], peak, scale)
        if b == last:
            border[size] = ids[j]
            size += 1
        elif b > last:
            weights[ids[j]] = 0.0
    if not _is_sorted(row, border, size):
        _sort(row, border, size)
    for j in range(size):
        if reached >= goal and not (last == 0 and j == 0):
            weights[border[j]] = 0.0
        else:
            reached += np.float64(weights[border[j]]) if by_mass else 1.0
    kept = 0
    for j in range(count):
        if weights[ids[j]] > 0.0:
            ids[kept] = ids[j]
            kept += 1
    return kept


@entry(
    "int64(float32[::1], int64, float64, float64, int64, float64,"
    " float32[::1], int32[::1], int32[::1], float64[::1])"
)
def keep(
    row: Any, best: Any, temperature: Any, min_p: Any, top_k: Any, top_p: Any,
    weights: Any, ids: Any, border: Any, histogram: Any,
) -> Any:  # fmt: skip
    """Which tokens may be drawn after min_p, then top_k, then top_p; returns how many.

    best: argmax of the row. top_k 0: off. top_p acts on what the other two left.
    ids: gets the tokens kept, rising. weights: gets e^((row - row[best]) / temperature) for them.
    """
    peak = row[best]
    scale = np.float32(LOG2_E / temperature)
    _weights(row, peak, scale, weights)
    count = 0
    for i in range(row.size):
        if weights[i] > 0.0 and weights[i] >= min_p:
            ids[count] = i
            count += 1
    if 0 < top_k < count:
        limit = np.float64(top_k)
        count = _cut(row, peak, scale, weights, ids, count, limit, False, histogram, border)
    if top_p < 1.0:
        count = _cut(row, peak, scale, weights, ids, count, top_p, True, histogram, border)
    return count


@entry("int64(float32[::1], int32[::1], int64, float64)")
def pick(weights: Any, ids: Any, count: Any, point: Any) -> Any:
    """One of ids[:count], each with a chance in proportion to its weight.

    point in [0, 1) is looked up in the cumulative distribution over `ids` in their order.
    """
    mass = 0.0
    for j in range(count):
        mass += np.float64(weights[ids[j]])
    target = point * mass
    reached = 0.0
    for j in range(count):
        reached += np.float64(weights[ids[j]])
        if reached > target:
            return np.int64(ids[j])
    return np.int64(ids[count - 1])


@entry("int64(float32[::1], int64)")
def rank(row: Any, token: Any) -> Any:
    """The token's place in the order, the most likely one being 1."""
    value = row[token]
    place: Any = 1
    for i in range(row.size):
        place += np.int64(row[i] > value)
    for i in range(token):
        place += np.int64(row[i] == value)
    return place


@entry("void(float32[::1], int64[::1])")
def top_ids(row: Any, out: Any) -> None:
    """The first out.size tokens in order. Meant for a few: each is inserted into a short list."""
    size = 0
    for i in range(row.size):
        if size == out.size and not row[i] > row[out[size - 1]]:
            continue
        j = size if size < out.size else size - 1
        while j > 0 and row[i] > row[out[j - 1]]:
            out[j] = out[j - 1]
            j -= 1
        out[j] = i
        size = min(size + 1, out.size)


@entry("void(float32[::1], uint8[::1], int32[::1], float64, float64, float64)")
def penalize(
    row: Any, in_prompt: Any, output_counts: Any, repetition: Any, presence: Any, frequency: Any
) -> None:
    """Lowers, in place, the logits of tokens seen before.

    repetition: logits of prompt and output tokens are divided by it if positive, else multiplied.
    presence, frequency: subtracted from output tokens once, and once per occurrence.
    """
    for i in range(row.size):
        times = output_counts[i]
        if times > 0 or in_prompt[i] != 0:
            x = np.float64(row[i])
            x = x / repetition if x > 0.0 else x * repetition
            if times > 0:
                x -= presence + frequency * times
            row[i] = np.float32(x)


@kernel
def philox(key: Any, position: Any) -> Any:
    """Philox4x32-10 (Salmon et al., 2011): 64 bits that depend only on key and position."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    k0, k1 = key & mask, key >> half
    c0, c1 = position & mask, position >> half
    c2 = c3 = np.uint64(0)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & mask, (p0 >> half) ^ c3 ^ k1, p0 & mask
        k0 = (k0 + np.uint64(0x9E3779B9)) & mask
        k1 = (k1 + np.uint64(0xBB67AE85)) & mask
    return (c0 << half) | c1


@entry("float64(int64, int64)")
def uniform(seed: Any, position: Any) -> Any:
    """A number in [0, 1) with 53 random bits."""
    bits = philox(np.uint64(seed), np.uint64(position)) >> np.uint64(11)
    return np.float64(bits) * (1.0 / 9007199254740992.0)
