"""A job with a walltime of two minutes and work for five finishes by itself, with the bytes of one without a limit.

    python -m tests.faults.slurm_walltime        # as root, with Slurm's daemons installed; about a quarter of an hour

Prints how often the job was started again and how long it took.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.cli.test_slurm import ENDED, BatchJob
from tests.support.sets import make_sets, save_checkpoint
from tests.support.slurm import running_slurm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000, help="enough for five minutes (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_slurm() as slurm:
        shards = make_sets(save_checkpoint(Path(folder, "model")), Path(folder), 2)[2]
        outputs = []
        for name, limit in (("limited", "--time=2"), ("unlimited", "--time=60")):
            (here := Path(folder, name)).mkdir()
            job = BatchJob(slurm, shards, here)
            job.write_prompts(options.lines)
            start = time.time()
            number = job.submit(limit, tokens=24)
            while (ended := slurm.job(number))["JobState"] not in ENDED:
                time.sleep(1)
            restarts = ended["Restarts"]
            print(f"{name}: {ended['JobState']} after {restarts} restarts, {time.time() - start:.0f} s", flush=True)
            if ended["JobState"] != "COMPLETED":
                sys.exit(job.log())
            outputs.append((here / "out.jsonl").read_bytes())
    same = outputs[0] == outputs[1]
    print(f"the outputs are {'equal' if same else 'NOT equal'}: {len(outputs[0])} bytes")
    sys.exit(not same)


if __name__ == "__main__":
    main()
