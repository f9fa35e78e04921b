"""The name llama_cpp for the layer inside hotmoe, with hotmoe's `Llama` in the place of the layer's own."""

import importlib
import pkgutil
import sys

import hotmoe
from hotmoe._vendor import llama_cpp as _layer

for _module in pkgutil.iter_modules(_layer.__path__):
    if _module.name != "mtmd_cpp":  # its library need not be built
        sys.modules[f"{__name__}.{_module.name}"] = importlib.import_module(f"{_layer.__name__}.{_module.name}")

globals().update({name: value for name, value in vars(_layer).items() if not name.startswith("__")})
__version__ = _layer.__version__
Llama = hotmoe.Llama
