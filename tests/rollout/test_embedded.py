"""The embedded engine against transformers: log-probabilities under the stamped versions, across swaps; nothing lost under load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.rollout.engines.base import Begun, Completion, Request
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.engines.sampling import stream_key, uniforms
from tests.models.tiny import ARCHITECTURES, VOCAB_SIZE, reference_model, weights_of

NAME = "qwen2-tied"
NUM_WEIGHTS = 4


@cache
def weights_number(name: str, seed: int) -> transformers.PreTrainedModel:
    return reference_model(name, seed)


def reference(name: str, version: int = 0) -> transformers.PreTrainedModel:
    return weights_number(name, version % NUM_WEIGHTS)


def config_of(name: str) -> DecoderConfig:
    return DecoderConfig.from_hf(reference(name).config.to_dict())


def make_engine(name: str = NAME, *, slots: int = 8, kv: str = "recompute", stop_tokens: Sequence[int] = (), version: int = 0, **options) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        config_of(name),
        max_num_running=slots,
        max_context_tokens=options.pop("max_context_tokens", 96),
        stop_tokens=stop_tokens,
        kv_on_update=kv,
        **options,  # type: ignore[arg-type]
    )
    engine.update_weights(weights_of(reference(name, version)), version)
    return engine


def group(ticket: int, num: int, *, prompt_length: int = 7, max_new: int = 24, temperature: float = 1.0) -> list[Request]:
    prompt = np.random.default_rng(ticket).integers(0, VOCAB_SIZE, prompt_length, dtype=np.int32)
    return [
        Request(
            request_id=100 * ticket + sample,
            prompt_tokens=prompt,
            stream=stream_key(0, ticket, sample),
            max_new_tokens=max_new,
            temperature=temperature,
        )
        for sample in range(num)
    ]


def run(engine: EmbeddedEngine, after_step: Callable[[int], None] = lambda step: None) -> dict[int, Completion]:
    """Step until nothing is left; every answer must come back once."""
    finished: dict[int, Completion] = {}
    for step in range(10_000):
        for done in engine.step():
            assert done.request_id not in finished
            finished[done.request_id] = done
        if not engine.num_running and not engine.num_waiting:
            return finished
        after_step(step)
    raise AssertionError("the engine does not come to an end")


@torch.no_grad()
def expected_logprobs(name: str, request: Request, done: Completion, kv: str) -> np.ndarray:
    """Teacher-forced transformers under each token's stamped version (weights repeat every `NUM_WEIGHTS` versions).

    `keep`: the cache goes on as older versions wrote it.
    """
    tokens_T = torch.from_numpy(np.concatenate([request.prompt_tokens, done.tokens_R]).astype(np.int64))
    num_prompt = len(request.prompt_tokens)
    divisor = request.temperature or 1.0

    def scored(logits_TV: torch.Tensor, positions: slice) -> torch.Tensor:
        return torch.log_softmax(logits_TV / divisor, -1).gather(1, tokens_T[positions, None]).squeeze(1)

    if kv == "recompute":
        by_version = {
            version: scored(reference(name, version)(tokens_T[None]).logits[0, num_prompt - 1 : -1], slice(num_prompt, None))
            for version in set(done.versions_R.tolist())
        }
        return np.array([by_version[int(version)][t] for t, version in enumerate(done.versions_R)], np.float32)
    cached, logits, start = transformers.DynamicCache(), [], 0
    for version in np.unique(done.versions_R):  # versions only rise: one stretch each, the prompt belongs to the first
        stop = num_prompt + int(np.searchsorted(done.versions_R, version, side="right")) - 1
        logits.append(reference(name, int(version))(tokens_T[None, start:stop], past_key_values=cached).logits[0])
        start = stop
    return scored(torch.cat(logits)[num_prompt - 1 :], slice(num_prompt, None)).numpy()


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_teacher_forcing_across_two_swaps(name: str, kv: str) -> None:
    engine = make_engine(name, kv=kv, slots=6)
    groups = [group(0, 4), group(1, 4, prompt_length=1), group(2, 3, prompt_length=15, max_new=30, temperature=0.7)]
    for requests in groups:
        engine.add(requests)

    def swap(step: int) -> None:
        if step in (7, 15):
            version = engine.policy_version + 1
            engine.update_weights(weights_of(reference(name, version)), version)

    finished = run(engine, swap)
    assert len(finished) == 11
    assert {tuple(np.unique(done.versions_R)) for done in finished.values()} >= {(0, 1, 2), (2,)}
    for request in (request for requests in groups for request in requests):
        done = finished[request.request_id]
        assert len(done.tokens_R) == request.max_new_tokens and done.finish == "length"
        np.testing.assert_allclose(done.logprobs_R, expected_logprobs(name, request, done, kv), atol=1e-4, rtol=0)


def test_the_two_cache_policies_differ() -> None:
    """Guards the test above: under these weights a kept cache gives other numbers than a recomputed one."""
    engine = make_engine(kv="keep")
    engine.add(requests := group(0, 1))
    finished = run(engine, lambda step: engine.update_weights(weights_of(reference(NAME, 1)), 1) if step == 7 else None)
    other = expected_logprobs(NAME, requests[0], finished[0], "recompute")
    assert np.abs(finished[0].logprobs_R - other)[8:].max() > 0.01


def test_first_tokens_follow_the_model() -> None:
    """Chi-square of 4,000 first tokens against the reference's distribution (rare tokens pooled)."""
    engine = make_engine(slots=256)
    requests = group(3, 4000, max_new=1)
    engine.add(requests)
    observed_V = np.bincount([done.tokens_R[0] for done in run(engine).values()], minlength=VOCAB_SIZE)
    with torch.no_grad():
        logits_V = reference(NAME)(torch.from_numpy(requests[0].prompt_tokens.astype(np.int64))[None]).logits[0, -1]
    expected_V = 4000 * torch.softmax(logits_V.double(), -1).numpy()
    often = expected_V >= 10
    observed = np.append(observed_V[often], observed_V[~often].sum())
    expected = np.append(expected_V[often], expected_V[~often].sum())
    freedom = len(expected) - 1
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 3.5 * np.sqrt(2 * freedom)


