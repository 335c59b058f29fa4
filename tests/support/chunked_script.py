"""Packed training with and without chunks; run by torchrun: ``chunked_script.py FOLDER '[[model, stage, options], ...]'``.

Each case runs twice; the results say how many losses ran in chunks, and how often the head's weight was gathered for it.
"""

import json
import sys

from tests.support.packing_script import leave, run
from ullage.training.loss.lazy_logits import HeadCall


def count_losses():
    """A list that grows by the head's weight's size in each loss that runs in chunks."""
    seen, loss = [], HeadCall.loss

    def counting(call, logits, labels):
        result = loss(call, logits, labels)
        seen.append(logits.words)
        return result

    HeadCall.loss = counting
    return seen


def main():
    folder, cases = sys.argv[1], json.loads(sys.argv[2])
    seen, results = count_losses(), []
    for name, stage, options in cases:
        pair = {}
        for chunked in (False, True):
            seen.clear()
            found = run(name, folder, stage, packing_chunked_loss=chunked, **options)
            kept = {key: found[key] for key in ("losses", "norms", "eval_loss", "real", "planned")}
            pair[str(chunked)] = {**kept, "chunked": len(seen)}
        results.append(pair)
    leave(folder, results)


if __name__ == "__main__":
    main()
