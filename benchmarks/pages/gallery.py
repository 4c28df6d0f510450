"""The gallery: what each mask and each option of `strobe.attention` does to the weights, as code and as a picture.

If the values are the identity matrix, the output of attention is the matrix of its weights. So every example is a call,
and its picture is what the call returned. `python -m benchmarks.pages --write` writes docs/gallery.md and its
pictures; without `--write` it says what is out of date."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.committed import ROOT
from benchmarks.pages.generated import update

N = 24  # tokens
BLOCK = 4
_PIXELS = 8  # for each weight
FOLDER = Path("docs", "figures", "gallery")

SETUP = """
import torch, strobe

torch.manual_seed(0)
n = 24
q, k = torch.randn(2, n, 8)  # (length, dim)
v = torch.eye(n)  # the output is then the matrix of weights
"""


@dataclass(frozen=True)
class Example:
    name: str
    title: str
    about: str
    code: str
    blocks: bool = False  # a mask that kernels know, so that they skip blocks

    def weights(self) -> torch.Tensor:
        """Return what the code leaves in `weights`, (n, n)."""
        namespace: dict[str, Any] = {}
        exec(SETUP + self.code, namespace)
        found = namespace["weights"]
        assert isinstance(found, torch.Tensor) and found.shape == (N, N), (
            f"{self.name}: {getattr(found, 'shape', found)}"
        )
        return found.detach().float()

    def cost(self) -> str:
        """Say what the mask costs, in blocks."""
        seen = (self.weights() > 0).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        visited, full = (int(found.sum()) for found in (seen.any(3).any(1), seen.all(3).all(1)))
        asked = "none of them" if visited == full else "each of them" if not full else f"{visited - full} of them"
        return f"{visited} of {(N // BLOCK) ** 2} blocks are visited, and the mask is asked in {asked}."


EXAMPLES = (
    Example(
        "full",
        "No mask",
        "Every token sees every token.",
        "weights = strobe.attention(q, k, v)",
        blocks=True,
    ),
    Example(
        "causal",
        "Causal",
        "A token sees itself and the tokens before it. Tiles above the diagonal are skipped.",
        "weights = strobe.attention(q, k, v, mask=strobe.causal)",
        blocks=True,
    ),
    Example(
        "window",
        "Sliding window",
        "Both numbers count tokens besides the token itself: here four before it, and one after it.",
        "weights = strobe.attention(q, k, v, mask=strobe.window(4, 1))",
        blocks=True,
    ),
    Example(
        "causal-window",
        "Two masks at once",
        "Masks combine with `&`. This is what models with local attention use.",
        "weights = strobe.attention(q, k, v, mask=strobe.causal & strobe.window(6, 0))",
        blocks=True,
    ),
    Example(
        "prefix",
        "Prefix",
        "Causal, but the first tokens (a prompt, or the patches of an image) are visible to all.",
        "weights = strobe.attention(q, k, v, mask=strobe.prefix(8))",
        blocks=True,
    ),
    Example(
        "chunked",
        "Chunks",
        "A token sees its own chunk. With `& strobe.causal` this is chunked local attention.",
        "weights = strobe.attention(q, k, v, mask=strobe.chunked(8) & strobe.causal)",
        blocks=True,
    ),
    Example(
        "documents-ids",
        "Documents of one sequence",
        "A token sees its own document. Masks that are functions combine with the others, too.",
        """
ids = torch.tensor([0] * 5 + [1] * 9 + [2] * 10)
weights = strobe.attention(q, k, v, mask=strobe.causal & strobe.documents(ids))
""",
        blocks=True,
    ),
    Example(
        "neighbourhood",
        "Neighbourhood",
        "Tokens are pixels, here 6 rows of 4. A pixel sees those around it; at a border the square is moved inside.",
        "weights = strobe.attention(q, k, v, mask=strobe.neighbourhood(6, 4, 1))",
        blocks=True,
    ),
    Example(
        "tree",
        "Tree",
        "Draft tokens of speculative decode: each sees those that lead to it, and all that came before the tree.",
        """
parents = [-1, 0, 0, 1, 1, 2, 2, 3]
weights = strobe.attention(q, k, v, mask=strobe.causal & strobe.tree(parents, first=n - 8))
""",
        blocks=True,
    ),
    Example(
        "dilated",
        "Any mask, as a function",
        "Here every third token before one's own, and the four before it. A function says which pairs are seen.",
        """
def dilated(b, h, q, k):
    return (q >= k) & (((q - k) % 3 == 0) | (q - k <= 4))


weights = strobe.attention(q, k, v, mask=dilated)
""",
        blocks=True,
    ),
    Example(
        "global-local",
        "Global and local",
        "The first two tokens see all and are seen by all, the others see three on each side.",
        "weights = strobe.attention(q, k, v, mask=lambda b, h, q, k: ((q - k).abs() <= 3) | (k < 2) | (q < 2))",
        blocks=True,
    ),
    Example(
        "tensor",
        "Any mask, as a tensor",
        "Booleans of any pattern, True where a query may look. It is read, so it costs N × N bytes of its own.",
        """
