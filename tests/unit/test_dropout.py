"""The generator of dropout: uniform, independent along every axis, the same whatever the tiling."""

from __future__ import annotations

import math

import pytest
import torch

import strobe
from strobe.cuda.parts.scores import Scores
from strobe.problem import Problem
from strobe.problem.arguments import Arguments
from strobe.variants import dropout

GOLDEN = 35180, 49950, ".xxx..x..x.x..xxx..x...xx.x....."


def mix(x: int) -> int:
    """Mix the bits as a kernel would write it, in unsigned 32-bit arithmetic."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def uniform(seed: int, batch: int, head: int, query: int, key: int) -> int:
    r = mix((seed >> 32 & 0xFFFFFFFF) ^ 0x9E3779B9)
    r = mix(r ^ seed & 0xFFFFFFFF)
    r = mix((mix(r ^ batch) + head) & 0xFFFFFFFF)
    a = mix(r ^ query & ~9)
    b = mix(a ^ 0x85EBCA6B) | 0x80000001
    s = (key & ~9) * b + (b << 32 | a) & 0xFFFFFFFFFFFFFFFF
    z = (s >> 32 ^ s & 0xFFFFFFFF) * 0x9E3779B1
    even, odd = (0xB5297A4D, 0x68E31DA3, 0x1B56C4E9, 0xC2B2AE3F), (0x85EBCA6B, 0x27D4EB21, 0xCD9E8D57, 0x165667B5)
    place = (query >> 3 & 1) + 2 * (key >> 3 & 1)
    w = (z & 0xFFFFFFFF) * (odd if query % 2 else even)[place] + (z >> 32) & 0xFFFFFFFF
    return w >> 16 if key % 2 else w & 0xFFFF


def as_fp16(bits: int) -> float:
    return torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(torch.float16).item()


@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, 1234567890123456789, (1 << 64) - 1, -1])
def test_is_the_formula(seed: int) -> None:
    indices = range(2), range(5, 8), range(1000, 1012), range(70000, 70016)
    found = dropout.keep(seed, *indices, 0.4)
    for b, batch in enumerate(indices[0]):
        for h, head in enumerate(indices[1]):
            for q, query in enumerate(indices[2]):
                for k, key in enumerate(indices[3]):
                    bits = uniform(seed, batch, head, query, key)
                    expected = not as_fp16(bits) < as_fp16(dropout.threshold_bits(0.4))  # NaN is kept
                    assert found[b, h, q, k].item() == expected


@pytest.mark.parametrize("n", [0, 1, 6554, 31743, 31744, 31745, 31746, 32768, 60000, 63488, 63489, 63490, 65000, 65535])
def test_drops_as_many_patterns_as_asked_for(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 2^16 patterns, one each. Halves cannot tell 0 from -0."""
    words = torch.arange(1 << 16)
    monkeypatch.setattr(dropout, "_word", lambda *_: words.view(1, 1, 1, -1))
    p = n / (1 << 16)
    kept = dropout.keep(0, range(1), range(1), range(1), torch.zeros(1 << 16, dtype=torch.int64), p).flatten()
    assert (~kept).sum() == (31746 if n == 31745 else n)
    assert kept.sum() / dropout.kept_share(p) == 1 << 16  # the expectation of what is kept
    if p <= dropout.LARGEST:
        halves = words.to(torch.uint16).view(torch.float16)
        assert torch.equal(kept, ~(halves < as_fp16(dropout.threshold_bits(p))))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_the_mean_is_right_where_p_is_rounded(backend: str) -> None:
    """One entry of 65536 is kept, not one of a million."""
    q, k, v = torch.zeros(1, 128, 1, 1), torch.zeros(1, 8192, 1, 1), torch.ones(1, 8192, 1, 1, requires_grad=True)
    out = strobe.attention(q, k, v, dropout=0.999999, seed=1, backend=backend)
    assert abs(out.mean().item() - 1) < 5 / math.sqrt(128 * 8192 / 65536)  # Poisson's law
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(dv.sum(), out.sum().detach())


def test_kernels_scale_by_what_they_keep() -> None:
    q = torch.empty(1, 8, 1, 64, dtype=torch.float16)
    problem, _ = Problem.of(Arguments(q, q, q, dropout=0.9687, seed=1))
    assert Scores.values(problem)["dropout_scale"] == 65536 / (65536 - 63485) != 1 / (1 - 0.9687)


def test_golden_values() -> None:
    """Seeds in the wild must go on meaning the same."""
    assert uniform(42, 0, 0, 0, 0) == GOLDEN[0] and uniform(42, 1, 2, 3, 4) == GOLDEN[1]
    row = dropout.keep(42, range(1), range(1), range(1), range(32), 0.5)[0, 0, 0]
    assert "".join("x" if kept else "." for kept in row.tolist()) == GOLDEN[2]


