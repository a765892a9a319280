"""What the peers' scripts share: the model as transformers loads it, and how they print their results."""

import argparse
import json
import os
import platform

import torch
import transformers


def parser(description: str) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("model", help="a Hugging Face folder, or a .gguf file")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--dtype", default="bfloat16", help="float32 is faster on a CPU without AVX-512")
    flags.add_argument("--json", help="write the results there too")
    return flags


def load(options: argparse.Namespace) -> transformers.PreTrainedModel:
    torch.set_num_threads(options.threads)
    where = {"pretrained_model_name_or_path": options.model}
    if options.model.endswith(".gguf"):
        folder, name = os.path.split(os.path.abspath(options.model))
        where = {"pretrained_model_name_or_path": folder, "gguf_file": name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval()


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def report(options: argparse.Namespace, rows: list[dict[str, float]]) -> None:
    """Print the results as JSON, in the form of `python -m mpi_tp.bench --json`."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    meta = {"versions": {**versions, "python": platform.python_version()}, "settings": vars(options)}
    text = json.dumps({"meta": meta, "results": rows}, indent=2)
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")
