"""vLLM in this process, by the embedded engine's own tests where both promise the same; and the traps of vLLM that were found by running.

make test-vllm
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_hpc.config import ConfigError
from areal_hpc.rollout import engines
from areal_hpc.rollout.sinks import TensorSink
from areal_hpc.transport.manifest import Manifest
from tests.models import tiny
from tests.models.tiny import VOCAB_SIZE, weights_of
from tests.rollout import test_embedded as common
from tests.rollout.test_embedded import NAME, config_of, expected_logprobs, group, reference, run

pytest.importorskip("vllm", reason="vLLM is not installed here; its tests: make test-vllm")


@pytest.fixture(autouse=True)
def vllm_engine(monkeypatch: pytest.MonkeyPatch):
    """Tests of the embedded engine make this one; each engine is closed, since vLLM's groups are the process's own."""
    from areal_hpc.rollout.engines.vllm import VllmEngine

    made: list[VllmEngine] = []

    def make(*args, **options) -> VllmEngine:
        while made:
            made.pop().close()
        made.append(VllmEngine(*args, **options))
        return made[0]

    monkeypatch.setattr(common, "EmbeddedEngine", make)
    for name, value in {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}.items():
        monkeypatch.setitem(tiny.SHAPE, name, value)  # vLLM's kernels have no smaller heads
    for cached in (common.load, common.weights_number):
        cached.cache_clear()
    yield make
    common.weights_number.cache_clear()
    while made:
        made.pop().close()


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("name", ["qwen2-tied", "llama3-rope", "qwen3"])
def test_logprobs_equal_teacher_forcing_across_two_swaps(name: str, kv: str) -> None:
    common.test_logprobs_equal_teacher_forcing_across_two_swaps(name, kv)


test_nothing_is_lost_or_mixed_up_under_load = common.test_nothing_is_lost_or_mixed_up_under_load
test_the_two_cache_policies_differ = common.test_the_two_cache_policies_differ
test_zero_temperature_is_greedy = common.test_zero_temperature_is_greedy
test_wrong_weights_are_refused_whole = common.test_wrong_weights_are_refused_whole
test_running_lists_waiting_requests_too = common.test_running_lists_waiting_requests_too
test_first_version_is_that_of_the_first_token = common.test_first_version_is_that_of_the_first_token
test_the_same_calls_give_the_same_bits = common.test_the_same_calls_give_the_same_bits
test_imposed_lengths = common.test_imposed_lengths


def test_first_tokens_follow_the_model(vllm_engine) -> None:
    """Chi-square of 4,000 first tokens at two temperatures, against the exact probabilities."""
    engine = common.make_engine(slots=64)
    for temperature in (1.0, 0.6):
        requests = group(3, 4000, max_new=1, temperature=temperature)
        engine.add(requests)
        drawn = Counter(int(done.tokens_R[0]) for done in run(engine).values())
        with torch.no_grad():
            logits_V = reference(NAME)(torch.from_numpy(requests[0].prompt_tokens.astype(np.int64))[None]).logits[0, -1].double()
        expected_V = 4000 * torch.softmax(logits_V / temperature, -1).numpy()
        common_V = expected_V >= 5
        found_V = np.array([drawn[token] for token in range(VOCAB_SIZE)])
        chi = float((((found_V - expected_V) ** 2 / expected_V)[common_V]).sum())
        freedom = int(common_V.sum()) - 1
        assert chi < freedom + 4 * np.sqrt(2 * freedom), (temperature, chi, freedom)


def test_stop_tokens_end_an_answer() -> None:
    """Where the same answers without stop tokens have the first of them, which is part of the answer."""
    stops, requests = (3, 5, 8, 13, 21), group(6, 6)
    free = common.make_engine(slots=8)
    free.add(requests)
    whole = run(free)
    bound = common.make_engine(slots=8, stop_tokens=stops)
    bound.add(requests)
    cut = run(bound)
    assert {done.finish for done in cut.values()} == {"stop", "length"} or {done.finish for done in cut.values()} == {"stop"}
    for request_id, done in cut.items():
        hits = np.flatnonzero(np.isin(whole[request_id].tokens_R, stops))
        assert done.finish == ("stop" if len(hits) else "length")
        assert done.tokens_R.tolist() == whole[request_id].tokens_R[: hits[0] + 1 if len(hits) else None].tolist()


def test_a_sample_does_not_depend_on_its_batch_mates() -> None:
    """Its numbers are its own: the same tokens alone and in a crowd, log-probabilities within 1e-5."""
    crowd = common.make_engine(slots=5)
    groups = [group(ticket, 4, prompt_length=3 + 5 * ticket) for ticket in range(3)]
    for requests in groups:
        crowd.add(requests)
    together = run(crowd)
    alone_engine = common.make_engine(slots=1)
    for request in (requests[2] for requests in groups):
        alone_engine.add([request])
        alone = run(alone_engine)[request.request_id]
        assert np.array_equal(alone.tokens_R, together[request.request_id].tokens_R)
        np.testing.assert_allclose(alone.logprobs_R, together[request.request_id].logprobs_R, atol=1e-5)


def test_an_answer_begun_elsewhere_goes_on() -> None:
    """Tokens, log-probabilities and stamps of its beginning come back as they were; the rest equals the model."""
    first = common.make_engine(slots=4)
    first.add(requests := group(0, 4))
    for _ in range(9):
        first.step()
    begun = first.running()
    second = common.make_engine(slots=4, version=1)
    second.add([common.dataclasses.replace(request, begun=begun[request.request_id]) for request in requests])
    for request in requests:
        assert second.first_version(request.request_id) == 0
    for request_id, done in run(second).items():
        assert done.tokens_R[:9].tolist() == begun[request_id].tokens_R.tolist() and done.versions_R.tolist() == [0] * 9 + [1] * 15
        np.testing.assert_allclose(done.logprobs_R, expected_logprobs(NAME, requests[request_id], done, "recompute"), atol=1e-4)


def test_aborted_requests_are_gone() -> None:
    engine = common.make_engine(slots=3)
    engine.add(group(0, 5))
    finished = run(engine, lambda step: engine.abort([0, 4, 77]) if step == 4 else None)
    assert sorted(finished) == [1, 2, 3] and not engine.running()


def test_a_cached_prompt_of_old_weights_is_not_used_again() -> None:
    """`keep`: a group that comes after new weights, with a prompt long enough for vLLM's prefix cache, is answered by them alone."""
    engine = common.make_engine(kv="keep", max_context_tokens=256)
    engine.add(group(1, 1, prompt_length=200, max_new=4))
    run(engine)
    engine.update_weights(weights_of(reference(NAME, 1)), 1)
    engine.add(requests := group(1, 1, prompt_length=200, max_new=20))
    (done,) = run(engine).values()
    np.testing.assert_allclose(done.logprobs_R, expected_logprobs(NAME, requests[0], done, "recompute"), atol=1e-4)


