"""Greedy decoding of a static batch by transformers: the peer of `python -m mpi_tp.bench decode`.

python tests/peers/decode_transformers.py demo/SmolLM2-135M-Instruct.Q4_1.gguf --threads 2
"""

import statistics
import time
from itertools import pairwise

import peer_model
import torch
import transformers

WARM_UP_STEPS = 8


@torch.inference_mode()
def step_seconds(
    model: transformers.PreTrainedModel, batch_size: int, context: int, steps: int, device: str
) -> list[float]:
    """Return the seconds of each step; `context` is the mean number of tokens before the new one."""
    length = context - steps // 2 - WARM_UP_STEPS
    ids = torch.randint(model.config.vocab_size, (batch_size, length), device=device)
    cache = transformers.DynamicCache(config=model.config)
    times = []
    for _ in range(1 + WARM_UP_STEPS + steps):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        peer_model.synchronize(device)
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)][-steps:]


def main() -> None:
    flags = peer_model.parser("Decode static batches greedily with transformers.")
    flags.add_argument("--batch-sizes", default="1,8,16")
    flags.add_argument("--context", type=int, default=256)
    flags.add_argument("--steps", type=int, default=200)
    options = flags.parse_args()
    model = peer_model.load(options)
    rows = []
    for batch_size in map(int, options.batch_sizes.split(",")):
        seconds = statistics.mean(step_seconds(model, batch_size, options.context, options.steps, options.device))
        row = {"batch_size": batch_size, "context": options.context, "ms_per_step": seconds * 1e3}
        rows.append({**row, "tokens_per_s": batch_size / seconds})
    peer_model.report(options, rows)


if __name__ == "__main__":
    main()