def test_tokens_invert_the_reference_distribution_at_the_numbers_of_their_stream() -> None:
    """Token t of an answer is a function of the model and of uniform number t of its stream, wherever the answer stands in its sequence."""
    engine = make_engine()
    requests = group(2, 3, prompt_length=11)
    engine.add(requests)
    finished = run(engine)
    for request in requests:
        tokens_R = finished[request.request_id].tokens_R
        tokens_T = torch.from_numpy(np.concatenate([request.prompt_tokens, tokens_R]).astype(np.int64))
        with torch.no_grad():
            cumulative_RV = torch.softmax(reference(NAME)(tokens_T[None]).logits[0, 10:-1].double(), -1).cumsum(-1).numpy()
        numbers_R = uniforms(np.full(len(tokens_R), request.stream, np.uint64), np.arange(len(tokens_R)))
        assert tokens_R.tolist() == [int(np.searchsorted(row_V, number, side="right")) for row_V, number in zip(cumulative_RV, numbers_R, strict=True)]


def test_a_sample_does_not_depend_on_its_batch_mates() -> None:
    crowd = make_engine(slots=5)
    groups = [group(ticket, 4, prompt_length=3 + 5 * ticket) for ticket in range(4)]
    for requests in groups:
        crowd.add(requests)
    together = run(crowd)
    for request in (requests[2] for requests in groups):
        engine = make_engine(slots=1)
        engine.add([request])
        alone = run(engine)[request.request_id]
        assert np.array_equal(alone.tokens_R, together[request.request_id].tokens_R)
        np.testing.assert_allclose(alone.logprobs_R, together[request.request_id].logprobs_R, atol=1e-5)
    assert len({tuple(together[request.request_id].tokens_R) for request in groups[0]}) == 4, "samples of one group draw different numbers"


