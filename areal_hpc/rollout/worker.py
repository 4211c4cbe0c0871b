"""The loop of a generation rank: lease tickets, decode, grade, push into the ring; take new weights between two steps.

consumes        ticket leases (generation rank 0), new weights (all training ranks), verdicts (its reward service)
produces        groups in its ring lane; its file of each checkpoint; STARTED, CONFIRM, SWAPPED, EVALUATED, SAMPLES, SAVED and OBSERVED messages
waits for       the gate (no ticket may start) or a full ring; never for a busy trainer
unblocked by    a raised ticket limit; the training rank that empties the lane
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from areal_hpc.config import Config
from areal_hpc.data.datasets import Problems
from areal_hpc.data.prompts import Prompts
from areal_hpc.data.tickets import Tickets
from areal_hpc.intervals import IntervalSet
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.observe.state import process_state
from areal_hpc.observe.timeline import Phases
from areal_hpc.reward.service import RewardService, Verdict
from areal_hpc.rollout.engines.base import Completion, Engine
from areal_hpc.rollout.evaluate import EVALUATION_IDS, EvaluationInProgress, evaluation_requests
from areal_hpc.rollout.groups import GroupInProgress, training_request
from areal_hpc.rollout.leases import Dispatcher, Leases
from areal_hpc.rollout.snapshot import Snapshots, take_up
from areal_hpc.rollout.tape import NoTape
from areal_hpc.rollout.turns import Answer, Turns
from areal_hpc.signals import StopFlag
from areal_hpc.topology import World
from areal_hpc.transport.cut import UnfinishedGroup
from areal_hpc.transport.lanes import Outgoing
from areal_hpc.transport.messages import Mailbox, Message, Tag
from areal_hpc.transport.samples import is_saved, pieces
from areal_hpc.transport.trajectory import GRADED, Group, Status, group_bytes, write_group
from areal_hpc.transport.weights import Announcement, Receiver

IDLE_S = 0.0005
"""Sleep when there is nothing to do: ranks may share cores."""
REPORT_EVERY_S = 1.0
MAX_OUTBOX = 2
"""Finished groups that may wait for room in the ring before decoding stops."""


@dataclass(slots=True)
class RolloutWorker:
    """State of a generation rank; `run` is the loop."""

    config: Config
    world: World
    engine: Engine
    receiver: Receiver
    lane: Outgoing
    rewards: RewardService
    problems: Problems
    tokenizer: Tokenizer
    mailbox: Mailbox
    phases: Phases
    stop: StopFlag
    tape: NoTape = field(default_factory=NoTape)
    """Where this rank writes down what it does; in a replay, what decides when it does it."""
    ticket_limit: int = 0
    limit_version: int = -1
    stopped: bool = False
    final: bool = False
    """The last version is here: no more training groups."""
    num_tokens: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    evaluation: EvaluationInProgress | None = None
    groups: dict[int, GroupInProgress] = field(default_factory=dict)
    outbox: deque[Group] = field(default_factory=deque)
    turns: Turns = field(init=False)
    """Every sample between its first token and its verdict."""
    snapshots: Snapshots = field(default_factory=Snapshots)
    resumed: list[UnfinishedGroup] = field(default_factory=list)
    """Of the checkpoint that the run goes on from; taken up with the first weights."""
    known: IntervalSet = field(default_factory=IntervalSet)
    """Tickets that may not be granted again: those of the checkpoint that the run goes on from."""
    leases: Leases = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    _tickets: Tickets = field(init=False)
    _prompts: Prompts = field(init=False)
    _unreported: list[int] = field(default_factory=list)
    _graded: Counter[Status] = field(default_factory=Counter)
    _reported_at: float = 0.0
    _told_signal: bool = False
    _is_draining: bool = False

    def __post_init__(self) -> None:
        self.leases = Leases(self.world.role_rank, self.world.num_generation, static=self.config.staleness.eta == 0, known=self.known)
        self.dispatcher = Dispatcher(self.known, num_ranks=self.world.num_generation)
        self._tickets = Tickets(len(self.problems.train), self.config.seed)
        self._prompts = Prompts(self.config.data, self.tokenizer)
        self.turns = Turns(self.config.environment, self.engine, self.rewards, self.tokenizer, self._prompts, in_order=self.leases.static)

    @property
    def trainer(self) -> int:
        """World rank of training rank 0."""
        return self.world.training_ranks[0]

    def run(self) -> None:
        """Until training rank 0 says stop."""
        while not self.stopped:
            self.read_messages()
            self.take_new_weights()
            self.lease_tickets()
            self.admit()
            self.decode_one_step()
            self.collect_verdicts()
            self.push_finished()
            self.lane.progress()
            self.tell_saved()
            self.report()
        self.report(final=True)

    # -- messages and weights --------------------------------------------------------------------------------------

    def read_messages(self) -> None:
        """Act on what has come in."""
        for message in self.mailbox.poll():
            self._read(message)

    def _read(self, message: Message) -> None:
        if message.tag == Tag.VERSION:
            self.receiver.begin(message.body)
        elif message.tag == Tag.BUCKET:
            self.receiver.accept(*message.body)
        elif message.tag == Tag.LIMIT:
            self._raise_limit(*message.body)
        elif message.tag == Tag.WANT:
            self.dispatcher.want(message.source, message.body)
        elif message.tag == Tag.LEASE:
            self.leases.receive(message.body)
            self.tape.leased(message.body)
        elif message.tag == Tag.SNAPSHOT:
            self.snapshots.take(self, *message.body)
        elif message.tag == Tag.STOP:
            self.stopped = True
        else:
            raise RuntimeError(f"unexpected {message.tag.name} message from {self.world.name_of(message.source)}")

    def _raise_limit(self, version: int, ticket_limit: int) -> None:
        if version >= self.limit_version:
            self.limit_version, self.ticket_limit = version, max(ticket_limit, self.ticket_limit)
        self.leases.raise_limit(ticket_limit, version)

    def take_new_weights(self) -> None:
        """Confirm what is received; between two steps, swap to it, unless an evaluation needs the weights in use."""
        if self.receiver.poll(busy=self.engine.num_running > 0, hold=self.evaluation is not None):
            assert self.receiver.staged is not None
            body = (self.receiver.staged.version, self.receiver.receive_s, self.receiver.stage_s, self.receiver.is_staged)
            self.mailbox.post(self.trainer, Tag.CONFIRM, body)
        while self.receiver.damaged:
            self.mailbox.post(self.trainer, Tag.DAMAGED, self.receiver.damaged.pop())
        staged = self.receiver.staged
        if staged is None or staged.version <= self.engine.policy_version or self.evaluation is not None or not self.tape.swap_due(staged.version):
            return
        if self._must_drain(staged):
            return
        with self.phases("swap"):
            if staged.final:
                self._abandon_training()
            pause_s = self.receiver.swap()
            self.tape.swapped(staged.version)
        self.mailbox.post(self.trainer, Tag.SWAPPED, (staged.version, pause_s))
        self._raise_limit(staged.version, staged.ticket_limit)
        self._take_up_resumed()
        if staged.evaluate:
            self._begin_evaluation(staged.version)

    def _must_drain(self, staged: Announcement) -> bool:
        """New weights wait for the answers that run to end, and no other begins until then, also if the next version begins to arrive meanwhile."""
        running = self.engine.num_running + self.engine.num_waiting + self.turns.num_away
        self._is_draining = self.config.generation.on_update == "drain" and running > 0 and not staged.final
        return self._is_draining

    def _take_up_resumed(self) -> None:
        """The first weights are here: go on with what was on its way when the run was cut."""
        groups, self.resumed = self.resumed, []
        for group in groups if not self.final else []:
            index = self._tickets.problem_index(group.ticket)
            take_up(self, group, index, self._prompts.tokens(self.problems.train[index]))
            self.counters["resumed_groups"] += 1

    def _abandon_training(self) -> None:
        """The last version came: sequences still running belong to no batch."""
        self.final = True
        size = self.config.train.group_size
        self.turns.drop([ticket * size + sample for ticket in self.groups for sample in range(size)])
        self.counters["unfinished_groups"] += len(self.groups) + len(self.outbox) + len(self.resumed)
        for ticket in [*self.groups, *(group.ticket for group in self.outbox)]:
            self.lane.producer.cancel(ticket)
        self.groups.clear()
        self.outbox.clear()

    # -- admission -------------------------------------------------------------------------------------------------

    @property
    def _num_free_groups(self) -> int:
        free = self.engine.max_num_running - self.engine.num_running - self.engine.num_waiting - self.turns.num_away
        return max(0, -(-free // self.config.train.group_size))

    def lease_tickets(self) -> None:
        """Ask for tickets one block ahead; generation rank 0 grants what the limit allows."""
        dispatcher_rank = self.world.generation_ranks[0]
        count = 0 if self.final else self.leases.num_to_ask(self._num_free_groups)
        if count and self.world.world_rank == dispatcher_rank:
            self.dispatcher.want(dispatcher_rank, count)
        elif count:
            self.mailbox.post(dispatcher_rank, Tag.WANT, count)
        if self.world.world_rank != dispatcher_rank or self.leases.static:
            return
        for rank, grant in self.dispatcher.grants(self.ticket_limit, self.limit_version):
            if rank == dispatcher_rank:
                self.leases.receive(grant)
                self.tape.leased(grant)
            else:
                self.mailbox.post(rank, Tag.LEASE, grant)

    def admit(self) -> None:
        """Hand leased tickets to the engine while it has a free slot and the outbox is not jammed."""
        while not self.final and not self.turns.must_wait and self._num_free_groups and not self._jammed and not self._is_draining:
            ticket = self.leases.take(self.engine.policy_version)
            if ticket is None:
                return
            self._admit(ticket)

    @property
    def _jammed(self) -> bool:
        """Too many finished groups wait for room in the ring."""
        return len(self.outbox) > MAX_OUTBOX and self.tape.bounded_outbox

    def _admit(self, ticket: int) -> None:
        index = self._tickets.problem_index(ticket)
        size = self.config.train.group_size
        prompt_P = self._prompts.tokens(self.problems.train[index])
        self.groups[ticket] = GroupInProgress(ticket, index, prompt_P, size)
        self.lane.producer.begin(ticket)
        self._unreported.append(ticket)
        self.counters["admitted_groups"] += 1
        self.turns.add([training_request(self.config, ticket, sample, prompt_P) for sample in range(size)])

    # -- decoding --------------------------------------------------------------------------------------------------

    def decode_one_step(self) -> None:
        """One token for every running sequence; a turn that ended goes to the reward service."""
        if self.receiver.holds_decoding:
            self.phases.enter("swap", "the rest of a version that replaces the weights in use")
            time.sleep(IDLE_S)
            return
        if not self.tape.step_due():
            self.phases.enter("gated", "the next call of the tape")
            return
        if self._jammed and self.evaluation is None and not self._is_draining:  # training may wait for the evaluation, or the swap, before it empties the lane
            self.phases.enter("ring_full", "room in its lane")
            time.sleep(IDLE_S)
            return
        if self.engine.num_running + self.engine.num_waiting == 0 or self.turns.must_wait:
            self.phases.enter("idle", "verdicts of its reward service") if self.groups else self.phases.enter("gated", "a ticket that may start")
            time.sleep(IDLE_S)
            return
        self.phases.enter("evaluate" if self.evaluation else "decode")
        finished = self.engine.step()
        self.num_tokens += self.engine.num_running + len(finished)
        for completion in finished:
            self._end_turn(completion)
        self._report_starts()

    def _end_turn(self, completion: Completion) -> None:
        if completion.request_id >= EVALUATION_IDS:
            assert self.evaluation is not None
            index = self.evaluation.problem_of(completion.request_id)
            self.turns.ended(completion, self.problems.position("heldout", index), "heldout")
            return
        group = self.groups[completion.request_id // self.config.train.group_size]
        if group.start_version is None:
            self._report_start(group, int(completion.versions_R[0]))
        self.turns.ended(completion, self.problems.position("train", group.problem_index), "train")

    def _report_starts(self) -> None:
        """Tell training rank 0 the start version of groups whose first sample has a token (FIFO: sample 0 starts first)."""
        for ticket in self._unreported:
            group = self.groups.get(ticket)
            if group is not None and group.start_version is None:
                version = self.engine.first_version(ticket * group.size)
                if version is None:
                    break
                self._report_start(group, version)
        self._unreported = [ticket for ticket in self._unreported if ticket in self.groups and self.groups[ticket].start_version is None]

    def _report_start(self, group: GroupInProgress, version: int) -> None:
        group.start_version = version
        if self.config.staleness.mode == "dropless":  # the only mode whose composition depends on running groups
            self.mailbox.post(self.trainer, Tag.STARTED, (group.ticket, version))

    # -- grading and the ring --------------------------------------------------------------------------------------

    def collect_verdicts(self) -> None:
        """Take verdicts; groups that are complete move to the outbox, in the order of their completion. Answers that an environment replied to go on."""
        for answer, verdict in self.turns.poll():
            self._graded[verdict.status] += 1
            if verdict.job_id >= EVALUATION_IDS:
                self._collect_evaluation(answer, verdict)
                continue
            ticket, sample = divmod(verdict.job_id, self.config.train.group_size)
            group = self.groups[ticket]
            group.completions[sample] = (answer, answer.ended_at)
            group.verdicts[sample] = (verdict, time.monotonic())
            if is_saved(ticket, self.config):
                group.texts[sample] = answer.text
            if group.complete:
                for piece in pieces("training", ticket, group.saved_answers()):
                    self.mailbox.post(self.trainer, Tag.SAMPLES, piece)
                self.outbox.append(self.groups.pop(ticket).to_group(self.config.reward))
        self._check_failure_rate()

    def _check_failure_rate(self) -> None:
        total = self._graded.total()
        failed = sum(count for status, count in self._graded.items() if status not in GRADED)
        limit = self.config.reward.max_failure_rate
        if total >= 50 and failed > limit * total:
            kinds = ", ".join(f"{count} {status.name}" for status, count in self._graded.items() if status not in GRADED)
            raise RuntimeError(f"{failed} of {total} answers could not be graded ({kinds}): more than reward.max_failure_rate={limit:g}")

    def push_finished(self) -> None:
        """Write finished groups into the ring as long as it has room; before them the marker of a checkpoint whose copy they are part of."""
        while self.snapshots.push_marker(self.lane.producer) and self.outbox:
            group = self.outbox[0]
            slot = self.lane.producer.try_reserve(group_bytes(group))
            if slot is None:
                return
            versions = [t.versions_R for t in group.trajectories]
            with slot:
                write_group(group, slot.buffer)
                slot.commit(
                    ticket=group.ticket,
                    version_min=min(int(v.min()) for v in versions),
                    version_max=max(int(v.max()) for v in versions),
                    num_tokens=group.num_tokens,
                    num_samples=len(group.trajectories),
                )
            self.outbox.popleft()
            self.counters["pushed_groups"] += 1

    def tell_saved(self) -> None:
        """This rank's part of a checkpoint is done."""
        if (saved := self.snapshots.poll()) is not None:
            self.mailbox.post(self.trainer, Tag.SAVED, saved)

    # -- evaluation and reports ------------------------------------------------------------------------------------

    def _begin_evaluation(self, version: int) -> None:
        held_out = self.problems.heldout[: self.config.evaluation.num_problems]
        mine = list(range(self.world.role_rank, len(held_out), self.world.num_generation))
        self.evaluation = EvaluationInProgress.of(self.config, version, mine)
        for index in mine:
            self.turns.add(evaluation_requests(self.config, held_out[index], index, self._prompts))
        self._finish_evaluation()  # a rank without a share reports at once

    def _collect_evaluation(self, answer: Answer, verdict: Verdict) -> None:
        assert self.evaluation is not None
        self.evaluation.graded(answer, verdict, self.problems.heldout)
        self._finish_evaluation()

    def _finish_evaluation(self) -> None:
        if self.evaluation is not None and self.evaluation.complete:
            for piece in pieces("evaluation", self.evaluation.version, self.evaluation.saved_answers()):
                self.mailbox.post(self.trainer, Tag.SAMPLES, piece)
            self.mailbox.post(self.trainer, Tag.EVALUATED, self.evaluation.share())
            self.evaluation = None

    def report(self, final: bool = False) -> None:
        """Phases and counters for the log, about once a second."""
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY_S and not final:
            return
        self._reported_at = now
        if self.stop.requested and not self._told_signal:
            self._told_signal = True
            self.mailbox.post(self.trainer, Tag.SIGNALLED, self.stop.signal_name)
        if not self.stopped:
            self.lane.check()  # at the gate nothing is written, and a dead training rank would go unnoticed
        if final:
            self.counters["unfinished_groups"] += len(self.groups) + len(self.outbox) + len(self.resumed)
        body = {
            "phases": self.phases.drain(),
            "tokens": self.num_tokens,
            "prefill_tokens": getattr(getattr(self.engine, "engine", self.engine), "num_prefill_tokens", 0),  # behind a tape; not every engine counts
            "running": self.engine.num_running,
            "queued": self.engine.num_waiting,
            "waiting": len(self.leases) + len(self.outbox),
            **process_state(self.phases),
            "grading": self.rewards.row(),
            "final": final,
            "counters": dict(self.counters + self.rewards.metrics),
        }
        self.mailbox.post(self.trainer, Tag.OBSERVED, body)
