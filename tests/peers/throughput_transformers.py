"""A queue of requests in static batches by transformers: the peer of `python -m mpi_tp.bench throughput`.

Requests are sorted by the length of their answers, so that little of a batch runs on for its longest, and several batch
sizes are tried: the best counts.

    python tests/peers/throughput_transformers.py demo/SmolLM2-135M-Instruct.Q4_1.gguf --threads 2
"""

import argparse
import random
import time

import peer_model
import torch
import transformers

Request = tuple[list[int], int]
"""The prompt's tokens and how many are to come."""


def draw_requests(options: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Return requests of the same lengths as `mpi_tp.bench throughput` with the same seed."""
    generator = random.Random(options.seed)
    (low_in, high_in), (low_out, high_out) = (
        map(int, text.split(":")) for text in (options.input_len, options.output_len)
    )
    lengths = [
        (generator.randint(low_in, high_in), generator.randint(low_out, high_out)) for _ in range(options.requests)
    ]
    return [([generator.randrange(vocab_size) for _ in range(length)], answer) for length, answer in lengths]


@torch.inference_mode()
def generate(model: transformers.PreTrainedModel, batch: list[Request], device: str) -> None:
    """Answer one batch, padded on the left, up to the longest answer."""
    width, answer = max(len(prompt) for prompt, _ in batch), max(answer for _, answer in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(batch):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    lengths = {"min_new_tokens": answer, "max_new_tokens": answer}
    model.generate(ids.to(device), attention_mask=mask.to(device), do_sample=False, pad_token_id=0, **lengths)
    peer_model.synchronize(device)


def main() -> None:
    flags = peer_model.parser("Answer a queue of requests in static batches with transformers.")
    flags.add_argument("--batch-sizes", default="16,64")
    flags.add_argument("--requests", type=int, default=64)
    flags.add_argument("--input-len", default="32:128")
    flags.add_argument("--output-len", default="32:64")
    flags.add_argument("--seed", type=int, default=0)
    options = flags.parse_args()
    model = peer_model.load(options)
    requests = sorted(draw_requests(options, model.config.vocab_size), key=lambda request: request[1])
    num_tokens = sum(answer for _, answer in requests)
    rows = []
    for batch_size in map(int, options.batch_sizes.split(",")):
        batches = [requests[at : at + batch_size] for at in range(0, len(requests), batch_size)]
        generate(model, [(prompt, 2) for prompt, _ in batches[0]], options.device)  # warms up
        start = time.perf_counter()
        for batch in batches:
            generate(model, batch, options.device)
        seconds = time.perf_counter() - start
        rows.append({"batch_size": batch_size, "seconds": seconds, "tokens_per_s": num_tokens / seconds})
    peer_model.report(options, rows)


if __name__ == "__main__":
    main()
