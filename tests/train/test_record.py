"""The alarm of the log: engine and trainer that drift apart are reported once per crossing, in the log and on the terminal."""

import dataclasses
import io
import math

import numpy as np

from areal_hpc.config import Config, Train
from areal_hpc.observe.progress import Progress
from areal_hpc.observe.telemetry import MemoryLog
from areal_hpc.observe.timeline import Phases
from areal_hpc.topology import World
from areal_hpc.train.compose import Composer
from areal_hpc.train.record import Recorder

from .cases import local_batch, tiny_trainer, trajectories
from .test_compose import LONG, SHORT, arrival, make_config


def make_recorder(config):
    said = io.StringIO()
    world = World(1, "training", 0, 1, (0,), (1,), (0, 0), ("here",), 0.0, None, None, None, None, None)  # no rank is asked anything
    recorder = Recorder(config, world, MemoryLog.create(), Progress(10, "lines", said), Phases(1, "training"))
    recorder.begin()
    return recorder, said


def test_alarm_once_per_crossing():
    recorder, said = make_recorder(dataclasses.replace(make_config(), train=Train(batch_size=8, group_size=4, logprob_alarm=0.1)))
    composer = Composer(recorder.config, 1)
    real = tiny_trainer().train_batch(local_batch(trajectories(0)))
    for step, gap in enumerate([0.01, 0.3, 0.2, math.nan, 0.15, 0.05, 0.02, 0.5], start=1):
        composer.arrive(arrival(2 * step, *LONG))
        composer.arrive(arrival(2 * step + 1, *SHORT))
        plan, groups = composer.compose()
        recorder.step(step, plan, groups, dataclasses.replace(real, logprob_gap=gap), composer)
        composer.ledger.advance()
    events = [event for event in recorder.log.rows("events") if event["kind"].startswith(b"logprob_alarm")]
    assert [event["kind"] for event in events] == [b"logprob_alarm", b"logprob_alarm_over", b"logprob_alarm"]
    assert [event["text"].split(b":")[0] for event in events] == [b"step 2", b"step 6", b"step 8"]
    assert said.getvalue().count("warning: ") == 2 and "0.3 nats" in said.getvalue()


def test_no_alarm_when_turned_off():
    recorder, said = make_recorder(dataclasses.replace(Config(), train=Train(logprob_alarm=0.0)))
    real = tiny_trainer().train_batch(local_batch(trajectories(0)))
    assert real.logprob_gap > 0.05
    recorder._watch_gap(1, real)
    assert not said.getvalue() and not len(recorder.log.rows("events"))


def test_row_of_a_step_has_every_column():
    """What the trainer and the plan know arrives in the columns of /steps, and rejected groups in /trajectories, also those closed after the last step."""
    recorder, _ = make_recorder(make_config(max_staleness=9, objective="dapo", truncated="penalise"))
    composer = Composer(recorder.config, 1)
    for ticket, group in enumerate([LONG, ([0, 0, 0, 0],), SHORT]):
        composer.arrive(arrival(ticket, *group))
    plan, groups = composer.compose()
    stats = tiny_trainer().train_batch(local_batch(trajectories(0)))
    recorder.step(1, plan, groups, stats, composer)
    row = recorder._step
    assert (row["filtered"], row["penalised"], row["overlong"], row["trained_tokens"]) == (4, 2, 2, stats.train_tokens)
    assert row["behav_cut_share"] == 0 and math.isnan(row["kl_reference"]) and row["effective_share"] == stats.effective_share
    assert row["mfu"] >= 0 or math.isnan(row["mfu"])
    composer.ledger.advance()
    composer.arrive(arrival(3, [1, 1, 1, 1]))
    recorder.finals = {0: {"admitted_groups": 4, "pushed_groups": 4}}
    assert recorder.account(composer) == {"admitted": 4, "trained": 2, "dropped": 0, "filtered": 2, "failed": 0, "waiting": 0, "in_ring": 0, "unfinished": 0}
    found = recorder.log.rows("trajectories")
    assert np.bincount(found["outcome"]).tolist() == [8, 0, 0, 0, 8] and len(set(zip(found["ticket"], found["sample"], strict=True))) == 16
