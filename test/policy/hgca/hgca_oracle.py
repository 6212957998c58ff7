"""Algorithms 1 and 2 of HGCA (Deng et al.), token by token in float64: one request in one layer.

Deviations from the paper, as in the engine:

- Line 12 of Algorithm 1 has its sign reversed: ceil((l_cur - l_max + 1) / blk_size) blocks are evicted.
- The smoothing factor is not given: 0.1 here. An entry's average starts at its first weight.
- Grouped queries: one average per KV head, of the largest weight among the group's query heads.
- An eviction uses the averages of the step before the last, the newest available to a pipelined host. A block without
  averages is kept whole.
- Append: the selecting query is the first decode step's, not the prompt's last ones. Until the evaluation has landed,
  the CPU attends to everything.
- A list has at most ``cap`` tokens: later ones are dropped, and the head's beta is doubled.
- Retained weights are not renormalised: they are not read again.
"""

import numpy as np

BLOCK = 32


class Oracle:
    """Args: k, v [T, H, D] of the prompt but its last token; window in tokens; when an evaluation lands, in steps."""

    def __init__(self, k, v, window, scale, alpha=0.1, beta=1.0, cap=None, lands_after=1):
        self.k, self.v = np.asarray(k, np.float64), np.asarray(v, np.float64)
        self.window, self.scale, self.alpha, self.cap = window, scale, alpha, cap
        heads = self.k.shape[1]
        self.beta = np.full(heads, float(beta))
        self.raised = 0
        self.lands_after, self.steps = lands_after, 0
        self.kept = [[] for _ in range(heads)]
        self.since = []  # (block, kept tokens per head) that left before the evaluation landed
        self.evaluated = None
        self.first = self._first(len(self.k) + 1)  # token of the window
        self.maw, self.known = np.zeros((heads, 0)), None  # of tokens from `maw_first` on
        self.near = []  # (head, token) whose weight came within 1e-6 of its threshold, relatively

    def _first(self, length):
        return BLOCK * max(0, (length - 1) // BLOCK - (self.window // BLOCK - 1))

    def step(self, q, k, v):
        """q [HQ, D], k and v [H, D] of the new token. Returns [HQ, D]."""
        self.k, self.v = (
            np.concatenate([x, np.asarray(y, np.float64)[None]])
            for x, y in ((self.k, k), (self.v, v))
        )
        self._evict()
        self._land()
        length, heads = self.k.shape[:2]
        group = len(q) // heads
        q = np.asarray(q, np.float64).reshape(heads, group, -1)
        logits = np.einsum("hgd,thd->hgt", q, self.k) * self.scale
        here = np.arange(self.first, length)
        on_gpu = softmax(logits[..., here]).max(1)  # [H, tokens of the window]
        first_step, self.steps = self.steps == 0, self.steps + 1
        if first_step and self.first:
            self.evaluated = self._salient(
                softmax(logits[..., : self.first]).max(1), self.beta / self.first, 0
            )
        older = np.arange(self.first)
        out = []
        for head in range(heads):
            on_cpu = older if self.evaluated is not None else np.array(self.kept[head], int)
            tokens = np.concatenate([on_cpu, here])
            out.append(softmax(logits[head][:, tokens]) @ self.v[tokens, head])
        self.known = None if first_step else (self.maw_first, self.maw)
        self._average(on_gpu, first_step)
        return np.concatenate(out)

    def _salient(self, weight, threshold, first):
        """Tokens per head above its threshold; ``weight`` [H, n] of tokens from ``first`` on."""
        with np.errstate(invalid="ignore"):
            close = np.abs(weight - threshold[:, None]) < 1e-6 * threshold[:, None]
        self.near += [(int(h), int(t) + first) for h, t in zip(*close.nonzero(), strict=True)]
        above = weight > threshold[:, None]
        return [(row.nonzero()[0] + first).tolist() for row in above]

    def _evict(self):
        first = self._first(len(self.k))
        if first == self.first:
            return
        block = np.arange(self.first, first)
        if self.known is None:
            leaving = [block.tolist() for _ in self.kept]
        else:
            began, maw = self.known
            weight = maw[:, block - began]
            leaving = self._salient(weight, self.beta / self.window, self.first)
        self.first = first
        if self.evaluated is None:
            self._keep(leaving)
        else:
            self.since.append(leaving)

    def _land(self):
        if self.evaluated is None or self.steps < self.lands_after:
            return
        for tokens in (self.evaluated, *self.since):
            self._keep(tokens)
        self.evaluated, self.since = None, []

    def _keep(self, tokens):
        for head, more in enumerate(tokens):
            room = len(more) if self.cap is None else max(0, self.cap - len(self.kept[head]))
            self.kept[head] += more[:room]
            if len(more) > room:
                self.beta[head] = 2 * self.beta[head] or 1.0
                self.raised += 1

    def _average(self, weight, first_step):
        """Algorithm 1 line 9; new entries are initialised."""
        moved = weight.copy()
        if not first_step:
            old = self.maw[:, self.first - self.maw_first :]
            known = slice(0, old.shape[1])
            moved[:, known] = (1 - self.alpha) * old + self.alpha * weight[:, known]
        self.maw, self.maw_first = moved, self.first


def softmax(logits):
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)
