"""Real text that ships with Python, as a few thousand byte-pair pieces.

The text is the language reference behind `help("with")`: pydoc_data.topics, 0.45-0.7 MB of English and code depending
on the Python version, under the PSF License (https://docs.python.org/3/license.html). It is read from the running
Python; the repository has no copy.
"""

import heapq
import re
from collections import Counter, defaultdict

# A word includes the space before it, so that joining the pieces restores the text.
WORD = re.compile(r" ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]+|\s+(?=\s)|\s")


def python_reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some cut-down builds leave pydoc's texts out
        raise SystemExit("this Python lacks pydoc_data.topics, the text of the demo: use a full build") from error
    return "\n".join(topics[name] for name in sorted(topics))


def byte_pair_encode(text: str, vocab_size: int) -> tuple[list[int], list[str]]:
    """Merges the most frequent neighbouring pieces until there are `vocab_size` of them (fewer if the words run out).

    Returns the text as piece numbers, and the pieces: "".join(pieces[i] for i in ids) == text.
    """
    words = WORD.findall(text)
    counts = Counter(words)
    splits = {word: list(word) for word in counts}
    pieces = sorted(set(text))

    pair_count: Counter[tuple[str, str]] = Counter()
    words_with: dict[tuple[str, str], set[str]] = defaultdict(set)
    for word, split in splits.items():
        for pair in zip(split, split[1:], strict=False):
            pair_count[pair] += counts[word]
            words_with[pair].add(word)

    # A heap of (-count, pair). If an entry's count is out of date when it is popped, it is pushed again with the true
    # count.
    heap = [(-count, pair) for pair, count in pair_count.items()]
    heapq.heapify(heap)
    known = set(pieces)
    while heap and len(pieces) < vocab_size:
        count, pair = heapq.heappop(heap)
        if -count != pair_count[pair]:
            if pair_count[pair] > 0:
                heapq.heappush(heap, (-pair_count[pair], pair))
            continue
        merged = pair[0] + pair[1]
        if merged not in known:  # two ways to merge to one piece give the same piece
            known.add(merged)
            pieces.append(merged)
        for word in words_with.pop(pair):
            before = splits[word]
            after = splits[word] = _merge(before, pair)
            for old in zip(before, before[1:], strict=False):
                pair_count[old] -= counts[word]
            for new in zip(after, after[1:], strict=False):
                pair_count[new] += counts[word]
                if merged in new:  # only the counts of these pairs can have grown
                    words_with[new].add(word)
                    heapq.heappush(heap, (-pair_count[new], new))

    number = {piece: i for i, piece in enumerate(pieces)}
    ids_of = {word: [number[piece] for piece in split] for word, split in splits.items()}
    return [i for word in words for i in ids_of[word]], pieces


def _merge(split: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for piece in split:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out
