"""Random damage to the files of every kind of artifact: a command refuses it in one sentence, or gives the same result.

python -m tests.damage.campaign --damages 500 --seed 1
"""

from __future__ import annotations

import argparse
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.damage.workspace import Ended, Workspace

KINDS = ("flip a bit", "cut short", "zero a block", "swap files", "delete")
MAX_ZEROED = 512
MAY_BE_MISSING = ("plan.trials", "steps")  # a cache; records of the steps that ran
SLOW = ("train 2 ranks", "run")  # start processes: one turn in five


@dataclass(frozen=True)
class Case:
    """What was done to which file, and how the command took it."""

    command: str
    folder: str
    file: str
    kind: str
    outcome: str  # "refused", "same result", or what is wrong
    said: str = ""

    @property
    def is_fine(self) -> bool:
        return self.outcome in ("refused", "same result")


@contextmanager
def damaged(file: Path, kind: str, others: Sequence[Path], draw: random.Random) -> Iterator[str]:
    """The file, changed for as long as the block runs; gives what was done."""
    before = file.read_bytes()
    what, restored = kind, {file: before}
    place = draw.randrange(max(1, len(before)))
    if kind == "flip a bit" and before:
        bit = draw.randrange(8)
        file.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
        what = f"{kind} ({place}, {bit})"
    elif kind == "cut short":
        file.write_bytes(before[:place])
        what = f"{kind} ({place} of {len(before)} bytes)"
    elif kind == "zero a block":
        size = min(MAX_ZEROED, len(before) - place)
        file.write_bytes(before[:place] + bytes(size) + before[place + size :])
        what = f"{kind} ({place}, {size} bytes)"
    elif kind == "swap files" and others:
        other = draw.choice(others)
        restored[other] = other.read_bytes()
        file.write_bytes(restored[other])
        other.write_bytes(before)
        what = f"{kind} ({other.name})"
    else:
        file.unlink()
        what = "delete"
    try:
        yield what
    finally:
        for path, content in restored.items():
            path.write_bytes(content)


def judge(ended: Ended, expected: Ended) -> tuple[str, str]:
    if ended.code == 0:
        return ("same result" if ended.result == expected.result else "unnoticed"), ""
    is_sentence = ended.code == 2 and ended.said and "\n" not in ended.said and "Traceback" not in ended.said
    return ("refused" if is_sentence else f"exit {ended.code}"), ended.said


def run_campaign(
    work: Workspace, num_damages: int, *, seed: int, commands: Sequence[str] | None = None
) -> Iterator[Case]:
    """Damage after damage, each to a random file that a command reads; commands take turns."""
    draw = random.Random(seed)
    names = list(commands or work.commands)
    expected = {name: work.run(name) for name in names}
    for name, ended in expected.items():
        assert ended.code == 0, (name, ended.said)
        assert work.run(name).result == ended.result, f"{name} gives another result each time"
    turns = [name for turn in range(5) for name in names if turn == 0 or name not in SLOW]
    for number in range(num_damages):
        name = turns[number % len(turns)]
        folder = draw.choice(work.commands[name][0])
        files = work.files(folder)
        file, kind = draw.choice(files), draw.choice(KINDS)
        if kind == "delete" and file.parent.name in MAY_BE_MISSING:
            kind = "flip a bit"
        with damaged(file, kind, [path for path in files if path != file], draw) as what:
            try:
                outcome, said = judge(work.run(name), expected[name])
            except BaseException as error:  # noqa: BLE001  whatever the command let through
                outcome, said = "traceback", "".join(traceback.format_exception(error))[-2000:]
        yield Case(name, folder, str(file.relative_to(work.folder)), what, outcome, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commands", nargs="*")
    parser.add_argument("--verbose", action="store_true", help="Print every case, not only the wrong ones.")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="recmill-damage-") as folder:
        work = Workspace(Path(folder))
        work.build()
        for case in run_campaign(work, options.damages, seed=options.seed, commands=options.commands):
            counts[case.command, case.outcome] += 1
            if options.verbose or not case.is_fine:
                print(f"{case.command}: {case.kind} in {case.file}: {case.outcome}\n{case.said}\n", flush=True)
    outcomes = sorted({outcome for _, outcome in counts})
    print(f"{'command':20}" + "".join(f"{outcome:>14}" for outcome in outcomes))
    for name in dict.fromkeys(name for name, _ in counts):
        print(f"{name:20}" + "".join(f"{counts[name, outcome]:14}" for outcome in outcomes))
    totals = [sum(count for (_, own), count in counts.items() if own == outcome) for outcome in outcomes]
    print(f"{'all':20}" + "".join(f"{total:14}" for total in totals))


if __name__ == "__main__":
    main()
