"""Pushes that end in a decoding engine: every architecture, both cache policies, weights staged, in place and mapped; no token from a mixed model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from areal_hpc.models import hf
from areal_hpc.models.decoder import Decoder
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.sinks import EmbeddedSink, MappedSink, is_staged, kv_budget_bytes, layout_of
from areal_hpc.transport.images import NUM_IMAGES, SharedImages
from areal_hpc.transport.manifest import Manifest
from areal_hpc.transport.weights import Announcement, NetworkReceiver, Receiver, Sender, SharedReceiver, checksum, part_of
from tests.models.tiny import ARCHITECTURES, weights_of
from tests.rollout.test_embedded import config_of, expected_logprobs, group, reference
from tests.transport.loopback import Loopback

CPU = torch.device("cpu")
NUM_ROOTS = 3


class OwnImages(SharedImages):
    """Images in this process's memory: what is tested here is the engine's side."""

    def __init__(self, image_bytes: int) -> None:
        self.images = tuple(torch.full((image_bytes,), 0xFF, dtype=torch.uint8) for _ in range(NUM_IMAGES))


class Pushing:
    """Three roots and the receiver of one engine."""

    def __init__(self, name: str, way: str, engine: EmbeddedEngine) -> None:
        weights = dict(weights_of(reference(name)))
        self.name, self.engine = name, engine
        self.manifest = Manifest.of(((n, t.shape) for n, t in weights.items()), torch.float32, NUM_ROOTS)
        net: Any = Loopback(NUM_ROOTS, 4000)
        self.images, layout = None, layout_of(engine)
        if way == "mapped":
            assert layout is not None
            net, self.images = None, OwnImages(layout.num_bytes)
        self.senders = [Sender(self.manifest, root, CPU, network=net, images=self.images, layout=layout) for root in range(NUM_ROOTS)]
        self.receiver: Receiver
        if self.images is not None:
            self.receiver = SharedReceiver(self.images, MappedSink(engine), NUM_ROOTS)
        else:
            self.receiver = NetworkReceiver(self.manifest, net.receiver(), EmbeddedSink(engine, is_staged=way == "staged"), CPU)

    def publish(self, version: int) -> None:
        weights = dict(weights_of(reference(self.name, version)))
        image = version % NUM_IMAGES
        sums = []
        for root, sender in enumerate(self.senders):
            rows = [(e.name, weights[e.name][slice(first, first + count)]) for e in self.manifest.entries for first, count in [self.manifest.rows(e, root)]]
            sums.append(sender.pack(rows, version, image))
        parts = () if self.images is None else tuple(checksum(part_of(self.images.images[image], k, NUM_ROOTS)) for k in range(NUM_ROOTS))
        self.receiver.begin(Announcement(version, 0, tuple(sums), False, False, image, parts))
        for sender in self.senders:
            sender.send(version)

    def turn(self) -> None:
        """As the worker's loop: go on receiving, swap when complete."""
        if self.receiver.poll(busy=True):
            self.receiver.swap()
            for sender in self.senders:
                sender.wait_sent(self.engine.policy_version, 1)


def make_engine(name: str, kv: str = "recompute", slots: int = 6, dtype: torch.dtype = torch.float32) -> EmbeddedEngine:
    return EmbeddedEngine(config_of(name), max_num_running=slots, max_context_tokens=96, stop_tokens=(), kv_on_update=kv, dtype=dtype)  # type: ignore[arg-type]


WAYS = [(name, "mapped", "recompute") for name in ARCHITECTURES]
WAYS += [("qwen3-untied", way, kv) for way in ("staged", "in place", "mapped") for kv in ("recompute", "keep") if (way, kv) != ("mapped", "recompute")]


