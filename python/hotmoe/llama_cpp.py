"""The namespace of llama-cpp-python, with hotmoe's `Llama` in place of its own.

    import hotmoe.llama_cpp as llama_cpp                                         # instead of: import llama_cpp
    from hotmoe.llama_cpp.llama_speculative import LlamaPromptLookupDecoding     # its modules, too

It is the copy that hotmoe brings along; an installed llama-cpp-python is neither needed nor touched.
"""

from __future__ import annotations

import sys

from ._vendor import llama_cpp as _vendored
from ._vendor.llama_cpp import *  # noqa: F403 - the whole namespace is the point
from ._vendor.llama_cpp import __version__
from .llama import Llama

__all__ = [*(name for name in vars(_vendored) if not name.startswith("_")), "Llama", "__version__"]

# "import hotmoe.llama_cpp.x" finds the modules that are loaded already, the same objects: a second copy of them would
# have classes that isinstance() does not recognise
for _name, _module in list(sys.modules.items()):
    if _name.startswith(_vendored.__name__ + "."):
        sys.modules[__name__ + _name[len(_vendored.__name__) :]] = _module
