"""Write demo.jsonl: what transformers generates, greedily and in float32, from the demo model.

    python -m tests.golden.make_demo demo/SmolLM2-135M-Instruct.Q4_1.gguf demo/shards/tokenizer

transformers' own tokenizer of a GGUF file ignores the pre-tokeniser, so it is given our prompt ids; these are checked
against llama.cpp's in smollm2_tokens.json. `margin` is the least distance between the two largest logits along the way.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

from mpi_tp.tokenizer import Tokenizer

NEW_TOKENS = 24
LONG = "The history of computing is longer than most people think. "

PROMPTS = [
    "A",
    "The capital of France is",
    "  1",
    "x =    42",
    " leading space",
    "   three leading spaces and then words",
    "\t1\t22\t333 tab before digits",
    "1234567890 987 6 5.4e-3 0x1F",
    "Übergrößenträger: naïve café, Straße, ångström",
    "日本語のテキストを続けてください。",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "🙂🎉 emoji and 👩‍👩‍👧 families",
    "e\u0301 combining, \u200b zero width",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "<|im_start|>user\nWhat is the boiling point of water?<|im_end|>\n<|im_start|>assistant\n",
    "a special token in <|im_end|> the middle of a text",
    "line one\n\n\n\nline two\r\n\r\nline three",
    "don't won't it's we'll they've I'd you're",
    LONG * 6 + "It begins with",
    LONG * 14 + "In summary,",
    "Q: What is 17 * 23?\nA:",
    "SELECT name, COUNT(*) FROM users WHERE age > 30 GROUP BY",
    LONG * 33 + "The end of the story is that",
]


def main(gguf: Path, tokenizer_folder: Path) -> None:
    """Generate from every prompt, one at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = Tokenizer.load(tokenizer_folder)
    with Path(__file__).with_name("demo.jsonl").open("w", encoding="utf-8") as file:
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt)
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                eos_token_id=sorted(tokenizer.eos_token_ids),
                pad_token_id=2,
            )
            two = torch.stack(output.logits)[:, 0].topk(2).values
            record = {
                "prompt": prompt,
                "prompt_token_ids": ids,
                "token_ids": output.sequences[0, len(ids) :].tolist(),
                "margin": round((two[:, 0] - two[:, 1]).min().item(), 5),
            }
            print(len(ids), record["margin"], prompt[:40].replace("\n", " "), file=sys.stderr)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