def test_aborted_requests_vanish_and_disturb_no_one() -> None:
    groups = [group(ticket, 4, prompt_length=3 + 5 * ticket) for ticket in range(3)]
    whole, cut = make_engine(slots=6), make_engine(slots=6)
    for engine in (whole, cut):
        for requests in groups:
            engine.add(requests)
    gone = {1, 3, 100, 102, 201}  # with six slots: running first, running last, and waiting ones
    finished = run(cut, lambda step: cut.abort(gone) if step == 5 else None)
    expected = run(whole)
    assert finished.keys() == expected.keys() - gone
    for request_id, done in finished.items():
        assert np.array_equal(done.tokens_R, expected[request_id].tokens_R)
        np.testing.assert_allclose(done.logprobs_R, expected[request_id].logprobs_R, atol=1e-5)


def test_answers_begun_elsewhere_go_on_as_if_never_interrupted() -> None:
    """Half-finished answers of one engine continue in another: same tokens, log-probabilities and stamps."""
    groups = [group(ticket, 4, prompt_length=3 + 5 * ticket) for ticket in range(3)]
    first = make_engine(slots=6)
    for requests in groups:
        first.add(requests)
    done: dict[int, Completion] = {}
    for step in range(26):  # the first six are finished, the others half-way
        done |= {completion.request_id: completion for completion in first.step()}
        if step == 4:
            first.update_weights(weights_of(reference(NAME, 1)), 1)
    saved = first.running()
    assert len(done) == 6 and sorted(len(answer.tokens_R) for answer in saved.values()) == [2] * 6
    second = make_engine(slots=5, version=1)
    for requests in groups:
        second.add([dataclasses.replace(request, begun=saved[request.request_id]) for request in requests if request.request_id in saved])
    assert second.first_version(102) == 1 and second.running().keys() == saved.keys()
    resumed, expected = run(second), run(first)
    assert resumed.keys() == expected.keys()
    for request_id, completion in resumed.items():
        assert np.array_equal(completion.tokens_R, expected[request_id].tokens_R)
        assert np.array_equal(completion.versions_R, expected[request_id].versions_R)
        assert np.array_equal(completion.logprobs_R[:2], saved[request_id].logprobs_R)
        np.testing.assert_allclose(completion.logprobs_R, expected[request_id].logprobs_R, atol=1e-5)


@pytest.mark.parametrize("slots", [2, 3, 8])
def test_a_group_may_be_begun_in_part(slots: int) -> None:
    """With few slots the prompt's cache is kept for the fresh samples of the group that wait, whether or not one that was begun stands between them."""
    requests = group(3, 5)
    whole, half = make_engine(slots=8), make_engine(slots=8)
    whole.add(requests)
    half.add(requests)
    for _ in range(9):
        half.step()
    begun = half.running()
    engine = make_engine(slots=slots)
    engine.add([dataclasses.replace(request, begun=begun[request.request_id]) if number % 2 else request for number, request in enumerate(requests)])
    finished, expected = run(engine), run(whole)
    assert finished.keys() == expected.keys()
    for request_id, completion in finished.items():
        assert np.array_equal(completion.tokens_R, expected[request_id].tokens_R)
        np.testing.assert_allclose(completion.logprobs_R, expected[request_id].logprobs_R, atol=1e-5)


def test_running_lists_waiting_requests_too() -> None:
    engine = make_engine(slots=2)
    engine.add(group(0, 3))
    engine.step()
    assert {request_id: len(answer.tokens_R) for request_id, answer in engine.running().items()} == {0: 1, 1: 1, 2: 0}
    assert engine.first_version(2) is None


def test_an_answer_begun_must_leave_something_to_sample() -> None:
    nothing_left = Begun(tokens_R=np.ones(24, np.int32), logprobs_R=np.zeros(24, np.float32), versions_R=np.zeros(24, np.int32))
    with pytest.raises(ValueError, match="24 tokens begun leave none of max_new_tokens=24"):
        make_engine().add([dataclasses.replace(group(0, 1)[0], begun=nothing_left)])


