"""Prints our tokens/s over the peer's, from the JSON files that `run.sh` makes, round by round and the median."""

import json
import statistics
import sys
from pathlib import Path


def rates(path: Path) -> dict[str, float]:
    """Return tokens/s by batch size; of a throughput run, the best."""
    rows = json.loads(path.read_text())["results"]
    if path.name.startswith("throughput"):
        return {"queue": max(row["tokens_per_s"] for row in rows)}
    return {f"batch {row['batch_size']}": row["tokens_per_s"] for row in rows}


def main() -> None:
    folder = Path(sys.argv[1])
    for kind in ("decode", "throughput"):
        pairs = [
            (rates(ours), rates(ours.with_name(ours.name.replace("ours", "peer"))))
            for ours in sorted(folder.glob(f"{kind}-ours-*.json"))
        ]
        for name in pairs[0][0]:
            own, peer = ([pair[side][name] for pair in pairs] for side in (0, 1))
            ratios = [mine / theirs for mine, theirs in zip(own, peer, strict=True)]
            rounds = ", ".join(f"{mine:.1f} / {theirs:.1f}" for mine, theirs in zip(own, peer, strict=True))
            print(f"{kind}, {name}: {rounds} tokens/s; median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