@pytest.mark.parametrize(("name", "way", "kv"), WAYS)
def test_logprobs_equal_their_versions_weights_across_pushes(name: str, way: str, kv: str) -> None:
    """Versions 1 and 2 arrive slice by slice while sequences decode (in place: while they stand still); every token agrees with its version's weights to 1e-4."""
    engine = make_engine(name, kv)
    pushing = Pushing(name, way, engine)
    pushing.publish(0)
    while engine.policy_version < 0:
        pushing.turn()
    groups = [group(0, 4), group(1, 3, prompt_length=1, max_new=60)]
    for requests in groups:
        engine.add(requests)
    finished, decoded_while_receiving = {}, 0
    for step in range(10_000):
        if step in (3, 4):
            pushing.publish(step - 2)
        for _ in range(8):  # slices, so that both versions arrive within the longest answers
            pushing.turn()
        if not pushing.receiver.holds_decoding:
            decoded_while_receiving += engine.policy_version < 2 and step > 4
            for done in engine.step():
                finished[done.request_id] = done
        if not engine.num_running and not engine.num_waiting and engine.policy_version == 2:
            break
    assert len(finished) == 7
    assert {tuple(np.unique(done.versions_R)) for done in finished.values()} & {(0, 1, 2), (0, 2)}, "swaps in the middle of sequences"
    for request in (request for requests in groups for request in requests):
        done = finished[request.request_id]
        np.testing.assert_allclose(done.logprobs_R, expected_logprobs(name, request, done, kv), atol=1e-4, rtol=0)
    for weight, tensor in weights_of(reference(name, 2)):
        assert torch.equal(dict(engine.named_weights())[weight], tensor), weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_in_odd_cuts_fill_an_image_as_load_does(name: str, dtype: torch.dtype) -> None:
    """Every architecture, tied embeddings and permuted heads included: whoever writes rows by the layout gives the engine what `update_weights` gives it."""
    engine, weights = make_engine(name, dtype=dtype), dict(weights_of(reference(name)))
    layout = layout_of(engine)
    assert layout is not None and layout.places.keys() == weights.keys()
    written = engine.new_weights(torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8))
    for weight, tensor in weights.items():
        for first in range(0, len(tensor), 7):
            layout.places[weight].put(written.image, first, tensor[first : first + 7].reshape(-1, layout.places[weight].row_elements))
    engine.update_weights(weights.items(), 0)
    expected = {weight: tensor.clone() for weight, tensor in engine.named_weights()}
    engine.swap_weights(written, 1)
    for weight, tensor in engine.named_weights():
        assert torch.equal(tensor, expected[weight]) and torch.equal(tensor, weights[weight].to(dtype)), weight


def test_the_manifest_of_engine_and_trainer_is_the_same() -> None:
    """Names and shapes of what the trainer shards and of what the engine holds, tied tensors once, for every architecture."""
    for name in ARCHITECTURES:
        config: DecoderConfig = config_of(name)
        ours = Manifest.of(((n, t.shape) for n, t in make_engine(name).named_weights()), torch.float32, 2)
        with torch.device("meta"):
            trained = Manifest.of(((n, p.shape) for n, p in Decoder(config).named_parameters()), torch.float32, 2)
        assert ours == trained
        assert all(not hf.is_derived(config, entry.name) for entry in ours.entries)


def test_an_engine_whose_weights_are_being_overwritten_refuses_to_step() -> None:
    engine = make_engine("qwen2-tied")
    engine.update_weights(weights_of(reference("qwen2-tied")), 0)
    engine.add(group(0, 1))
    engine.step()
    sink = EmbeddedSink(engine, is_staged=False)
    entry = Manifest.of([("model.norm.weight", (32,))], torch.float32, 1).entries[0]
    sink.write(entry, 0, torch.ones(4, 1))
    with pytest.raises(AssertionError, match="while the weights are being overwritten"):
        engine.step()
    sink.swap(1)
    engine.step()


def test_staging_is_counted_against_the_kv_budget() -> None:
    assert is_staged("auto", 250, 1000) and not is_staged("auto", 251, 1000)
    assert is_staged("on", 10**9, 1) and not is_staged("off", 0, 1)
    small, large = make_engine("qwen2-tied", slots=2), make_engine("qwen2-tied", slots=200)
    layers, kv, slots, heads, context, size, item = 3, 2, 201, 2, 96, 16, 4
    assert large.cache_bytes == layers * kv * slots * heads * context * size * item
    assert kv_budget_bytes(small, CPU, 2) < kv_budget_bytes(small, CPU, 1)
    assert kv_budget_bytes(small, CPU, 10**12) == small.cache_bytes
