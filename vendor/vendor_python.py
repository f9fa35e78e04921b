"""Copy llama-cpp-python's Python layer into our package, as pip does with its own ``_vendor``.

The layer comes from the same sdist as llama.cpp (``vendor/fetch.py`` unpacks it), so it fits our libraries exactly. Three
kinds of change are made, each of which fails loudly if the pinned source no longer matches it:

- imports of the top-level package ``llama_cpp`` become relative, so that an installed llama-cpp-python and ours can live
  in one process;
- libraries come from ``hotmoe/lib`` by absolute path, through ``hotmoe._libs``; no environment variable is read;
- ``server/`` (needs web packages of its own) and ``llava_cpp.py`` (its library is gone upstream) are left out.

The destination belongs to the build and is never committed. Files whose content is right already are not touched; what
an earlier version of this script left there is removed.

Usage: python vendor/vendor_python.py DESTINATION      for example build/python/hotmoe/_vendor
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "upstream" / "llama_cpp"
LICENSE = HERE / "upstream" / "LICENSE.md"
LOCK = HERE / "lock.json"

LEFT_OUT = ("server/", "llava_cpp.py")

VENDOR_INIT = '"""Third-party packages that are part of this one; see the licence file in each."""\n'

LOADER = '''\
# hotmoe: libraries come from hotmoe/lib, by absolute path; no environment variable is read.
def load_shared_library(lib_base_name: str, base_path: Any = None):
    """Load one of hotmoe's own libraries ("llama", "ggml", "mtmd", ...)."""
    from hotmoe import _libs

    return _libs.load(lib_base_name)