rows, keys = torch.arange(n)[:, None], torch.arange(n)
every_third = (rows - keys) % 3 == 0
weights = strobe.attention(q, k, v, mask=every_third)
""",
    ),
    Example(
        "alibi",
        "ALiBi",
        "Scores fall with the distance between query and key, by one slope per head, so that near tokens weigh more.",
        "weights = strobe.attention(q, k, v, mask=strobe.causal, score=strobe.alibi(torch.tensor([0.3])))",
    ),
    Example(
        "bias",
        "Any bias, as a tensor",
        "A tensor that is added to the scores. Here the first four keys get a bonus. It is read, so it costs N × N numbers.",
        """
bonus = torch.zeros(n, n)
bonus[:, :4] = 2.0
weights = strobe.attention(q, k, v, bias=bonus)
""",
    ),
    Example(
        "softcap",
        "Softcap",
        "Large scores are squeezed by `softcap · tanh(s / softcap)`. No single key can take all of the weight.",
        "weights = strobe.attention(8 * q, k, v, softcap=2.0)",
    ),
    Example(
        "no-softcap",
        "The same without softcap",
        "For comparison: the same large scores, uncapped. A few keys take nearly everything.",
        "weights = strobe.attention(8 * q, k, v)",
    ),
    Example(
        "sinks",
        "Sinks",
        "A sink is one more score per head that takes its share of the weight and gives nothing back. The rows no longer "
        "add up to 1.",
        "weights = strobe.attention(q, k, v, mask=strobe.causal, sinks=torch.tensor([2.0]))",
    ),
    Example(
        "dropout",
        "Dropout",
        "Weights are zeroed at random, and the others grow to make up for it. A seed makes it repeatable.",
        "weights = strobe.attention(q, k, v, dropout=0.3, seed=0)",
    ),
    Example(
        "documents",
        "Documents of different lengths",
        "Packed into one tensor, each document sees itself only. No padding, no mask: `attention_varlen` takes the borders.",
        """
borders = torch.tensor([0, 5, 14, 24], dtype=torch.int32)
packed = (x[:, None] for x in (q, k, v))  # (all tokens, heads, dim)
weights = strobe.attention_varlen(*packed, borders, borders)[:, 0]
""",
    ),
)


# ---- pictures --------------------------------------------------------------------------------------------------------


def pixels(weights: torch.Tensor) -> torch.Tensor:
    """(rows, columns, 3) bytes: white where nothing is seen, darker violet for a larger weight; a grey hairline between."""
    shade = (weights / weights.max()).clamp(0, 1).sqrt()[..., None]
    light, dark = torch.tensor([231.0, 223.0, 250.0]), torch.tensor([58.0, 28.0, 120.0])
    colours = torch.where(weights[..., None] > 0, light + shade * (dark - light), torch.tensor(255.0))
    grown = colours.round().to(torch.uint8).repeat_interleave(_PIXELS, 0).repeat_interleave(_PIXELS, 1)
    grown[::_PIXELS] = grown[:, ::_PIXELS] = 236
    return grown


def write_picture(example: Example, path: Path) -> None:
    from matplotlib.image import imsave

    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, pixels(example.weights()).numpy())


# ---- the document ----------------------------------------------------------------------------------------------------

_INTRODUCTION = """<!-- generated: python -m benchmarks.pages --write -->
# Gallery

What each mask and each option does to the weights of attention, for 24 tokens. Queries run down, keys run across.
White: the query does not see the key. The darker, the larger the weight.

A trick makes the weights visible: if the values are the identity matrix, the output of attention *is* the matrix of its
weights. So each picture is what the call above it returned.

Kernels go through the matrix in blocks. They skip a block that a mask hides altogether, and ask the mask only where it
hides a part. Their blocks are about 128 × 128; the numbers under the pictures count blocks of 4 × 4.
"""


def document() -> str:
    parts = [_INTRODUCTION, f"```python\n{SETUP.strip()}\n```\n"]
    for example in EXAMPLES:
        alt = f"{example.title}: the weights of {N} queries and {N} keys"
        parts.append(f"## {example.title}\n\n{textwrap.fill(example.about, 120)}\n")
        parts.append(f"```python\n{example.code.strip()}\n```\n")
        parts.append(f"![{alt}](figures/gallery/{example.name}.png)\n")
        if example.blocks:
            parts.append(f"{example.cost()}\n")
    return "\n".join(parts)


def main(arguments: list[str], root: Path = ROOT) -> int:
    if "--write" in arguments:
        for example in EXAMPLES:
            write_picture(example, root / FOLDER / f"{example.name}.png")
    return update({root / "docs" / "gallery.md": document()}, root, "--write" in arguments)
