"""TRL's side of trainer.py and peers.py: run by them with the Python of an environment of its own, which `environment` makes on first use.

    python benchmarks/trl_rival.py step '{...}'     # training steps of GRPOTrainer on given sequences
    python benchmarks/trl_rival.py loop '{...}'     # its whole loop: generate, grade, train

The settings come as JSON; the last line is one JSON object with the seconds of each step. TRL is left as it is published but for what slows it down on a CPU:
no gradient checkpointing, no reports, no checkpoints. It imports nothing of areal_hpc.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

TRL = "trl==1.16.*"
FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers-venv"


def environment() -> Path:
    """Python of build/peers-venv: TRL and what it needs, torch and the rest from the environment this runs in (a .pth file). Raises CalledProcessError."""
    python = FOLDER / "bin" / "python"
    ready = FOLDER / "ready"
    if not ready.is_file():
        venv.create(FOLDER, with_pip=True, clear=True)
        packages = next(FOLDER.glob("lib/python*/site-packages"))
        (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TRL], check=True, stdout=sys.stderr)
        ready.touch()
    return python


def run(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One run of this file in that environment. Raises RuntimeError with its last lines when it fails."""
    threads = str(settings["threads"])
    variables = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([environment(), __file__, kind, json.dumps(settings)], capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        raise RuntimeError(f"TRL ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def trainer_of(settings: dict[str, Any], output: str, callback: Any) -> Any:
    """A GRPOTrainer, and its class for `step` that takes sequences instead of generating them."""
    import numpy as np
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"])
    samples, microbatch, group = settings["samples"], settings["microbatch"], settings["group_size"]
    config = GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=samples // microbatch,
        num_generations=group,
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["steps"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.05,
        adam_beta2=0.95,
        adam_epsilon=1e-5,
        optim=settings.get("optimizer", "adamw_torch_fused"),
        report_to="none",
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
        use_transformers_continuous_batching=settings.get("continuous", False),
    )

    class GivenSequences(GRPOTrainer):
        """Every step trains on the sequences of the file, padded as TRL pads its own: prompts on the left, answers on the right."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            batch = batches[self.state.global_step % len(batches)]
            self._metrics["train"]["num_tokens"] = [0]
            return {key: value.clone() for key, value in batch.items()}

    batches = []
    if "sequences" in settings:
        data = np.load(settings["sequences"], allow_pickle=False)
        for b in range(int(data["num_batches"])):
            prompts = [data[f"{b}.{s}.prompt"] for s in range(samples)]
            answers = [data[f"{b}.{s}.answer"] for s in range(samples)]
            longest_p, longest_a = max(map(len, prompts)), max(map(len, answers))
            batch = {
                "prompt_ids": torch.tensor(np.stack([np.pad(p, (longest_p - len(p), 0)) for p in prompts]), dtype=torch.long),
                "prompt_mask": torch.tensor(np.stack([np.pad(np.ones(len(p), int), (longest_p - len(p), 0)) for p in prompts])),
                "completion_ids": torch.tensor(np.stack([np.pad(a, (0, longest_a - len(a))) for a in answers]), dtype=torch.long),
                "completion_mask": torch.tensor(np.stack([np.pad(np.ones(len(a), int), (0, longest_a - len(a))) for a in answers])),
                "advantages": torch.tensor(data[f"{b}.advantages"], dtype=torch.float32),
            }
            batch["num_items_in_batch"] = batch["completion_mask"].sum()
            batches.append(batch)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [5.0 if f"#### {gold}" in text else -5.0 for text, gold in zip(completions, answer, strict=True)]

    rows = [json.loads(line) for line in Path(settings["problems"]).read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": row["question"] + "\n", "answer": row["answer"]} for row in rows])
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    chosen = GivenSequences if batches else GRPOTrainer
    return chosen(model=model, reward_funcs=reward, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[callback])


def main() -> None:
    import transformers

    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):
        """`step`: from the first micro-batch to the end of the update; `loop`: from the end of one update to that of the next."""

        began_at = 0.0

        def on_step_begin(self, *args: Any, **_: Any) -> None:
            if kind == "step" or not seconds:
                self.began_at = time.perf_counter()

        def on_step_end(self, *args: Any, **_: Any) -> None:
            now = time.perf_counter()
            seconds.append(now - self.began_at)
            self.began_at = now

    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_of(settings, output, Clock())
        lengths: list[float] = []
        log = trainer.log

        def keep_lengths(*args: Any, **kwargs: Any) -> None:  # GRPOTrainer.log empties its metrics
            lengths.extend(trainer._metrics["train"].get("completions/mean_length", []))
            log(*args, **kwargs)

        trainer.log = keep_lengths
        trainer.train()
    print(json.dumps({"step_s": seconds, "mean_answer_tokens": sum(lengths) / len(lengths) if lengths else None}))


if __name__ == "__main__":
    main()