def test_tiles_and_index_tensors_give_the_same() -> None:
    whole = dropout.keep(7, range(2), range(3), range(40), range(50), 0.3)
    assert torch.equal(
        whole[1:, 1:, 9:31, 17:], dropout.keep(7, range(1, 2), range(1, 3), range(9, 31), range(17, 50), 0.3)
    )
    order = torch.randperm(50)
    assert torch.equal(whole[..., order], dropout.keep(7, range(2), range(3), range(40), order, 0.3))


def bits(seed: int, p: float = 0.5, batch: int = 1, heads: int = 1, rows: int = 512, keys: int = 512) -> torch.Tensor:
    return dropout.keep(seed, range(batch), range(heads), range(rows), range(keys), p).double()


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_keeps_the_right_share(p: float) -> None:
    kept = bits(3, p, batch=2, heads=2)
    deviation = (kept.mean().item() - (1 - p)) * math.sqrt(kept.numel() / max(p * (1 - p), 1e-9))
    assert abs(deviation) < 4.5
    per_row = (kept.sum(-1) - 512 * (1 - p)) / math.sqrt(512 * max(p * (1 - p), 1e-9))
    assert per_row.abs().max() < 7  # no row is special
    if p:
        assert 0.8 < per_row.var().item() < 1.2


def test_is_uniform() -> None:
    """Chi-square over 32 classes, read off by their thresholds."""
    dropped = [(1 - bits(11, i / 32, rows=256)).sum().double() for i in range(32)]
    counts, expected = torch.stack([*dropped, torch.tensor(256.0 * 512).double()]).diff(), 256 * 512 / 32
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert 31 - 4 * math.sqrt(62) < chi_square < 31 + 5 * math.sqrt(62)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the correlation in standard deviations."""
    return ((a - 0.5) * (b - 0.5)).mean().item() * 4 * math.sqrt(a.numel())


@pytest.mark.parametrize("step", [1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 32, 64, 128, 256])
def test_neighbours_are_independent(step: int) -> None:
    x = bits(5)[0, 0]
    assert abs(correlation(x[:, step:], x[:, :-step])) < 5, "keys"
    assert abs(correlation(x[step:], x[:-step])) < 5, "rows"
    assert abs(correlation(x[step:, step:], x[:-step, :-step])) < 5, "diagonal"


def test_keys_of_any_distance_are_independent() -> None:
    """All distances up to 16384 at once, by the spectrum of 3072 rows. With one multiplier for all of them, keys 448
    apart were correlated by -8e-4."""
    length, furthest, rows = 1 << 15, 1 << 14, 16 * torch.arange(3072)
    powers = torch.zeros(length + 1)
    for some in rows.split(128):  # of cells of their own
        kept = dropout.keep(9, range(1), range(1), some, range(length), 0.5)[0, 0].float() - 0.5
        powers += torch.fft.rfft(kept, n=2 * length).abs().square().sum(0)
    products = torch.fft.irfft(powers.double(), n=2 * length)[1 : furthest + 1]
    pairs = len(rows) * (length - torch.arange(1, furthest + 1))
    assert (products * 4 / pairs.sqrt()).abs().max() < 6  # standard deviations


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_entries_of_a_cell_are_independent(p: float) -> None:
    """Four queries and four keys share a hash: no pair of these 16 entries is correlated."""
    apart = bits(8, p, rows=1024, keys=2048).view(64, 2, 4, 2, 128, 2, 4, 2)  # by bits 3 and 0 of each
    cells = apart.permute(1, 3, 5, 7, 0, 2, 4, 6).reshape(16, -1)
    deviations = torch.corrcoef(cells) * math.sqrt(cells.shape[1])
    assert deviations.fill_diagonal_(0).abs().max() < 5


@pytest.mark.parametrize("other", [6, 4, 5 + (1 << 32), 5 ^ (1 << 31), -5])
def test_seeds_are_independent(other: int) -> None:
    assert abs(correlation(bits(5), bits(other))) < 5


def test_heads_and_batches_are_independent() -> None:
    x = bits(5, batch=3, heads=4, rows=256, keys=256).flatten(0, 1)
    for i in range(12):
        for j in range(i):
            assert abs(correlation(x[i], x[j])) < 5
            assert abs(correlation(x[i], x[j].T)) < 5


def test_no_two_rows_are_alike() -> None:
    x = bits(5, heads=4, rows=256, keys=64).flatten(0, 2)
    assert torch.unique(x, dim=0).shape[0] == x.shape[0]


def test_no_seed_is_drawn_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay would drop the same weights."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="each replay would drop the same weights"):
        dropout.new_seed(torch.device("cuda", 0))
    torch.manual_seed(3)
    first = dropout.new_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert dropout.new_seed(torch.device("cpu")) == first != dropout.new_seed(torch.device("cpu"))
