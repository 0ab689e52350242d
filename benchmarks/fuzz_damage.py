"""Single flipped bits, and files cut off or deleted, in checkpoints of every kind: who notices, and who does not.

    python benchmarks/fuzz_damage.py [--flips N] [--seed N] [--variant NAME] [--directory DIR]

Each variant of the writer saves one state that holds everything. Of each checkpoint single bits are flipped, and every
file is cut off and deleted, one at a time; after each, six readers restore it (this package onto the same mesh, resharded,
replicated and to NumPy; stock Orbax without and with a target) and `verify` looks at it. The program counts what came
of it, explains what was harmless, lists what breaks the promise (see `breaches` in `tests/damage.py`) and fails where
anything does.

The checkpoints are small; put `--directory` where files are memory. A seed chooses the same damage as long as the
checkpoint has the same bytes, which it does but for times and the names of OCDBT's files.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import damage
import damage_trials


def main() -> int:
    parser = argparse.ArgumentParser(description="What becomes of damaged checkpoints.")
    parser.add_argument("--flips", type=int, default=600, help="bits to flip, in all variants together (default 600)")
    parser.add_argument("--no-losses", action="store_true", help="leave out files that are cut off or deleted")
    parser.add_argument("--seed", type=int, default=0, help="what is chosen (default 0)")
    parser.add_argument("--variant", choices=damage_trials.VARIANTS, action="append", help="only this one; repeatable")
    parser.add_argument("--directory", help="where to write; the system's temporary directory without it")
    arguments = parser.parse_args()
    variants = arguments.variant or list(damage_trials.VARIANTS)

    def choose(contents: damage.Contents, rng: random.Random) -> list[damage.Damage]:
        losses = [] if arguments.no_losses else damage.losses(contents, rng)
        return damage.flips(contents, -(-arguments.flips // len(variants)), rng) + losses

    outcomes = []
    for name in variants:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            variant = damage_trials.VARIANTS[name]
            found = damage_trials.trials(name, variant, pathlib.Path(directory), choose, arguments.seed)
        slowest, what = max(
            (reading.seconds, f"{reader}, {outcome.damage}")
            for outcome in found
            for reader, reading in outcome.readings.items()
        )
        seconds = time.perf_counter() - start
        print(f"{name}: {len(found)} damages in {seconds:.0f} s; slowest {slowest:.1f} s, {what}", flush=True)
        outcomes += found
    print("", damage.table(outcomes), sep="\n")
    return 1 if any(map(damage.breaches, outcomes)) else 0


if __name__ == "__main__":
    sys.exit(main())