def test_whole_tensors_pushed_in_pieces_arrive() -> None:
    """The sink: poisoned memory, rows in any order, then the swap; the engine answers as the model does."""
    engine = common.make_engine()
    weights = dict(weights_of(reference(NAME, 1)))
    manifest = Manifest.of([(name, tensor.shape) for name, tensor in weights.items()], torch.float32, 1)
    sink = TensorSink(engine, manifest)
    for tensor in sink._tensors.values():
        tensor.fill_(float("nan"))
    for entry in reversed(manifest.entries):
        rows = weights[entry.name].reshape(entry.num_rows, -1)
        half = entry.num_rows // 2
        sink.write(entry, half, rows[half:])
        sink.write(entry, 0, rows[:half])
    sink.swap(1)
    engine.add(requests := group(0, 2))
    finished = run(engine)
    for request in requests:
        done = finished[request.request_id]
        assert done.versions_R.tolist() == [1] * 24
        np.testing.assert_allclose(done.logprobs_R, expected_logprobs(NAME, request, done, "recompute"), atol=1e-4)


def test_interrupted_a_hundred_times() -> None:
    """New weights at every step, more requests than slots: every answer comes back once, whole."""
    engine = common.make_engine(slots=6)
    requests = [request for ticket in range(6) for request in group(ticket, 4, max_new=26)]
    for ticket in range(6):
        engine.add(group(ticket, 4, max_new=26))

    def swap(step: int) -> None:
        if engine.policy_version < 100:
            engine.update_weights(weights_of(reference(NAME, engine.policy_version + 1)), engine.policy_version + 1)

    finished = run(engine, swap)
    assert engine.policy_version == 100
    assert {request_id: len(done.tokens_R) for request_id, done in finished.items()} == {request.request_id: 26 for request in requests}
    done = finished[503]
    np.testing.assert_allclose(done.logprobs_R, expected_logprobs(NAME, next(r for r in requests if r.request_id == 503), done, "recompute"), atol=1e-4)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """A process that makes an engine, steps it and ends by os._exit, as ranks do: no file in the temp folder or /dev/shm, no child."""
    code = """
import os
from tests.rollout import test_embedded as common
from areal_hpc.rollout.engines.vllm import VllmEngine
from tests.models import tiny
common.EmbeddedEngine = VllmEngine
tiny.SHAPE |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
engine = common.make_engine()
engine.add(common.group(0, 2, max_new=4))
assert len(common.run(engine)) == 2
children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
print("CHILDREN", children, flush=True)
os._exit(0)
"""
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0 and "CHILDREN []" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.iterdir()) and set(os.listdir("/dev/shm")) <= before


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engines.check_vllm()
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with pytest.raises(ConfigError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1 would start a second process"):
            engines.check_vllm()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.33.1")
        with pytest.raises(ConfigError, match=r"needs vllm 0\.32\.x and found 0\.33\.1"):
            engines.check_vllm()
    small = common.dataclasses.replace(config_of(NAME), head_dim=8, hidden_size=16)
    with pytest.raises(ConfigError, match=r"heads of 8, and on a CPU vLLM has kernels for 32, 64"):
        common.EmbeddedEngine(small, max_num_running=1, max_context_tokens=8, stop_tokens=())
    with pytest.raises(ConfigError, match="qwen2 models have heads of hidden_size / num_attention_heads"):
        common.EmbeddedEngine(common.dataclasses.replace(config_of(NAME), head_dim=64), max_num_running=1, max_context_tokens=8, stop_tokens=())
    with pytest.raises(ValueError, match="max_context_tokens=257 exceeds the model's context of 256"):
        common.EmbeddedEngine(config_of(NAME), max_num_running=1, max_context_tokens=257, stop_tokens=())