'''

# file -> (regular expression, replacement, number of matches)
Rewrite = tuple[str, str, int]

SUBMODULES = r"import llama_cpp\.(\w+) as (\w+)\n"
RELATIVE = r"from . import \1 as \2\n"

REWRITES: dict[str, list[Rewrite]] = {
    "_ctypes_extensions.py": [
        (r"# Load the library\ndef load_shared_library\(.*?\n(?=# ctypes sane type hint helpers\n)", LOADER, 1),
        (r"import sys\nimport os\n", "", 1),
        (r"import pathlib\n", "", 1),
        (r"    List,\n", "", 1),
        (r'\n_EMSCRIPTEN_SIDE_MODULE_SUFFIX = "[^"\n]+"\n\n', "", 1),
    ],
    "_ggml.py": [
        (SUBMODULES, RELATIVE, 1),
        (r"import os\nimport pathlib\n\n", "", 1),
        (r"libggml_base_path = [^\n]+\n", "", 1),
        (r'load_shared_library\("ggml", libggml_base_path\)', 'load_shared_library("ggml")', 1),
    ],
    "_internals.py": [(SUBMODULES, RELATIVE, 1)],
    "_logger.py": [(r"import llama_cpp\n", "from . import llama_cpp\n", 1)],
    "llama.py": [
        (SUBMODULES, RELATIVE, 3),
        (r"from llama_cpp\.llama_speculative import", "from .llama_speculative import", 1),
    ],
    "llama_cache.py": [
        (r"import llama_cpp\.llama\n", "from . import llama as _llama\n", 1),
        (r"\bllama_cpp\.llama\.", "_llama.", 10),
    ],
    "llama_chat_format.py": [(SUBMODULES, RELATIVE, 6)],
    "llama_cpp.py": [
        (r"from llama_cpp\._ctypes_extensions import \(", "from ._ctypes_extensions import (", 2),
        (r"_override_base_path = os\.environ.*?\n\)\n", "", 1),
        (r"load_shared_library\(_lib_base_name, _base_path\)", "load_shared_library(_lib_base_name)", 1),
        (r"import os\nimport ctypes\nimport pathlib\n", "import ctypes\n", 1),
    ],
    "llama_tokenizer.py": [
        (r"import llama_cpp\nfrom llama_cpp\.llama_types import", "from . import llama as _llama\nfrom .llama_types import", 1),
        (r"\bllama_cpp\.Llama\b", "_llama.Llama", 2),
    ],
    "mtmd_cpp.py": [
        (SUBMODULES, RELATIVE, 1),
        (r"from llama_cpp\._ctypes_extensions import \(", "from ._ctypes_extensions import (", 2),
        (r"_libmtmd_override_path = os\.environ.*?\n\)\n", "", 1),
        (r"load_shared_library\(_libmtmd_base_name, _libmtmd_base_path\)", "load_shared_library(_libmtmd_base_name)", 1),
        (r"import os\nimport warnings\n", "import warnings\n", 1),
        (r"import pathlib\n", "", 1),
    ],
}


class VendorError(Exception):
    """The pinned source is not what this script was written for; the message names the place."""


def rewrite(name: str, text: str) -> str:
    """Return the text of one upstream file with its rewrites applied.

    Raises:
        VendorError: If a rewrite matches more or less often than it should.
    """
    for pattern, replacement, expected in REWRITES.get(name, []):
        text, n = re.subn(pattern, replacement, text, flags=re.DOTALL)
        if n != expected:
            raise VendorError(
                f"llama_cpp/{name}: expected {expected} match(es) of {pattern!r}, found {n}. The pinned llama-cpp-python "
                f"has changed: bring REWRITES in vendor/vendor_python.py up to date"
            )
    return text


def check(name: str, text: str) -> None:
    """Verify that a rewritten module names neither the top-level package nor the environment.

    Raises:
        VendorError: If it does; a rewrite is missing then.
    """

    def refuse(node: ast.AST, what: str) -> None:
        line = getattr(node, "lineno", 0)
        raise VendorError(f"llama_cpp/{name}:{line}: {what} is left over: add a rewrite to vendor/vendor_python.py")

    tree = ast.parse(text, name)
    bound = {  # names that a module-level or local import binds
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "llama_cpp" for alias in node.names):
            refuse(node, "an import of the top-level llama_cpp")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] == "llama_cpp":
            refuse(node, "an import of the top-level llama_cpp")
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            refuse(node, "a use of environment variables")
        if isinstance(node, ast.Name) and node.id in ("llama_cpp", "os", "sys", "pathlib") and node.id not in bound:
            refuse(node, f"the name {node.id!r}, which nothing imports any more,")


def vendor(source: Path, license_file: Path, lock: Path, destination: Path) -> int:
    """Bring the vendored package `llama_cpp` in `destination` up to date.

    Returns:
        Number of files written or removed.

    Raises:
        VendorError: If the source is missing or does not match.
    """
    if not (source / "__init__.py").exists() or not license_file.exists():
        raise VendorError(f"{source} is missing or incomplete. Run: python vendor/fetch.py")
    version = json.loads(lock.read_text(encoding="utf-8"))["version"]
    files: dict[str, bytes] = {"LICENSE.md": license_file.read_bytes()}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_dir() or "__pycache__" in path.parts or name.startswith(LEFT_OUT):
            continue
        if path.suffix != ".py":
            files[name] = path.read_bytes()
            continue
        text = rewrite(name, path.read_text(encoding="utf-8"))
        check(name, text)
        files[name] = text.encode("utf-8")
    if missing := sorted(REWRITES.keys() - files.keys()):
        raise VendorError(f"llama_cpp/{missing[0]} is not in {source}, but vendor/vendor_python.py rewrites it")
    if f'__version__ = "{version}"' not in files["__init__.py"].decode("utf-8").splitlines():
        raise VendorError(f"{source / '__init__.py'} does not say {version}, the version in {lock}. Run: python vendor/fetch.py")

    changed = 0
    package = destination / "llama_cpp"
    for path in sorted(package.rglob("*")) if package.exists() else []:
        if path.is_file() and "__pycache__" not in path.parts and path.relative_to(package).as_posix() not in files:
            path.unlink()
            changed += 1
    for path, content in [
        (destination / "__init__.py", VENDOR_INIT.encode("utf-8")),
        *((package / name, content) for name, content in files.items()),
    ]:
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            changed += 1
    return changed


def main() -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("destination", type=Path, help="folder to make the package llama_cpp in, ending in _vendor")
    args = parser.parse_args()
    destination: Path = args.destination
    try:
        if destination.name != "_vendor":  # what does not belong there is removed
            raise VendorError(f"the destination has to end in _vendor, not {destination}")
        changed = vendor(SOURCE, LICENSE, LOCK, destination)
    except (VendorError, OSError) as error:
        print(f"vendor_python: {error}", file=sys.stderr)
        return 1
    print(f"vendor_python: {destination} is up to date ({changed} files changed)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
