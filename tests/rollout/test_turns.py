"""Answers of several turns: masks, budgets, order, and where a sample is at each moment. The engine is the real one; the reward service too."""

from pathlib import Path

import numpy as np
import pytest
import torch

from areal_hpc.config import Data, Environment, Reward
from areal_hpc.data.datasets import load_problems
from areal_hpc.data.prompts import Prompts
from areal_hpc.models import hf
from areal_hpc.models.decoder import DecoderConfig, Packed
from areal_hpc.models.tokenizer import build
from areal_hpc.reward.service import RewardService
from areal_hpc.rollout.engines.base import Request
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.engines.sampling import stream_key
from areal_hpc.rollout.turns import Turns
from areal_hpc.transport.samples import ENVIRONMENT_MARK, MODEL_MARK
from areal_hpc.transport.trajectory import Status

DATA = Data(size=60, max_terms=3, max_digits=1)
MAX_NEW_TOKENS = 40
REPLY = "+1\n"


class World:
    """One rank without MPI: a random model that stops now and then, and an environment of tests/reward/graders.py."""

    def __init__(self, environment, *, in_order=False, num_running=8, max_new_tokens=MAX_NEW_TOKENS):
        self.problems = load_problems(DATA)
        self.tokenizer = build(self.problems, DATA.suffix)
        config = DecoderConfig(
            model_type="qwen2",
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=True,
            max_position_embeddings=128,
            eos_token_id=self.tokenizer.eos_token_id,
            initializer_range=0.15,
        )
        self.decoder = hf.build_random(config, seed=1)
        self.stops = [self.tokenizer.eos_token_id, *self.tokenizer.encode("02468")]  # so many that a random model ends a turn every ten tokens or so
        self.engine = EmbeddedEngine(config, max_num_running=num_running, max_context_tokens=100, stop_tokens=self.stops)
        self.engine.update_weights(self.decoder.named_parameters(), 3)
        self.rewards = RewardService.start()
        self.settings = Environment(name=environment, max_turns=3)
        self.rewards.configure(DATA, Reward(), environment=self.settings)
        assert self.rewards.wait_ready(60)
        self.max_new_tokens = max_new_tokens
        self.prompts = Prompts(DATA, self.tokenizer)
        self.turns = Turns(self.settings, self.engine, self.rewards, self.tokenizer, self.prompts, in_order=in_order)

    def start(self, num):
        for sample in range(num):
            prompt_P = self.prompts.tokens(self.problems.train[sample])
            self.turns.add([Request(request_id=sample, prompt_tokens=prompt_P, stream=stream_key(0, sample, 0), max_new_tokens=self.max_new_tokens)])

    def run(self):
        """{request id: (answer, verdict)} when all have ended."""
        found, batches = {}, []
        while self.engine.num_running + self.engine.num_waiting + self.rewards.num_pending:
            if not self.turns.must_wait:
                batches.append(sorted(self.engine.running()))
                for completion in self.engine.step():
                    self.turns.ended(completion, completion.request_id, "train")
            idle = self.turns.must_wait or not self.engine.num_running + self.engine.num_waiting
            assert self.turns.num_away + self.engine.num_running + self.engine.num_waiting <= len(batches[0])
            found |= {verdict.job_id: (answer, verdict) for answer, verdict in self.turns.poll(1.0 if idle else 0.0)}
        return found, batches


