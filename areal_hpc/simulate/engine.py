"""A generation rank's engine with a clock instead of a device: continuous batching, KV capacity, interruption, in closed form between two events.

State at a *boundary* (between two decode steps): n running sequences, C context tokens, Q the sum of their squared lengths. k undisturbed steps later

    C' = C + k n        Q' = Q + 2 k C + k^2 n        time' = time + decode_seconds(n, C, k)

so time passes in jumps to the next boundary at which something happens: a sequence finishes, the KV cache fills up, or the outside world has news.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from areal_hpc.simulate.costs import DecodeCost

NEVER = 2**62
"""Steps until something that does not happen."""
WATERMARK = 0.01
"""Share of the KV cache kept free when sequences are admitted, so that running ones can grow (vLLM's `watermark`)."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making."""

    ticket: int
    prompt: int
    """Tokens of its prompt."""
    remaining: int
    """Answer tokens still to sample, counted at its last admission."""
    context: int
    """Tokens in the KV cache at its last admission."""
    admitted_step: int = -1
    """Step of the engine at that admission; -1 while it waits."""


@dataclass(slots=True)
class Seconds:
    """Where the time of an engine went."""

    decode: float = 0.0
    prefill: float = 0.0
    """Prompts, and sequences that had lost their place in the KV cache."""
    recompute: float = 0.0
    """KV cache after new weights."""
    swap: float = 0.0
    """Loading weights, or standing still for their transfer."""
    idle: float = 0.0
    """Nothing to decode: at the gate, or draining."""


@dataclass(slots=True)
class Engine:
    """Lifecycle: `add` sequences, `admit`, then `advance` to the boundary that `steps_to_event` names, and again.

    Trap: C and Q are those of the last boundary; between two events only `advance` keeps them true.
    """

    cost: DecodeCost
    clock_s: float = 0.0
    """Time of the last boundary."""
    step: int = 0
    """Decode steps done."""
    num_running: int = 0
    context: int = 0
    """C: tokens of all running sequences."""
    squares: int = 0
    """Q: their squared lengths, summed."""
    waiting: deque[Sequence] = field(default_factory=deque)
    """Added, without a place in the KV cache."""
    num_tokens: int = 0
    """Tokens decoded."""
    num_prefilled: int = 0
    """Tokens whose KV was computed at admission."""
    num_recomputed: int = 0
    """Tokens whose KV was computed anew after new weights."""
    num_preempted: int = 0
    """Times that a sequence had to leave a full KV cache."""
    seconds: Seconds = field(default_factory=Seconds)
    _finish: list[tuple[int, int, Sequence]] = field(default_factory=list)
    """Heap of (step at whose boundary it is done, serial number, sequence)."""
    _order: list[Sequence] = field(default_factory=list)
    """Running sequences by admission, the latest last; finished ones leave lazily."""
    _serial: int = 0

    @property
    def busy(self) -> bool:
        """There is something to decode."""
        return self.num_running > 0

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences."""
        self.waiting.extend(sequences)

    def admit(self) -> list[Sequence]:
        """Give waiting sequences, first come first served, a place in the KV cache and compute their prefixes; returns those admitted for the first time.

        A prompt is computed once for the sequences of a ticket that are admitted together.
        """
        first: list[Sequence] = []
        tokens = squares = 0
        prompt_of, limit = -1, self.cost.kv_tokens * (1 - WATERMARK)
        while self.waiting and self.num_running < self.cost.max_num_running:
            sequence = self.waiting[0]
            if self.num_running and self.context + sequence.context > limit:
                break
            self.waiting.popleft()
            fresh = sequence.context == sequence.prompt
            if not fresh or sequence.ticket != prompt_of:
                tokens += sequence.context
                squares += sequence.context * sequence.context
            if fresh:
                prompt_of = sequence.ticket
            if sequence.admitted_step < 0:
                first.append(sequence)
            self._run(sequence)
        if tokens:
            self.num_prefilled += tokens
            spent_s = self.cost.prefill_seconds(tokens, squares)
            self.seconds.prefill += spent_s
            self.clock_s += spent_s
        return first

    def _run(self, sequence: Sequence) -> None:
        sequence.admitted_step = self.step
        self.num_running += 1
        self.context += sequence.context
        self.squares += sequence.context * sequence.context
        self._serial += 1
        heapq.heappush(self._finish, (self.step + sequence.remaining, self._serial, sequence))
        self._order.append(sequence)

    def steps_to_event(self) -> int:
        """Steps until a sequence finishes or the KV cache overflows, `NEVER` without running sequences."""
        if not self.num_running:
            return NEVER
        steps = self._finish[0][0] - self.step
        room = self.cost.kv_tokens - self.context
        if steps * self.num_running > room and self.num_running > 1:
            steps = min(steps, max(1, int(room // self.num_running) + 1))
        return steps

    def advance(self, steps: int, spent_s: float) -> list[Sequence]:
        """Decode `steps` steps, at most `steps_to_event()`, in `spent_s` seconds (`decode_seconds`); returns the sequences that are done.

        Where the KV cache has overflowed, the sequences admitted last leave it.
        """
        if steps:
            num = self.num_running
            self.squares += 2 * steps * self.context + steps * steps * num
            self.context += steps * num
            self.num_tokens += steps * num
            self.step += steps
            self.clock_s += spent_s
            self.seconds.decode += spent_s
        done = []
        while self._finish and self._finish[0][0] == self.step:
            sequence = heapq.heappop(self._finish)[2]
            length = sequence.context + sequence.remaining
            self.num_running -= 1
            self.context -= length
            self.squares -= length * length
            sequence.remaining = 0
            done.append(sequence)
        if self.context > self.cost.kv_tokens:
            self._preempt()
        elif len(self._order) > 2 * self.num_running + 16:
            self._order = [sequence for sequence in self._order if sequence.remaining]
        return done

    def _preempt(self) -> None:
        """The sequences admitted last leave until the others fit; they wait at the head of the queue."""
        gone: set[int] = set()
        while self.context > self.cost.kv_tokens and self.num_running > 1:
            sequence = self._order.pop()
            if not sequence.remaining:
                continue
            produced = self.step - sequence.admitted_step
            length = sequence.context + produced
            self.num_running -= 1
            self.context -= length
            self.squares -= length * length
            sequence.context, sequence.remaining = length, sequence.remaining - produced
            gone.add(id(sequence))
            self.waiting.appendleft(sequence)
            self.num_preempted += 1
        if gone:
            self._finish = [item for item in self._finish if id(item[2]) not in gone]
            heapq.heapify(self._finish)

    def idle_until(self, time_s: float) -> None:
        """Let time pass without decoding."""
        if time_s > self.clock_s:
            self.seconds.idle += time_s - self.clock_s
            self.clock_s = time_s

    def pause(self, seconds: float) -> None:
        """Stand still for weights."""
        self.seconds.swap += seconds
        self.clock_s += seconds

    def recompute(self) -> None:
        """Compute the KV cache of all running sequences anew."""
        spent_s = self.cost.prefill_seconds(self.context, self.squares)
        self.num_recomputed += self.context
        self.seconds.recompute += spent_s
        self.clock_s += spent_s