def test_stop_tokens_end_an_answer() -> None:
    free, bound = make_engine(), make_engine(stop_tokens=(3, 5, 8, 13, 21))
    for engine in (free, bound):
        engine.add(group(1, 8))
        engine.add(group(2, 8))
    whole, cut = run(free), run(bound)
    assert {done.finish for done in whole.values()} == {"length"}
    assert {done.finish for done in cut.values()} == {"stop", "length"}
    for request_id, done in cut.items():
        hits = np.flatnonzero(np.isin(whole[request_id].tokens_R, (3, 5, 8, 13, 21)))
        length = hits[0] + 1 if len(hits) else 24
        assert done.finish == ("stop" if len(hits) else "length")
        assert np.array_equal(done.tokens_R, whole[request_id].tokens_R[:length])


def test_imposed_lengths() -> None:
    """Such an answer takes no notice of stop tokens and ends, as if by one, at its length; others beside it do as ever."""
    engine = make_engine(stop_tokens=(3, 5, 8, 13, 21))
    imposed = [dataclasses.replace(request, is_imposed=True, max_new_tokens=10 + request.request_id) for request in group(0, 5)]
    engine.add(imposed)
    engine.add(group(1, 3))
    finished = run(engine)
    assert [(len(finished[k].tokens_R), finished[k].finish) for k in range(5)] == [(10 + k, "stop") for k in range(5)]
    assert any(np.isin(finished[k].tokens_R[:-1], (3, 5, 8, 13, 21)).any() for k in range(5))
    assert not any(np.isin(finished[100 + k].tokens_R[:-1], (3, 5, 8, 13, 21)).any() for k in range(3))


@cache
def load(kv: str, repetition: int = 0) -> tuple[dict[int, Completion], list[Request]]:
    """Groups arrive while others decode, eight slots for groups of five, and weights change every third step."""
    engine = make_engine(slots=8, kv=kv, stop_tokens=(3, 5))
    groups = [group(ticket, 5, prompt_length=1 + ticket % 9, max_new=1 + (7 * ticket) % 23, temperature=(1.0, 0.6)[ticket % 2]) for ticket in range(20)]
    waiting = list(groups)

    def disturb(step: int) -> None:
        if step % 2 == 0 and waiting:
            engine.add(waiting.pop(0))
        if step % 3 == 0:
            version = engine.policy_version + 1
            engine.update_weights(weights_of(reference(NAME, version)), version)
        assert engine.num_running <= 8

    engine.add(waiting.pop(0))
    finished: dict[int, Completion] = {}
    while waiting or engine.num_running or engine.num_waiting:
        finished |= run(engine, disturb)
        if waiting:
            engine.add(waiting.pop(0))
    return finished, [request for requests in groups for request in requests]


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_nothing_is_lost_or_mixed_up_under_load(kv: str) -> None:
    finished, requests = load(kv)
    assert sorted(finished) == sorted(request.request_id for request in requests)
    for request in requests:
        done = finished[request.request_id]
        assert len(done.tokens_R) == len(done.logprobs_R) == len(done.versions_R) <= request.max_new_tokens
        assert (done.finish == "stop") == (done.tokens_R[-1] in (3, 5))
        assert done.finish == "stop" or len(done.tokens_R) == request.max_new_tokens
        assert not np.isin(done.tokens_R[:-1], (3, 5)).any()
        assert (np.diff(done.versions_R) >= 0).all()
    for request in requests[::7]:
        done = finished[request.request_id]
        np.testing.assert_allclose(done.logprobs_R, expected_logprobs(NAME, request, done, kv), atol=1e-4, rtol=0)


def test_the_same_calls_give_the_same_bits() -> None:
    first, second = load("recompute", 0)[0], load("recompute", 1)[0]
    assert first.keys() == second.keys()
    for request_id, done in first.items():
        assert done.tokens_R.tobytes() == second[request_id].tokens_R.tobytes()
        assert done.logprobs_R.tobytes() == second[request_id].logprobs_R.tobytes()


