"""The alarm of the log: engine and trainer that drift apart are reported once per crossing, in the log and on the terminal."""

import dataclasses
import io
import math

import numpy as np

from areal_hpc.config import Config, Evaluation, Train
from areal_hpc.data.datasets import Problem, Problems
from areal_hpc.observe.progress import Progress
from areal_hpc.observe.samples import read_records
from areal_hpc.observe.schema import TABLES
from areal_hpc.observe.telemetry import MemoryLog
from areal_hpc.observe.timeline import Phases
from areal_hpc.topology import World
from areal_hpc.train.compose import Composer
from areal_hpc.train.record import Recorder
from areal_hpc.train.saved import SavedAnswers
from areal_hpc.transport.samples import AnswerText, Piece
from areal_hpc.transport.trajectory import Status

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
    (row,) = recorder._steps.values()
    assert (row["filtered"], row["penalised"], row["overlong"], row["trained_tokens"]) == (4, 2, 2, stats.train_tokens)
    assert row["behav_cut_share"] == 0 and math.isnan(row["kl_reference"]) and row["effective_share"] == stats.effective_share
    assert row["mfu"] >= 0 or math.isnan(row["mfu"])
    composer.ledger.advance()
    composer.arrive(arrival(3, [1, 1, 1, 1]))
    recorder.finals = {0: {"admitted_groups": 4, "pushed_groups": 4}}
    assert recorder.account(composer) == {"admitted": 4, "trained": 2, "dropped": 0, "filtered": 2, "failed": 0, "waiting": 0, "in_ring": 0, "unfinished": 0}
    found = recorder.log.rows("trajectories")
    assert np.bincount(found["outcome"]).tolist() == [8, 0, 0, 0, 8] and len(set(zip(found["ticket"], found["sample"], strict=True))) == 16


def test_saved_answers_meet_their_group_in_either_order(tmp_path):
    """Texts before and after the group's end; of a group that never ends; and on a disk that refuses: counted, and no error."""
    config = dataclasses.replace(make_config(), evaluation=Evaluation(save_training_groups=9))
    problems = Problems([Problem(0, "q", "a", "s")], [Problem(0, "h", "b", "t")], "")
    texts = [AnswerText.of(0, sample, f"text {sample}", None, Status.WRONG, 0.0, 5, (0, 1)) for sample in range(4)]
    rows = np.zeros(8, TABLES["trajectories"].dtype)
    rows["ticket"], rows["sample"] = np.divmod(np.arange(8), 4)
    rows["batch"], rows["outcome"], rows["age"], rows["reward"], rows["advantage"] = 3, 1, 2, -5.0, math.nan

    def fill(saved):
        saved.receive(Piece("training", 0, tuple(texts[:3])))
        saved.closed(rows)
        saved.receive(Piece("training", 0, tuple(texts[3:])))
        for ticket in (1, 2):
            saved.receive(Piece("training", ticket, tuple(texts[::-1])))
        saved.receive(Piece("evaluation", 7, tuple(texts[1::-1])))
        saved.evaluated(7)
        saved.evaluated(8)  # nothing of it was to be saved

    saved = SavedAnswers(config, problems, tmp_path / "samples")
    fill(saved)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["evaluation-000007.jsonl", "training-000003.jsonl"]
    found = read_records(tmp_path / "samples" / "training-000003.jsonl")
    assert [(r["ticket"], r["sample"], r["answer"]) for r in found] == [(t, s, f"text {s}") for t in range(2) for s in range(4)]
    assert all((r["outcome"], r["reward"], r["advantage"], r["gold"]) == ("dropped", -5.0, None, "a") for r in found)
    evaluated = read_records(tmp_path / "samples" / "evaluation-000007.jsonl")
    assert [(r["version"], r["sample"], r["prompt"]) for r in evaluated] == [(7, 0, "h"), (7, 1, "h")]
    assert saved.finish() == "10 answers saved for reading, 4 of groups that were not closed"
    (tmp_path / "file").touch()
    refused = SavedAnswers(config, problems, tmp_path / "file" / "samples")
    fill(refused)
    assert refused.finish().startswith("0 answers saved for reading, 4 of groups that were not closed, 10 lost (")
