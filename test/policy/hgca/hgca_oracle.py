"""Algorithms 1 and 2 of HGCA (Deng et al.), token by token in float64: one request in one layer.

Deviations from the paper, as in the engine:

- Line 12 of Algorithm 1 has its sign reversed: ceil((l_cur - l_max + 1) / blk_size) blocks are evicted.
- The smoothing factor is not given: 0.1 here. An entry's average starts at its first weight.
- Grouped queries: one average per KV head, of the largest weight among the group's query heads.
- An eviction uses the averages of the step before the last, the newest available to a pipelined host. A block without
  averages is evaluated with the appended ones.
- Append: the selecting query is that of the prompt's last token, if given, or of the first decode step. Evaluation
  begins with the second step. Until it has landed, the CPU attends to everything.
- A list has at most ``cap`` tokens, the most salient: those with the largest weight in multiples of the mean weight.
- Retained weights are not renormalised.
"""

import numpy as np

BLOCK = 32


class Oracle:
    """Args: k, v [T, H, D] of the prompt but its last token; window in tokens; when an evaluation lands, in steps;
    asked [HQ, D], the query of the prompt's last token."""

    def __init__(
        self, k, v, window, scale, alpha=0.1, beta=1.0, cap=None, lands_after=1, asked=None
    ):
        self.k, self.v = np.asarray(k, np.float64), np.asarray(v, np.float64)
        self.window, self.scale, self.alpha, self.beta, self.cap = window, scale, alpha, beta, cap
        heads = self.k.shape[1]
        self.lands_after, self.steps, self.asked = lands_after, 0, asked
        self.kept = [{} for _ in range(heads)]  # token: salience
        self.since = []  # kept tokens per head that left before the evaluation landed
        self.dropped = 0  # that were kept before
        self.first = self._first(len(self.k) + 1)  # token of the window
        self.waits, self.evaluated = self.first > 0, None
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
        if self.waits and self.steps == 1:
            logits = self._logits(self.asked)[..., : self.first]
            self.evaluated = self._salient(softmax(logits).max(1) * self.first, 0)
        self._land()
        length = len(self.k)
        self.asked = q if self.asked is None else self.asked
        logits = self._logits(q)
        here = np.arange(self.first, length)
        on_gpu = softmax(logits[..., here]).max(1)  # [H, tokens of the window]
        first_step, self.steps = self.steps == 0, self.steps + 1
        older = np.arange(self.first)
        out = []
        for head, kept in enumerate(self.kept):
            on_cpu = older if self.waits else np.array(list(kept), int)
            tokens = np.concatenate([on_cpu, here])
            out.append(softmax(logits[head][:, tokens]) @ self.v[tokens, head])
        self.known = None if first_step else (self.maw_first, self.maw)
        self._average(on_gpu, first_step)
        return np.concatenate(out)

    def _logits(self, q):
        q = np.asarray(q, np.float64).reshape(self.k.shape[1], -1, self.k.shape[2])
        return np.einsum("hgd,thd->hgt", q, self.k) * self.scale

    def _salient(self, salience, first):
        """Tokens per head above beta, with their salience ``[H, n]``; of tokens from ``first`` on."""
        close = np.abs(salience - self.beta) < 1e-6 * self.beta
        self.near += [(int(h), int(t) + first) for h, t in zip(*close.nonzero(), strict=True)]
        tokens = [(row > self.beta).nonzero()[0] for row in salience]
        return [
            dict(zip((at + first).tolist(), row[at], strict=True))
            for at, row in zip(tokens, salience, strict=True)
        ]

    def _evict(self):
        first = self._first(len(self.k))
        if first == self.first:
            return
        block = np.arange(self.first, first)
        if self.known is None:
            self.waits = True
        else:
            began, maw = self.known
            leaving = self._salient(maw[:, block - began] * self.window, self.first)
            self._keep(leaving) if not self.waits else self.since.append(leaving)
        self.first = first

    def _land(self):
        if self.evaluated is None or self.steps < self.lands_after:
            return
        for tokens in (self.evaluated, *self.since):
            self._keep(tokens)
        self.waits, self.evaluated, self.since = False, None, []

    def _keep(self, tokens):
        for head, more in enumerate(tokens):
            every = sorted((self.kept[head] | more).items(), key=lambda item: -item[1])
            kept = dict(every[: self.cap])
            self.dropped += len(self.kept[head].keys() - kept.keys())
            if len(kept) < len(every):
                last, first_out = every[self.cap - 1][1], every[self.cap][1]
                self.near += [(head, self.cap)] if last - first_out < 1e-6 * last else []
            self.kept[head] = kept

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
