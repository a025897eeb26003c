"""The list of all shapes.

N tokens, D hidden, V vocabulary; a shape is written NxDxV.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    N: int
    D: int
    V: int

    def __str__(self) -> str:
        return f"{self.N}x{self.D}x{self.V}"


GROUPS: dict[str, tuple[Shape, ...]] = {
    "key": (  # four shapes that differ in what limits them: balanced, widest vocabulary, D = 2048, smallest D
        Shape(8192, 4096, 128256),  # Llama 3 8B
        Shape(8192, 2304, 256000),  # Gemma 2 2B
        Shape(16384, 2048, 128256),  # Llama 3.2 1B
        Shape(16384, 896, 151936),  # Qwen 2.5 0.5B
    ),
    "sweep_n": tuple(Shape(n, 4096, 128256) for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536)),
    "sweep_v": tuple(Shape(8192, 4096, v) for v in (32000, 64000, 102400, 128256, 151936, 201088, 256000)),
    "sweep_d": tuple(Shape(8192, d, 128256) for d in (512, 1024, 2048, 3072, 4096, 6144, 8192)),
    "odd": (  # pairs: a size that no multiple of 8 or 16 divides, and the one that one would pad it to
        *(Shape(12288, 1536, v) for v in (50257, 50304)),  # GPT-2's vocabulary
        *(Shape(20000, 1024, v) for v in (32001, 32064)),  # Llama 2 with one added token
        *(Shape(4096, 4096, v) for v in (151669, 151680)),  # Qwen 2.5's tokens, without the padding of its head
        *(Shape(8192, d, 32000) for d in (2052, 2064)),  # rows do not start on 16 bytes: no tensor maps
    ),
    "few_features": (  # heads of small models, whose GEMMs are short
        Shape(40000, 640, 262144),  # Gemma 3 270M
        Shape(16384, 1152, 262144),  # Gemma 3 1B
        Shape(16384, 896, 151936),  # Qwen 2.5 0.5B
        Shape(16384, 576, 49152),  # SmolLM 135M
        Shape(16384, 960, 49152),  # SmolLM 360M
        *(Shape(16384, 768, v) for v in (50257, 50304)),  # GPT-2, and padded
    ),
    "narrow": (Shape(16384, 512, 128256), Shape(16384, 512, 32000), Shape(65536, 512, 32000)),
    "masked": (Shape(8192, 4096, 128256), Shape(16384, 2048, 128256)),  # for --ignored
    "small": (  # few tokens, or a small head: the host's launches matter
        *(Shape(n, 4096, 151936) for n in (128, 256, 1024, 2048)),
        *(Shape(n, 2048, 128256) for n in (128, 256, 1024, 2048)),
        *(Shape(n, 512, 32000) for n in (128, 256, 1024, 2048)),
        Shape(256, 4096, 128256),
    ),
    "ragged": (Shape(4095, 4096, 128259), Shape(1021, 2056, 50257)),  # no tile divides any size
    "toy": (Shape(64, 32, 501), Shape(252, 123, 507)),  # seconds on a CPU
}


def parse_shapes(text: str) -> list[Shape]:
    """`key,sweep_n,8192x4096x128256` -> shapes in that order, each once."""
    shapes: dict[Shape, None] = {}
    for word in filter(None, text.split(",")):
        if word in GROUPS:
            shapes.update(dict.fromkeys(GROUPS[word]))
            continue
        try:
            n, d, v = (int(size) for size in word.split("x"))
        except ValueError:
            raise ValueError(f"expected NxDxV or one of {', '.join(GROUPS)}, got {word!r}") from None
        shapes[Shape(n, d, v)] = None
    return list(shapes)
