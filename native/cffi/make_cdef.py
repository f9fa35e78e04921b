"""Derive the inputs of cffi from our C headers, so that no declaration is written twice.

The main module, hotmoe._native (API mode, abi3):

    python make_cdef.py --cdef cdef.txt --csrc csrc.c --callbacks callbacks.cdef base.h policy.h cache.h replay.h testing.h
    python -m cffi.gen_src read-sources hotmoe._native cdef.txt csrc.c _native.c

The headers lie in native/include/hotmoe, each includes those before it at most. _native.c is then compiled with
-I native/include and Py_LIMITED_API=0x030A0000, and linked with libhotmoe.

The simulated accelerator is a library of its own that is opened on demand (ABI mode): nothing is compiled, the
declarations become a small Python module:

    python make_cdef.py --abi-module hotmoe._sim_ffi --output _sim_ffi.py sim.h

A header is turned into a cdef by dropping comments, preprocessor lines, extern "C" braces and the export macros; cffi
then rejects whatever is not plain C. Outputs are touched only when their content changes.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path


def cdef_of(header: Path) -> str:
    """Return the declarations of a header, without anything that cffi does not parse.

    Args:
        header: One of our C headers.

    Raises:
        ValueError: If a preprocessor line other than an include, a conditional or a constant is found: dropping it
            could change what the declarations mean.
    """
    text = header.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    # what C++ alone sees
    text, n = re.subn(r"#ifdef __cplusplus\n.*?\n#endif\n?", "", text, flags=re.DOTALL)
    if n != 2:
        raise ValueError(f'{header}: expected one opening and one closing extern "C" block, found {n} __cplusplus blocks')
    lines = []
    for line in text.splitlines():
        if re.match(r"\s*#", line):
            if not re.match(r"\s*#\s*(ifndef|ifdef|if|else|elif|endif|include|define)\b", line) or line.endswith("\\"):
                raise ValueError(f"{header}: cannot turn this line into a cdef: {line.strip()}")
            continue
        line = re.sub(r"\bHOTMOE_(?:SIM_)?API\s+", "", line).rstrip()
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


def write_if_changed(path: Path, text: str) -> None:
    """Write a text file unless it holds that text already, so that a build tool sees no change where there is none."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cdef", type=Path, help="output: C declarations, for API mode")
    parser.add_argument("--csrc", type=Path, help="output: C prelude, for API mode")
    parser.add_argument("--callbacks", type=Path, help="declarations of functions that Python implements, for API mode")
    parser.add_argument("--abi-module", metavar="NAME", help="full name of the Python module to make, for ABI mode")
    parser.add_argument("--output", type=Path, help="output: that Python module")
    parser.add_argument("headers", type=Path, nargs="+", metavar="HEADER", help="a header in .../include/hotmoe")
    args = parser.parse_args()
    if bool(args.cdef) != bool(args.csrc) or bool(args.abi_module) != bool(args.output) or bool(args.cdef) == bool(args.output):
        parser.error("give --cdef and --csrc, or --abi-module and --output")

    cdef = "\n".join(f"// {header.name}\n{cdef_of(header)}" for header in args.headers)
    if args.cdef:
        if args.callbacks:
            cdef += args.callbacks.read_text(encoding="utf-8")
        write_if_changed(args.cdef, cdef)
        write_if_changed(args.csrc, "".join(f"#include <hotmoe/{header.name}>\n" for header in args.headers))
        return

    from cffi import FFI  # API mode's half needs no cffi here

    ffi = FFI()
    ffi.cdef(cdef)
    ffi.set_source(args.abi_module, None)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_python_code(str(args.output))  # leaves the file alone if nothing changed


if __name__ == "__main__":
    main()