def test_zero_temperature_is_greedy() -> None:
    engine = make_engine()
    engine.add(requests := group(4, 2, temperature=0.0))
    finished = run(engine)
    assert np.array_equal(finished[400].tokens_R, finished[401].tokens_R)
    np.testing.assert_allclose(finished[400].logprobs_R, expected_logprobs(NAME, requests[0], finished[400], "recompute"), atol=1e-4)
    tokens_T = torch.from_numpy(np.concatenate([requests[0].prompt_tokens, finished[400].tokens_R]).astype(np.int64))
    with torch.no_grad():
        best_T = reference(NAME)(tokens_T[None]).logits[0].argmax(-1)
    assert np.array_equal(best_T[6:-1].numpy(), finished[400].tokens_R)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_read_back_are_bit_equal(name: str) -> None:
    engine = make_engine(name)
    for version in (1, 0):
        given = dict(reversed(weights_of(reference(name, version))))
        engine.update_weights(given.items(), version)
        held = dict(engine.named_weights())
        assert held.keys() == given.keys()
        assert all(torch.equal(held[weight], given[weight]) for weight in given)


def test_wrong_weights_are_refused_whole() -> None:
    engine = make_engine()
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    new = dict(weights_of(reference(NAME, 1)))
    norm = "model.norm.weight"
    wrong = [
        ([(name, tensor) for name, tensor in new.items() if name != norm], r"model\.norm\.weight is missing"),
        ([*new.items(), ("lm_head.weight", new["model.embed_tokens.weight"])], r"unknown weight lm_head\.weight"),
        ([*new.items(), (norm, new[norm])], r"model\.norm\.weight was given twice"),
        ([*(new | {norm: torch.ones(3)}).items()], r"model\.norm\.weight has shape \(3,\); the model needs \(\d+,\)"),
    ]
    for named_tensors, message in wrong:
        with pytest.raises(ValueError, match=message):
            engine.update_weights(named_tensors, 1)
    assert engine.policy_version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.named_weights())


def test_requests_are_checked() -> None:
    engine = make_engine(max_context_tokens=32)
    with pytest.raises(ValueError, match=r"request 500: prompt of 7 and max_new_tokens=26 .* fit the context of 32 tokens"):
        engine.add(group(5, 2, max_new=26))
    with pytest.raises(ValueError, match="prompt of 0"):
        engine.add(group(5, 1, prompt_length=0))
    with pytest.raises(ValueError, match=r"temperature=-1\.0 must be zero or more"):
        engine.add(group(5, 1, temperature=-1.0))
    assert engine.num_waiting == 0
    with pytest.raises(ValueError, match="max_context_tokens=257 exceeds the model's context of 256"):
        EmbeddedEngine(config_of(NAME), max_num_running=1, max_context_tokens=257, stop_tokens=())
    empty = EmbeddedEngine(config_of(NAME), max_num_running=1, max_context_tokens=8, stop_tokens=())
    with pytest.raises(AssertionError, match="before the first update_weights"):
        empty.add(group(5, 1))


def test_first_version_is_that_of_the_first_token() -> None:
    engine = make_engine(slots=2)
    engine.add(group(0, 3))
    assert engine.first_version(0) is None
    engine.step()
    engine.update_weights(weights_of(reference(NAME, 1)), 1)
    engine.step()
    assert [engine.first_version(k) for k in (0, 1, 2)] == [0, 0, None]
    with pytest.raises(KeyError):
        engine.first_version(3)


def test_bfloat16_stays_near_float32() -> None:
    engine = make_engine("qwen3", dtype=torch.bfloat16)
    engine.add(requests := group(0, 4))
    finished = run(engine)
    errors = [np.abs(done.logprobs_R - expected_logprobs("qwen3", requests[0], done, "recompute")) for done in finished.values()]
    assert np.median(np.concatenate(errors)) < 0.1
