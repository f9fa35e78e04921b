"""All of upstream's tests that concern us, from one command.

Usage: python -m tests.upstream.run [--only stock,ops,archs,python] [--stock FOLDER] [--patched FOLDER]

Needs the installed package (make build). Builds an unpatched and a patched tree first, each in a folder of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .archs import check_archs
from .build import ROOT, BuildError, build_trees
from .ops import check_ops
from .python_suite import check_python_suite
from .section import Section
from .stock import check_stock

PARTS = ("stock", "ops", "archs", "python")


def timed(part: Callable[[], Section]) -> Section:
    """Run a part, print its table and return it."""
    start = time.monotonic()
    section = part()
    section.seconds = time.monotonic() - start
    print(f"\n== {section.title}\n", *section.lines, sep="\n", flush=True)
    return section


def main() -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Run upstream's tests on the patched llama.cpp.")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, separated by commas, of {', '.join(PARTS)}")
    parser.add_argument("--stock", type=Path, default=ROOT / "build-stock", help="build folder of the unpatched tree")
    parser.add_argument("--patched", type=Path, default=ROOT / "build-upstream", help="build folder of the patched tree")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")

    start = time.monotonic()
    print("building the unpatched and the patched tree (minutes at first, seconds later)", flush=True)
    try:
        trees = build_trees(args.stock.resolve(), args.patched.resolve())
    except BuildError as error:
        print(f"tests/upstream: {error}", file=sys.stderr)
        return 1
    built = time.monotonic() - start

    parts: dict[str, Callable[[], Section]] = {
        "stock": lambda: check_stock(trees, args.patched / "differences"),
        "ops": lambda: check_ops(trees),
        "archs": lambda: check_archs(trees),
        "python": lambda: check_python_suite(trees.sdist, args.patched.resolve()),
    }
    sections = [timed(parts[name]) for name in PARTS if name in wanted]

    print(f"\n== Summary (build {built:.0f} s)\n")
    for section in sections:
        verdict = "FAILED" if section.failures else "ok"
        print(f"  {verdict:6s} {section.seconds:5.0f} s  {section.title}\n                 {section.summary}")
        for failure in section.failures:
            print(f"                 - {failure}")
    return 1 if any(section.failures for section in sections) else 0


if __name__ == "__main__":
    sys.exit(main())
