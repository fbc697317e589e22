"""Faults at random moments of every command: python -m tests.faults.campaign [--short] [--seed N] [--faults N]

After each fault a command has given the right result or one clear sentence; the same command again gives the right
result; and nothing is left behind: no process, no temporary file, no half-written output that is read as whole.
With --sweep, disks fail at every change of files instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.faults.commands import make_inputs, why_left_out
from tests.faults.faults import FAULTS, MISSED, ONLY, Baseline, obstacle, signature
from tests.faults.machine import control_group, peak_bytes
from tests.faults.processes import Command, Process, load_everything, output_file, start, survivors

SHORT = {"kill": 100, "stop": 13, "stop for good": 3, "disk full": 16, "read-only disk": 16, "memory limit": 16}
RARE = {"clock jump": 7, "network lost": 1, "object store": 8, "MLflow database": 1, "MLflow server": 1}
MAX_MISSES = 8
MAX_SECONDS = 1800  # of an undisturbed command, on a busy machine
LONG = 5  # times as many in the long form
DISKS = ("disk full", "read-only disk")
FINE = ("right result", "one sentence", "killed")


@dataclass(frozen=True)
class Case:
    number: int
    fault: str
    command: str
    seed: int
    at: int = 0  # change among the files; 0: drawn


@dataclass(frozen=True)
class Outcome:
    case: Case
    what: str  # was done
    outcome: str
    rerun: str
    problem: str = ""
    said: str = ""
    seconds: float = 0.0

    @property
    def is_fine(self) -> bool:
        return self.outcome in FINE and self.rerun in ("", "right result") and not self.problem


def measure(command: Command, folder: Path) -> Baseline:
    """Run a command undisturbed."""
    name, changes, disk_bytes = f"recmill-faults-{os.getpid()}-{folder.name}", 0, 0
    has_groups = not obstacle("memory limit")
    with control_group(name) if has_groups else contextlib.nullcontext(lambda: None) as join:
        process = start(command, folder, before=join)
        last = signature(folder)[0]
        while process.poll() is None and time.monotonic() < process.started + MAX_SECONDS:
            names, num_bytes = signature(folder)
            disk_bytes, changes, last = max(disk_bytes, num_bytes), changes + (names != last), names
            time.sleep(0.005)
        seconds = time.monotonic() - process.started
        memory_bytes = peak_bytes(name) if has_groups else 0
    assert process.status == 0, (command.name, process.status, process.said())
    result = command.result(str(folder / "out"), process.said("stdout"))
    return Baseline(result=result, seconds=seconds, changes=changes, disk_bytes=disk_bytes, memory_bytes=memory_bytes)


def judge(process: Process, command: Command, baseline: Baseline, out: str) -> tuple[str, str]:
    code, said = process.status, process.said().strip()
    if code is None:
        return "hangs", said
    if code == 0:
        try:
            found = command.result(out, process.said("stdout"))
        except Exception as error:  # noqa: BLE001  whatever cannot be read
            return f"exit 0, but {type(error).__name__}: {error}", said
        return ("right result" if json.dumps(found) == json.dumps(baseline.result) else "another result"), said
    if code == -signal.SIGKILL:
        return "killed", said
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("recmill:")]
    if code in (1, 2) and len(errors) == 1 and lines[-1:] == errors and "Traceback" not in said:
        return "one sentence", said
    return f"exit {code}", said


def run_case(case: Case, command: Command, baseline: Baseline, folder: Path) -> Outcome:
    started, draw = time.monotonic(), random.Random(case.seed)
    limit = 10 * baseline.seconds + 120
    with FAULTS[case.fault](folder, replace(baseline, at=case.at), draw) as setting:
        out = setting.out or str(folder / "out")
        options: dict[str, Any] = {"out": setting.out, "environment": setting.environment, "more": setting.arguments}
        process = start(command, folder, prefix=setting.prefix, before=setting.before, **options)
        what = setting.disturb(process)
        process.wait(limit)
        outcome, said = judge(process, command, baseline, out)
        problem = end_family(process) if process.status is None else wait_for_end(process)
        setting.heal()
        rerun = ""
        if outcome != "right result":
            again = start(command, folder, **(options if setting.out else {"more": setting.arguments}))
            again.wait(limit)
            rerun, said_again = judge(again, command, baseline, out)
            problem = problem or (end_family(again) if again.status is None else wait_for_end(again))
            said += f"\n-- again: {said_again}" if rerun != "right result" else ""
        problem = problem or left_behind(folder)
    return Outcome(case, what, outcome, rerun, problem, said[-3000:], time.monotonic() - started)


def end_family(process: Process) -> str:
    for other in [*process.family(), *survivors(process)]:
        with contextlib.suppress(Exception):
            other.kill()
    process.wait(10)
    return "did not end"


def wait_for_end(process: Process) -> str:
    """ "" once no process of the case is left."""
    deadline = time.monotonic() + 25
    while left := survivors(process):
        if time.monotonic() > deadline:
            shown = ", ".join(" ".join(other.cmdline())[:200] for other in left)
            for other in left:
                other.kill()
            return f"process left behind: {shown}"
        time.sleep(0.05)
    return ""


def left_behind(folder: Path) -> str:
    """Names of temporary files and folders that nobody uses any more."""
    names = [path for path in signature(folder)[0] if Path(path).name.startswith((".", "recmill-tmp"))]
    left = [path for path in names if path.endswith((".tmp", ".old")) or "recmill-tmp" in Path(path).name]
    return f"left behind: {', '.join(sorted(left)[:5])}" if left else ""


def draw_cases(commands: dict[str, Command], counts: dict[str, int], seed: int) -> list[Case]:
    """So many faults of each kind, over all commands that they are about."""
    draw, cases = random.Random(seed), []
    for fault, count in counts.items():
        names = [name for name in commands if name in ONLY.get(fault, commands)]
        if fault == "kill":
            names = [name for name in names for _ in range(commands[name].kills)]
        elif fault not in ONLY:
            names = [name for name in names if name != "run"] or names  # slow, and made of the others
        if names:
            first = draw.randrange(len(names))  # fewer faults than commands: other seeds disturb the other ones
            chosen = [names[(first + number * len(names) // count) % len(names)] for number in range(count)]
            cases += [(fault, name, draw.randrange(10**9)) for name in chosen]
    draw.shuffle(cases)
    return [Case(number, *case) for number, case in enumerate(cases)]


def run_campaign(work: Path, counts: dict[str, int], *, seed: int, commands: Sequence[str] = ()) -> Iterator[Outcome]:
    """The outcome of every fault, one after the other."""
    known = make_inputs(work / "inputs")
    chosen = {name: known[name] for name in commands or known if not why_left_out(name)}
    cases = draw_cases(chosen, {fault: n for fault, n in counts.items() if n and not obstacle(fault)}, seed)
    load_everything()
    baselines: dict[str, Baseline] = {}
    for case in cases:
        if case.command not in baselines:
            baselines[case.command] = measure(chosen[case.command], work / f"baseline-{case.command.replace(' ', '-')}")
        yield disturb(case, chosen[case.command], baselines[case.command], work)


def run_sweep(work: Path, kinds: Sequence[str], *, seed: int, commands: Sequence[str] = ()) -> Iterator[Outcome]:
    """A disk that fails at every change of files of every command, one after the other."""
    known, number = make_inputs(work / "inputs"), 0
    load_everything()
    for name in (name for name in commands or known if not why_left_out(name)):
        baseline = measure(known[name], work / f"baseline-{name.replace(' ', '-')}")
        for kind in kinds:
            for at in range(1, baseline.changes + 1):
                yield disturb(Case(number, kind, name, seed, at), known[name], baseline, work)
                number += 1


def disturb(case: Case, command: Command, baseline: Baseline, work: Path) -> Outcome:
    for attempt in range(MAX_MISSES):  # a command may end before the moment comes
        folder = work / f"case-{case.number:04d}-{attempt}"
        outcome = run_case(case, command, baseline, folder)
        if not outcome.what.endswith(MISSED) or case.at:
            break
        case = replace(case, seed=case.seed + 1)
    if outcome.is_fine:
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("stdout", "stderr"):
            output_file(folder, name).unlink(missing_ok=True)
    return outcome


def table(outcomes: Sequence[Outcome], skipped: dict[str, str]) -> list[str]:
    """One line per fault: how often, and how it ended."""
    lines = [f"{'fault':18}{'injected':>10}" + "".join(f"{name:>15}" for name in (*FINE, "rerun right", "wrong"))]
    for fault in dict.fromkeys(own.case.fault for own in outcomes):
        own = [entry for entry in outcomes if entry.case.fault == fault]
        counts = Counter(entry.outcome for entry in own if entry.is_fine)
        numbers = [*(counts[name] for name in FINE), sum(entry.rerun == "right result" for entry in own)]
        numbers.append(sum(not entry.is_fine for entry in own))
        lines.append(f"{fault:18}{len(own):>10}" + "".join(f"{number:>15}" for number in numbers))
    return [*lines, *(f"{fault:18}skipped: {why}" for fault, why in skipped.items())]


def write_results(
    options: argparse.Namespace, outcomes: Sequence[Outcome], skipped: dict[str, str], seconds: float
) -> list[str]:
    """Write the table and all cases so far; returns the table."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_minutes = sum(own.ru_utime + own.ru_stime for own in used) / 60
    lines = table(outcomes, skipped)
    load = os.getloadavg()[2]
    lines.append(
        f"\n{len(outcomes)} faults in {seconds / 60:.1f} minutes, {cpu_minutes:.1f} of CPU time; load {load:.1f}"
    )
    document = {"seed": options.seed, "minutes": seconds / 60, "cpu_minutes": cpu_minutes, "load": load, "table": lines}
    document |= {"skipped": skipped, "is_green": all(outcome.is_fine for outcome in outcomes)}
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps({**document, "cases": [asdict(own) for own in outcomes]}, indent=1))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="The short form: 100 kills and 82 other faults.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, help="So many faults in all, in the proportions of the short form.")
    parser.add_argument("--sweep", action="store_true", help="Disks that fail at every change of files, not at random.")
    parser.add_argument("--kinds", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--commands", nargs="*", default=[])
    parser.add_argument("--json", default="build/faults.json", help="Where the table and all cases are written.")
    parser.add_argument("--verbose", action="store_true", help="Print every case, not only the wrong ones.")
    options = parser.parse_args()
    counts = {kind: count for kind, count in {**SHORT, **RARE}.items() if kind in options.kinds}
    if options.faults:
        scale = options.faults / sum(counts.values())
        counts = {kind: max(1, round(count * scale)) for kind, count in counts.items()}
    elif not options.short:
        counts = {kind: LONG * count for kind, count in counts.items()}
    skipped = {kind: obstacle(kind) for kind in counts if obstacle(kind)}
    skipped |= {name: why for name in options.commands or ["serve"] if (why := why_left_out(name))}
    started, outcomes = time.monotonic(), []
    work = Path(tempfile.mkdtemp(prefix="recmill-faults-"))
    if options.sweep:
        kinds = [kind for kind in DISKS if kind in options.kinds and not obstacle(kind)]
        found = run_sweep(work, kinds, seed=options.seed, commands=options.commands)
    else:
        found = run_campaign(work, counts, seed=options.seed, commands=options.commands)
    for outcome in found:
        outcomes.append(outcome)
        if options.verbose or not outcome.is_fine:
            case = outcome.case
            words = [f"{case.number}: {case.fault}, {case.command}: {outcome.what}: {outcome.outcome}"]
            words += [f"again: {outcome.rerun}"] * bool(outcome.rerun) + [outcome.problem] * bool(outcome.problem)
            words += [f"seed {case.seed}", f"{outcome.seconds:.0f} s"]
            print("; ".join(words), flush=True)
            if not outcome.is_fine:
                print(outcome.said, flush=True)
        write_results(options, outcomes, skipped, time.monotonic() - started)
    lines = write_results(options, outcomes, skipped, time.monotonic() - started)
    print("\n".join(lines))
    is_green = all(outcome.is_fine for outcome in outcomes)
    if is_green:
        shutil.rmtree(work, ignore_errors=True)
    else:
        print(f"what the wrong cases left is in {work}", file=sys.stderr)
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
