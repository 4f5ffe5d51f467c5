"""A reference of the suffix automaton in which SGLang looks drafts up (`suffix_automaton.cpp` of 0.5.23, match type BFS).

Given the end of a context, `draft` returns a tree of at most `num_nodes` tokens: the continuations of its longest suffixes
in the corpus, the most recent first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

DEPTH = 18  # tokens of the context that are looked up (--speculative-ngram-max-trie-depth)
MIN_BREADTH, MAX_BREADTH = 1, 10  # children of a node, by how long its suffix is
SEPARATOR = -(1 << 31)  # separates documents
Tree = dict[int, "Tree"]


@dataclass
class _State:
    longest: int = 0
    link: int = -1
    end: int = -1  # last position in the corpus at which one of its strings ends
    next: dict[int, int] = field(default_factory=dict)
    children: list[tuple[int, int]] = field(default_factory=list)  # (token, state), the most recent first


class SuffixAutomaton:
    """All substrings of a corpus of documents."""

    def __init__(self, documents: Iterable[Sequence[int]]) -> None:
        self._states, self._last, self._position = [_State()], 0, 0
        for index, document in enumerate(documents):
            for token in (*((SEPARATOR,) if index else ()), *document):
                self._extend(token)
        self._finish()

    def _extend(self, token: int) -> None:
        states, current = self._states, len(self._states)
        states.append(_State(states[self._last].longest + 1, 0, self._position))
        self._position += 1
        at, self._last = self._last, current
        while at != -1 and token not in states[at].next:
            states[at].next[token] = current
            at = states[at].link
        if at == -1:
            return
        known = states[at].next[token]
        if states[at].longest + 1 == states[known].longest:
            states[current].link = known
            return
        clone = len(states)
        states.append(_State(states[at].longest + 1, states[known].link, states[known].end, dict(states[known].next)))
        while at != -1 and states[at].next.get(token) == known:
            states[at].next[token] = clone
            at = states[at].link
        states[known].link = states[current].link = clone

    def _finish(self) -> None:
        states = self._states
        for index in sorted(range(1, len(states)), key=lambda i: -states[i].longest):
            link = states[states[index].link]
            link.end = max(link.end, states[index].end)
        for state in states:
            children = [(token, child) for token, child in state.next.items() if token != SEPARATOR]
            state.children = sorted(children, key=lambda pair: (-states[pair[1]].end, pair[0]))

    def anchors(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """Return (state, length) of the suffixes of `context` that the corpus continues, the longest first."""
        states, state, length = self._states, 0, 0
        for token in context[-DEPTH:]:
            while state and token not in states[state].next:
                state = states[state].link
                length = min(length, states[state].longest)
            if token in states[state].next:
                state, length = states[state].next[token], length + 1
            else:
                state, length = 0, 0
        found = []
        while state > 0 and length > 0:
            if states[state].children:
                found.append((state, length))
            state = states[state].link
            length = min(length, states[state].longest)
        return found

    def draft(self, context: Sequence[int], num_nodes: int) -> Tree:
        """Return what may follow `context`: a tree of at most `num_nodes` tokens."""
        root: Tree = {}
        left, scale = num_nodes, (MAX_BREADTH - MIN_BREADTH) / (DEPTH - 1)
        for anchor, length in self.anchors(context):
            queue: deque[tuple[Tree, float, int]] = deque([(root, (DEPTH - 1 - length) * scale + MIN_BREADTH, anchor)])
            while queue and left > 0:
                parent, breadth, state = queue.popleft()
                for token, child in self._states[state].children[: max(1, int(breadth))]:
                    if left <= 0:
                        break
                    left -= token not in parent
                    queue.append((parent.setdefault(token, {}), breadth - scale, child))
        return root


def accepted(tree: Tree, tokens: Sequence[int]) -> int:
    """Return how many of the next tokens a draft has: sampling a token that is drafted accepts it."""
    for count, token in enumerate(tokens):
        if token not in tree:
            return count
        tree = tree[token]
    return len(tokens)


def decoding_steps(automaton: SuffixAutomaton, prompt: Sequence[int], response: Sequence[int], num_nodes: int) -> int:
    """Return the steps that sample a response's tokens after the first, which the prompt's pass gives."""
    position, steps, whole = 1, 0, [*prompt, *response]
    while position < len(response):
        end = len(prompt) + position
        draft = automaton.draft(whole[max(0, end - DEPTH) : end], num_nodes)
        # The token after the accepted ones comes from the same step.
        position += accepted(draft, response[position:]) + 1
        steps += 1
    return steps