@pytest.fixture
def world(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])  # graders are imported from the working folder
    made = []

    def make(*args, **options):
        made.append(World(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.rewards.close()


def check_answer(world, answer):
    """Columns, mask, texts and tokens say the same."""
    assert len(answer.tokens_R) == len(answer.logprobs_R) == len(answer.versions_R) == len(answer.loss_mask_R) <= world.max_new_tokens
    borders = np.flatnonzero(np.diff(answer.loss_mask_R.astype(int))) + 1
    parts = np.split(np.arange(len(answer.tokens_R)), borders)
    assert len(parts) == len(answer.turns)
    for number, (places, text) in enumerate(zip(parts, answer.turns, strict=True)):
        is_model = number % 2 == 0
        assert (answer.loss_mask_R[places] == is_model).all()
        assert world.tokenizer.decode(answer.tokens_R[places]) == text
        stops = np.isin(answer.tokens_R[places], world.stops)
        if is_model:
            assert (answer.logprobs_R[places] < 0).all()
            assert not stops[:-1].any() and (stops[-1] or number == len(parts) - 1)
        else:
            assert (answer.logprobs_R[places] == 0).all() and (answer.versions_R[places] == answer.versions_R[places[0] - 1]).all()


def test_without_an_environment_an_answer_is_one_turn(world):
    here = world("")
    here.start(12)
    found, _ = here.run()
    assert len(found) == 12
    for answer, _ in found.values():
        assert answer.num_turns == 1 and answer.loss_mask_R.all() and answer.text == answer.turns[0]
        check_answer(here, answer)


def test_every_turn_is_replied_to_up_to_the_last(world):
    here = world("tests.reward.graders:always")
    here.start(30)
    found, _ = here.run()
    assert len(found) == 30
    numbers = [answer.num_turns for answer, _ in found.values()]
    assert max(numbers) == 3 > min(numbers)
    ends = set()
    for answer, verdict in found.values():
        check_answer(here, answer)
        for text in answer.turns[1:-1:2]:
            assert text == REPLY
        if len(answer.turns) % 2 == 0:  # the reply did not fit
            assert answer.truncated and len(answer.tokens_R) == MAX_NEW_TOKENS and REPLY.startswith(answer.turns[-1])
            ends.add("cut reply")
        elif len(answer.tokens_R) == MAX_NEW_TOKENS and answer.truncated:
            ends.add("cut turn")
        else:
            assert not answer.truncated and answer.num_turns == 3
            ends.add("last turn")
        assert answer.text.count(ENVIRONMENT_MARK) == answer.text.count(MODEL_MARK) == len(answer.turns) // 2
        assert verdict.status in (Status.WRONG, Status.NO_ANSWER, Status.TRUNCATED, Status.RIGHT)
    assert ends >= {"cut turn", "last turn"}
    assert here.rewards.metrics["replies"] >= sum(number - 1 for number in numbers)


def test_log_probabilities_are_those_of_the_whole_conversation(world):
    """At the model's tokens the trainer's decoder, reading prompt, turns and replies, finds what the engine recorded over several admissions."""
    here = world("tests.reward.graders:always")
    here.start(30)
    found, _ = here.run()
    several = [(request_id, answer) for request_id, (answer, _) in found.items() if answer.num_turns > 1]
    assert len(several) > 5
    prompts = [here.prompts.tokens(here.problems.train[request_id]) for request_id, _ in several]
    sequences = [np.concatenate([prompt_P, answer.tokens_R]) for prompt_P, (_, answer) in zip(prompts, several, strict=True)]
    packed = Packed.build(sequences, [len(prompt_P) for prompt_P in prompts], masks=[answer.loss_mask_R for _, answer in several])
    with torch.no_grad():
        theirs = here.decoder(packed).logprobs_M.numpy()
    np.testing.assert_allclose(np.concatenate([answer.logprobs_R[answer.loss_mask_R] for _, answer in several]), theirs, atol=2e-5)


def test_replies_in_the_order_of_ids_make_the_same_batches(world):
    """The slower a turn's environment the smaller its id: without `in_order` samples would come back in the reverse order."""
    runs = []
    for _ in range(2):
        here = world("tests.reward.graders:slow_for_some", in_order=True)
        here.start(16)
        runs.append(here.run())
    (first, first_batches), (second, second_batches) = runs
    first_batches, second_batches = (
        list(filter(None, batches)) for batches in (first_batches, second_batches)
    )  # a step of nobody, while graders are at work, is no batch
    assert first_batches == second_batches
    for request_id, (answer, _) in first.items():
        assert (answer.tokens_R == second[request_id][0].tokens_R).all() and (answer.logprobs_R == second[request_id][0].logprobs_R).all()
    assert any(answer.num_turns > 1 for answer, _ in first.values())


def test_a_dropped_sample_leaves_nothing_wherever_it_is(world):
    here = world("tests.reward.graders:slow_for_some")
    here.start(16)
    while here.turns.num_away < 2:
        for completion in here.engine.step():
            here.turns.ended(completion, completion.request_id, "train")
    here.turns.drop(range(16))
    assert (here.turns.num_away, here.engine.num_running, here.engine.num_waiting) == (0, 0, 0)
    while here.rewards.num_pending:
        assert here.turns.poll(1.0) == []
    assert (here.turns.num_away, here.engine.num_running, here.engine.num_waiting) == (0, 0, 0)
    here.start(2)  # the ids are free again
    assert len(here.run()[0]) == 2
